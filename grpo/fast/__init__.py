"""Faster ways to run a model and to sample from it, with the same numbers up to rounding.

The folder may be deleted. It plugs in where a policy is loaded: `accelerate` gives the policy a
forward pass and a decoder in place of the plain ones.

    accelerate      the fastest path that agrees with the unmodified model
    forward         the paths: fast and shared
    prefix_cache    shared and fast, in a rollout: the keys of a prompt are kept once
    packing         shared and fast, in an update: a micro-batch as one row without padding
    llama           our forward pass for Llama-like models; merged_linear, update_kernels (Triton)
    decoder         a rollout pass by pass; speculative says what is drafted
    cuda_decoder    its passes on a GPU, as CUDA graphs; cuda_layers and decode_kernels (Triton)
"""

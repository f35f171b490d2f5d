"""Faster ways to run a model and to sample from it, with the same numbers up to rounding.

The folder may be deleted. It plugs in where a policy is loaded: `accelerate` gives the policy a
`FastForward` and a `FastDecoder` in place of the plain ones.

    accelerate      the paths, fast and shared, and the choice of one that agrees with the model;
                    in a rollout the keys of a prompt are kept once for all its completions
    packing         in an update: a micro-batch as one row without padding
    llama           our forward pass for Llama-like models; merged_linear, update_kernels (Triton)
    decoder         a rollout pass by pass, on a GPU as CUDA graphs; speculative: what is drafted
    cuda_layers     the captured passes of a Llama-like model; decode_kernels (Triton)
"""

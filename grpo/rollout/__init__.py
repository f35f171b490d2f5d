"""How completions are sampled from the policy.

    budget         how many new tokens a completion may take
    request        what a rollout and a decoder are asked for
    generate       the rollout: passes of a decoder until every completion has ended
    sampling       from logits to tokens, by counter-based random numbers
    speculative    drafts from the task's guesses, and how long they should be
    eager_decoder  one pass by the model's own operations, for every model and device
    cuda_decoder   the same for Llama-like models on a GPU; cuda_graph, cuda_layers, cuda_memory and
                   kernels are its parts
    memory         how many prompts are answered at a time

Shape letters are those of `grpo.model`, unless a module says otherwise.
"""

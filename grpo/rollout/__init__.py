"""How completions are sampled from the policy.

    budget    how many new tokens a completion may take
    generate  the rollout: what it is asked for, and the plain decoder
    sampling  from logits to tokens, by counter-based random numbers

Shape letters are those of `grpo.model`, unless a module says otherwise.
"""

"""How completions are sampled from the policy.

    generate  the rollout: what it is asked for, the plain decoder, and token budgets
    sampling  from logits to tokens, by counter-based random numbers

Shape letters are those of `grpo.model`, unless a module says otherwise.
"""

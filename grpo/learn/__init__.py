"""How groups of scored completions change the policy.

    advantages   rewards to advantages, for whole completions or for single tokens
    batch        groups to micro-batches of tensors, and the log-probabilities of their completions
    loss         log-probabilities and advantages to the loss, built in or a user's own
    optimizer    gradients of all micro-batches and ranks to new weights; the learning rate
    update       one step of GRPO, and one step of imitation

Shape letters are those of `grpo.model`, unless a module says otherwise.
"""

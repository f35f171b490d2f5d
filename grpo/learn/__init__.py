"""How groups of scored completions change the policy.

    advantages, credit      rewards to advantages, for whole completions or for single tokens
    batch                   groups to micro-batches of tensors
    logprobs                hidden states to log-probabilities of the completions' tokens
    loss                    log-probabilities and advantages to the loss
    own_loss, enumeration   a user's own loss, and the exact test of any loss
    optimizer               gradients of all micro-batches and ranks to new weights
    schedule, loss_scale    the learning rate, and the factor on the loss in float16
    update, imitate         one step of GRPO, and one step of imitation
    oom_retry               updates that ran out of GPU memory, repeated with less

Shape letters are those of `grpo.model`. Used here: R rows (completions), T tokens of a row, padded;
M tokens of all completions, without padding; N tokens; P prompts; V vocabulary; E hidden size. A
lower-case n is the part of N that is computed at once.
"""

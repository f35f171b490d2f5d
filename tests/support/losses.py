"""The functions of `grpo.learn.loss` with plain arguments, for tests that compute one loss."""

from grpo.learn import loss
from grpo.learn.loss import LossInputs, LossSettings


def inputs_and_settings(kind, logp_RT, old_RT, advantages, mask_RT, weights_R, **others):
    """Return the two records that the functions take."""
    settings = {name: others.pop(name) for name in ("clip_low", "clip_high")}
    settings["beta"] = others.pop("beta", 0.0)
    inputs = LossInputs(logp_RT, old_RT, advantages, mask_RT, weights_R, **others)
    return inputs, LossSettings(kind, **settings)


def step_loss(*arguments, **others):
    """Return `grpo.learn.loss.step_loss` of a kind, tensors, clip bounds and beta."""
    return loss.step_loss(*inputs_and_settings(*arguments, **others))


def policy_loss(*arguments, **others):
    """Return `grpo.learn.loss.policy_loss`, which needs no weights."""
    return loss.policy_loss(*inputs_and_settings(*arguments, None, **others))

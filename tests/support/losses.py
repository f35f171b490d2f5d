"""The functions of `grpo.learn.loss` with plain arguments, for tests that compute one loss."""

from grpo.learn import loss
from grpo.learn.loss import LossInputs, LossSettings


def inputs_and_settings(kind, *tensors, clip_low, clip_high, beta=0.0, **others):
    """Return the two records that the functions take: `LossInputs(*tensors, **others)`, and
    settings.
    """
    settings = LossSettings(kind, clip_low=clip_low, clip_high=clip_high, beta=beta)
    return LossInputs(*tensors, **others), settings


def step_loss(*arguments, sampled_R=None, **others):
    """Return `grpo.learn.loss.step_loss` of a kind, tensors, clip bounds and beta."""
    return loss.step_loss(*inputs_and_settings(*arguments, **others), sampled_R)

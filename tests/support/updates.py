"""Updates of the tiny model by settings given as keywords."""

import torch

from grpo.learn.batch import micro_batches
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import UpdateMemory, UpdateSettings
from grpo.learn.update import update as update_by

PROMPTS = [
    "Copy text A.\nA: the owl",
    "Copy A, then B.\nA: one two three four five six\nB: seven",
    "A",
]

HEAT = 0.75  # the temperature, which is the same in float32 and float64

WHOLE = 1 << 30  # tokens of a micro-batch, so that a step is one

SETTINGS = dict(beta=0.0, clip_low=0.2, clip_high=0.2, max_length=24, max_grad_norm=0.0)


def update(policy, optimizer, groups, *, micro_tokens=WHOLE, before=None, **settings):
    """One update by settings given as keywords."""
    memory = UpdateMemory(policy)
    memory.micro_tokens = micro_tokens
    return update_by(policy, optimizer, groups, UpdateSettings(**settings), memory, before)


def one_batch(groups):
    """The groups as one micro-batch."""
    (batch,) = micro_batches(groups, "dapo", max_length=24, device=torch.device("cpu"))
    return batch


def sgd(policy, rate):
    optimizer = Optimizer(policy.parameters, rate, dtype=policy.dtype)
    optimizer.inner = torch.optim.SGD(optimizer.masters, lr=rate)
    return optimizer


def loss_and_gradients(policy, groups, kind="dapo", micro_tokens=WHOLE, **settings):
    settings = SETTINGS | dict(kind=kind, micro_tokens=micro_tokens) | settings
    metrics = update(policy, sgd(policy, 0.0), groups, **settings)
    return metrics["loss"], [p.grad.clone() for p in policy.parameters]

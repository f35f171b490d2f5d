"""Imitation: one optimizer step towards right answers, by the cross-entropy of their tokens.

This is the update of GRPO for a single answer with advantage 1 and without the ratio. It shares the
batches, the packing, the log-probabilities and the optimizer. End tokens count.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.learn.batch import BatchSettings, MicroBatch, micro_batches
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import completion_logprobs, named_tensors
from grpo.model.finite import check_step
from grpo.model.matmul import low_precision_backward
from grpo.model.policy import Policy
from grpo.records import Group


@torch.enable_grad()  # the code of a user may have switched gradients off
def imitate(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    *,
    micro_tokens: int,
    max_grad_norm: float,
) -> dict[str, Any]:
    """Take one step towards the completions of `groups`, whose advantages are 1.

    Returns "loss" (nats a token) and "grad_norm" (before clipping). Each of several ranks takes
    some of the answers. Raises FloatingPointError if a weight or a moment is not finite after the
    step.
    """
    ranks = optimizer.ranks

    def run() -> list[Tensor]:
        batches = micro_batches(
            groups,
            # All tokens of the step have the same weight.
            BatchSettings("dapo", max_length=0, micro_tokens=micro_tokens),
            device=policy.device,
            rank=ranks.rank,
            ranks=ranks.size,
        )
        return [_backward(policy, optimizer, batch) for batch in batches]

    losses, grad_norm = optimizer.gradients(run, max_grad_norm)
    total = sum(ranks.gather([sum(loss.item() for loss in losses)]))
    optimizer.step(make_room=policy.free_decoder)
    check_step(optimizer.tensors().values(), partial(named_tensors, policy, optimizer), ranks)
    return {"loss": total, "grad_norm": grad_norm}


def _backward(policy: Policy, optimizer: Optimizer, batch: MicroBatch) -> Tensor:
    """Add the gradient of one micro-batch to that of the step; return its loss."""
    logp_RT, _ = completion_logprobs(policy, batch)
    loss = -(batch.weights_R[:, None] * logp_RT).sum()
    with low_precision_backward(policy.low_precision_backward):
        optimizer.backward(loss)
    return loss.detach()

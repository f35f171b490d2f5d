"""Imitation: one optimizer step towards right answers, by cross-entropy over their tokens, end
tokens included.

It shares batches, packing, log-probabilities and optimizer with the update of GRPO, of which it is
the case of one answer with advantage 1 and no ratio.
"""

from collections.abc import Sequence
from typing import Any

from grpo.learn.batch import micro_batches
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import completion_logprobs, named_tensors
from grpo.model.finite import check_step
from grpo.model.matmul import low_precision_backward
from grpo.model.policy import Policy
from grpo.records import Group


def imitate(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    *,
    micro_tokens: int,
    max_grad_norm: float,
) -> dict[str, Any]:
    """Take one step towards the completions of `groups`, whose advantages are 1; return loss (nats
    a token) and gradient norm.

    Of several ranks each takes a part of the answers. Raises FloatingPointError where weights or
    moments are no longer finite.
    """
    ranks = optimizer.ranks
    optimizer.clear()
    losses = []
    for batch in micro_batches(
        groups,
        "dapo",  # every token of the step counts the same
        micro_tokens=micro_tokens,
        max_length=0,
        device=policy.device,
        rank=ranks.rank,
        ranks=ranks.size,
    ):
        logp_RT, _ = completion_logprobs(policy, batch)
        loss = -(batch.weights_R[:, None] * logp_RT).sum()
        with low_precision_backward(policy.low_precision_backward):
            loss.backward()
        losses.append(loss.detach())

    total = sum(ranks.gather([sum(loss.item() for loss in losses)]))
    grad_norm = optimizer.collect(max_grad_norm)
    optimizer.step()
    check_step(named_tensors(policy, optimizer), ranks)
    return {"loss": total, "grad_norm": grad_norm}

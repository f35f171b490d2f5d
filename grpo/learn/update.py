"""One update of the policy from the groups of a step: log-probs, loss, gradient, optimizer.

Shapes: R rows (completions), T tokens, M tokens of all of them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.distributed import Ranks
from grpo.learn.batch import MicroBatch, micro_batches
from grpo.learn.logprobs import token_logprobs
from grpo.learn.loss import step_loss
from grpo.learn.optimizer import Optimizer
from grpo.model.finite import check_step
from grpo.model.matmul import low_precision_backward
from grpo.model.packed_attention import Packing, PaddedBatch
from grpo.model.policy import Policy
from grpo.records import Group


def completion_logprobs(
    policy: Policy,
    batch: MicroBatch,
    truncate: Callable | None = None,
    packing: Packing | PaddedBatch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions' tokens under the policy, (R, T),
    0 at padding.

    `packing` is that of the batch by `Policy.pack`, where it has been made already.

    The last token of the prompt predicts the first of the completion; the completion's last
    predicts nothing.
    """
    (R, T), places_M = batch.tokens_RT.shape, batch.places_M
    hidden_MH = policy.predict(packing or policy.pack(batch.prompts, batch.completions))
    logp_M, entropy_M = token_logprobs(
        hidden_MH,
        policy.head,
        batch.tokens_RT.take(places_M),
        batch.temperatures_R[places_M // T],
        truncate=truncate,
    )
    zeros = torch.zeros(R * T, device=places_M.device, dtype=logp_M.dtype)
    return zeros.scatter(0, places_M, logp_M).view(R, T), zeros.scatter(
        0, places_M, entropy_M
    ).view(R, T)


@dataclass(frozen=True)
class UpdateSettings:
    """How a step updates the policy.

    `kind` is a loss of `learn.loss.LOSSES`; `max_length` is the completion budget by which Dr. GRPO
    divides; `truncate` is the sampler's truncation, which the loss must share; a limit of 0 means
    none.
    """

    kind: str
    beta: float
    clip_low: float
    clip_high: float
    max_length: int
    max_grad_norm: float
    truncate: Callable | None = None
    importance_limit: float = 0.0
    parity_limit: float = 0.0


def update(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    settings: UpdateSettings,
    *,
    micro_tokens: int,
    before: dict[tuple[int, int], Tensor] | None = None,
) -> dict[str, Any]:
    """Take one optimizer step on `groups`, whose advantages are filled in.

    Returns means over the step's tokens: "loss", "grad_norm" (before clipping), "kl" (to the
    reference; only with `beta`), "entropy" (nats), "clip_ratio/low", "clip_ratio/high"; and how far
    the policy is from the sampler, which on the first pass over a rollout is rounding alone:
    "parity/max_abs_logprob_diff", "parity/kl", and "parity/worst", the three tokens that differ
    most. Micro-batches of at most `micro_tokens` tokens save memory and change no gradient. With
    several ranks each takes a part of the completions; gradients and figures are those of all.

    With an `importance_limit` the loss's ratio is that of the policy to itself in the first pass,
    and tokens are weighed by the truncated ratio of the latter to the sampler, min(p / q, limit)
    (https://fengyao.notion.site/off-policy-rl). `before` holds the first pass's log-probabilities
    by completion: an empty one is filled, and later passes use it.

    Raises FloatingPointError if the loss or the gradient is not finite or parity exceeds
    `parity_limit`, before the weights change; and if a weight or a moment is not finite after the
    step, before anything is written.
    """
    ranks = optimizer.ranks
    optimizer.clear()

    # Losses and log-probabilities stay on the device, so that the host queues every micro-batch
    # before it waits for the first.
    batches = micro_batches(
        groups,
        settings.kind,
        micro_tokens=micro_tokens,
        max_length=settings.max_length,
        device=policy.device,
        rank=ranks.rank,
        ranks=ranks.size,
    )
    seen = [_backward(policy, batch, settings, before) for batch in batches]

    figures = _figures(seen)
    if ranks.size > 1:
        figures = _of_all(ranks, *figures)
    total, sums, parity, worst = figures
    grad_norm = optimizer.collect(settings.max_grad_norm)

    _refuse_bad_step(settings, total, grad_norm, parity, worst)
    optimizer.step()
    check_step(named_tensors(policy, optimizer), ranks)

    return {
        "loss": total,
        "grad_norm": grad_norm,
        "parity/max_abs_logprob_diff": parity,
        "parity/worst": worst,
        **_means(sums, has_kl=settings.beta > 0),
    }


def _means(sums: Mapping[str, float], *, has_kl: bool) -> dict[str, float]:
    """Return means over the step's tokens, by the names of metrics."""
    names = {
        "entropy": "entropy",
        "clipped_low": "clip_ratio/low",
        "clipped_high": "clip_ratio/high",
        "parity": "parity/kl",
    }
    if has_kl:
        names["kl"] = "kl"
    return {metric: sums[name] / sums["tokens"] for name, metric in names.items()}


Seen = tuple[MicroBatch, Tensor, dict[str, Tensor], Tensor]  # batch, loss, its parts, logp_RT


def _backward(
    policy: Policy,
    batch: MicroBatch,
    settings: UpdateSettings,
    before: dict[tuple[int, int], Tensor] | None,
) -> Seen:
    """Add the gradient of one micro-batch to that of the step; return what its figures need."""
    packing = policy.pack(batch.prompts, batch.completions)

    reference_RT = None
    if settings.beta:
        with policy.reference() as reference:
            reference_RT, _ = completion_logprobs(reference, batch, settings.truncate, packing)

    logp_RT, entropy_RT = completion_logprobs(policy, batch, settings.truncate, packing)

    # The first pass's log-probabilities take the sampler's place in the ratio.
    old_RT, importance_RT = batch.old_RT, None
    if settings.importance_limit:
        assert before is not None
        old_RT = _remembered(before, batch, logp_RT.detach())
        importance_RT = (old_RT - batch.old_RT).exp().clamp(max=settings.importance_limit)

    loss, parts = step_loss(
        settings.kind,
        logp_RT,
        old_RT,
        batch.advantages,
        batch.mask_RT,
        batch.weights_R,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        beta=settings.beta,
        ref_RT=reference_RT,
        entropy_RT=entropy_RT,
        importance_RT=importance_RT,
    )
    with low_precision_backward(policy.low_precision_backward):
        loss.backward()
    return batch, loss.detach(), parts, logp_RT.detach()


def _refuse_bad_step(
    settings: UpdateSettings, total: float, grad_norm: float, parity: float, worst: list
) -> None:
    """Raise FloatingPointError, before a weight changes, where the step must not be taken."""
    for name, value in (("loss", total), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise FloatingPointError(f"the {name} is {value}")
    if settings.parity_limit and parity > settings.parity_limit:
        raise FloatingPointError(
            f"sampler and trainer differ by {parity:.3g} in a log-probability ({worst[0]}), and "
            f"parity_limit is {settings.parity_limit:g}"
        )


def named_tensors(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an update changes by name: each trained weight as the model calls it, and its
    moments.
    """
    names = {id(weight): name for name, weight in policy.model.named_parameters()}
    return {
        names[id(optimizer.weights[number])] + ("" if kind == "weight" else f" ({kind})"): tensor
        for (number, kind), tensor in optimizer.tensors().items()
    }


def _figures(seen: Sequence[Seen]) -> tuple[float, dict[str, float], float, list]:
    """Return the loss, the sums over tokens, the largest difference between sampler and trainer,
    and the worst tokens of all micro-batches.
    """
    total, parity = 0.0, 0.0
    sums: defaultdict[str, float] = defaultdict(float)
    worst: list[Any] = []
    for batch, loss, parts, logp_RT in seen:
        total += loss.item()
        for name, value in parts.items():
            sums[name] += value.item()
        difference_RT = (batch.old_RT - logp_RT) * batch.mask_RT
        parity = max(parity, difference_RT.abs().max().item())
        worst = sorted(worst + _worst_tokens(batch, logp_RT, difference_RT), key=_by_difference)[:3]
        sums["parity"] += (
            (difference_RT.exp() - difference_RT - 1).sum().item()
        )  # k3 estimate, cf. loss.kl_k3
    return total, sums, parity, worst


def _of_all(ranks: Ranks, *mine: Any) -> tuple[float, dict[str, float], float, list]:
    """Return the loss, the sums, the largest difference and the worst tokens of all ranks."""
    totals, sums, parities, worst = zip(*ranks.gather([mine]))
    names = {name for each in sums for name in each}
    return (
        sum(totals),
        {name: sum(each.get(name, 0.0) for each in sums) for name in names},
        max(parities),
        sorted((token for each in worst for token in each), key=_by_difference)[:3],
    )


def _by_difference(token: dict[str, Any]) -> float:
    return -abs(token["sampler"] - token["trainer"])


def _remembered(before: dict, batch: MicroBatch, logp_RT: Tensor) -> Tensor:
    """Return the log-probabilities (R, T) that `before` has of the batch's completions, those of
    `logp_RT` where it has none yet.
    """
    rows = [
        before.setdefault(name, row[: len(tokens)])
        for name, row, tokens in zip(batch.names, logp_RT, batch.completions)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _worst_tokens(
    batch: MicroBatch, logp_RT: Tensor, difference_RT: Tensor
) -> list[dict[str, Any]]:
    """Return the three tokens on which sampler and trainer differ most: where, which, and both
    log-probabilities.
    """
    places = difference_RT.abs().flatten().topk(min(3, difference_RT.numel())).indices.tolist()
    found = []
    for row, position in (divmod(place, difference_RT.shape[1]) for place in places):
        group, sample = batch.names[row]
        found.append(
            {
                "group": group,
                "sample": sample,
                "position": position,
                "token": int(batch.tokens_RT[row, position]),
                "sampler": round(batch.old_RT[row, position].item(), 6),
                "trainer": round(logp_RT[row, position].item(), 6),
            }
        )
    return found

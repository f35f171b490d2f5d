"""One update of the policy from the groups of a step.

For each micro-batch: log-probabilities under the policy (and the reference), the loss, the
gradient. Then one step of the optimizer. `imitate` is the same for right answers.

Shapes: R rows (completions), T tokens of a row, M tokens of all rows without padding, U of them
after leaving out what rows have in common (see `Batch.distinct`).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from grpo.learn.batch import MicroBatch, micro_batches
from grpo.learn.logprobs import Distribution, Truncate, token_logprobs
from grpo.learn.loss import LossInputs, LossSettings, kl_k3, step_loss, zero_padding
from grpo.learn.optimizer import Optimizer
from grpo.model.forward import Batch
from grpo.model.policy import Policy
from grpo.model.weights import check_step
from grpo.records import Group

# How the names of metrics begin that compare the trainer's log-probabilities with the sampler's.
PARITY = ("parity/", "sampling/")


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(LossSettings):
    """How a step updates the policy: the loss, and what surrounds it."""

    max_length: int  # the completion budget in tokens, by which Dr. GRPO divides
    max_grad_norm: float  # 0: gradients are not clipped
    truncate: Truncate | None = None  # the sampler's; the loss must use the same
    masks_truncated: bool = False  # truncated completions take no part


# Log-probabilities of each completion under the policy in the first pass over a rollout, by the
# indices of its group and its sample.
FirstPass = dict[tuple[int, int], Tensor]


class UpdateMemory:
    """What updates do to fit the GPU's memory; later updates keep what an earlier one had to do.

    When an update runs out of memory, the micro-batches are halved until each holds a single
    completion. After that, the decoder's memory is freed before each update, and then gradient
    checkpointing is enabled, with which larger micro-batches may fit.

    `chosen` is the user's largest micro-batch in tokens, None if there is none.
    """

    def __init__(self, policy: Policy, chosen: int | None = None):
        self.policy = policy
        self.chosen = chosen
        self.micro_tokens = chosen or policy.tokens_at_once  # most tokens of a micro-batch
        self.frees_decoder = False
        self.notes: list[str] = []  # lines for the console

    def save_more(self, groups: Sequence[Group]) -> None:
        """Take less memory for `groups` from now on. Raises UserError if nothing is left to do."""
        longest = max(
            len(group.prompt) + len(completion.tokens)
            for group in groups
            for completion in group.completions
        )
        if self.micro_tokens > longest:
            self.micro_tokens = max(longest, self.micro_tokens // 2)
            change = f"micro-batches of {self.micro_tokens:,} tokens"
        elif not self.frees_decoder and self.policy.free_decoder():
            self.frees_decoder = True
            change = "the sampler's memory is freed before each update"
        elif not self.policy.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
            self.micro_tokens = max(longest, self.chosen or self.policy.tokens_at_once)
            change = f"gradient checkpointing, and micro-batches of {self.micro_tokens:,} tokens"
        else:
            raise UserError(
                f"out of memory in the update of a single completion of {longest} tokens; "
                "give a smaller model, a lower level, or --lora-rank 16"
            )
        self.notes.append(f"out of memory: {change} from now on (the gradient stays the same)")

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes


@torch.enable_grad()  # the code of a user may have switched gradients off
def update(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    settings: UpdateSettings,
    memory: UpdateMemory,
    first_pass: FirstPass | None = None,
) -> dict[str, Any]:
    """Take one optimizer step on `groups`, whose advantages are filled in; return its metrics.

    The metrics are described in docs/run-files.md. Micro-batches save memory and do not change the
    gradient. Each of several ranks takes some of the completions; gradients and metrics are those
    of all. An update that runs out of memory is repeated with less (`UpdateMemory`).

    The ratio of the loss is taken to the policy that sampled. For demonstrations, which nobody
    sampled, it is taken to the trainer's own log-probabilities in the first pass over this rollout;
    so it is for gspo in half precision, because rounding alone would exceed its narrow clip bounds.
    `first_pass` holds these: the first pass fills an empty one, later passes read it; without one,
    this is the first pass.

    Raises FloatingPointError if the loss or the gradient is not finite, before the weights change;
    and if a weight or a moment is not finite after the step, before anything is saved. Raises
    UserError if a loss of the user's own fails, if a single completion does not fit, and if memory
    runs out on one of several ranks when they have begun to exchange their gradients: the others
    would not repeat the update.
    """
    first_pass = {} if first_pass is None else first_pass
    if memory.frees_decoder:
        policy.free_decoder()

    while True:
        with suppress(torch.OutOfMemoryError):
            return _try_update(policy, optimizer, groups, settings, memory, first_pass)

        if optimizer.has_exchanged:
            raise UserError(
                "out of memory while the ranks exchanged their gradients or took the step; "
                "continue with --resume and a lower level"
            )
        # Not while the error is handled: it keeps the tensors of the failed update.
        optimizer.clear()
        torch.cuda.empty_cache()
        memory.save_more(groups)


def _try_update(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    settings: UpdateSettings,
    memory: UpdateMemory,
    first_pass: FirstPass,
) -> dict[str, Any]:
    """Do the work of `update` with the memory's present settings."""
    ranks = optimizer.ranks
    while True:
        optimizer.clear()
        batches = micro_batches(
            groups,
            settings.own_loss.weights if settings.own_loss else settings.kind,
            max_length=settings.max_length,
            micro_tokens=memory.micro_tokens,
            masks_truncated=settings.masks_truncated,
            device=policy.device,
            rank=ranks.rank,
            ranks=ranks.size,
        )
        # Losses and log-probabilities stay on the device, so that the host can queue every
        # micro-batch before it waits for the first.
        passes = [_backward(policy, optimizer, batch, settings, first_pass) for batch in batches]
        grad_norm = optimizer.collect(settings.max_grad_norm)
        if not optimizer.must_repeat(grad_norm):
            break

    # Here the host waits for the device.
    local = _together([_figures(each) for each in passes])
    figures = _together(ranks.gather([local]))

    is_float16 = policy.dtype == torch.float16
    hint = "; numbers may be too large for float16: give --dtype bfloat16" if is_float16 else ""
    for name, value in (("loss", figures.loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise FloatingPointError(f"the {name} is {value}{hint}")

    _take_step(policy, optimizer)
    metrics = _metrics(figures, grad_norm, has_kl=settings.beta > 0)
    return metrics | optimizer.loss_scale.metrics()


def _take_step(policy: Policy, optimizer: Optimizer) -> None:
    """Take the optimizer's step.

    If memory is short it frees the decoder's. Raises FloatingPointError if a weight or a moment is
    not finite afterwards.
    """
    is_taken = False
    with suppress(torch.OutOfMemoryError):
        optimizer.step()
        is_taken = True
    if not is_taken:
        policy.free_decoder()
        torch.cuda.empty_cache()
        optimizer.step()

    named = partial(named_tensors, policy, optimizer)
    check_step(optimizer.tensors().values(), named, optimizer.ranks)


def named_tensors(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors that an update changes, by name: the trained weights and their moments.

    A weight has the model's name for it; of a moment, its kind follows in parentheses.
    """
    names = {id(weight): name for name, weight in policy.model.named_parameters()}
    named = {}
    for (number, kind), tensor in optimizer.tensors().items():
        suffix = "" if kind == "weight" else f" ({kind})"
        named[names[id(optimizer.weights[number])] + suffix] = tensor
    return named


def completion_logprobs(
    policy: Policy,
    batch: MicroBatch,
    truncate: Truncate | None = None,
    packing: Batch | None = None,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (nats) of the completions' tokens, (R, T) each, 0 at
    padding.

    The last token of a prompt predicts the first of the completion; the completion's last token
    predicts nothing. `truncate` and `has_entropy_gradient` are those of `Distribution`. `packing`
    is the result of `Policy.pack` for this batch, if there is one already.
    """
    R, T = batch.tokens_RT.shape
    places_M = batch.places_M

    # The model runs without padding, so everything is flat until the end.
    packing = packing or policy.pack(batch.prompts, batch.completions)
    logp_U, entropy_U = token_logprobs(
        policy.predict(packing),
        policy.head,
        packing.distinct(batch.tokens_RT.take(places_M)),
        Distribution(
            packing.distinct(batch.temperatures_R[places_M // T]), truncate, has_entropy_gradient
        ),
        kernels=policy.kernels,
        products=policy.gradient_products,
    )
    logp_M, entropy_M = packing.of_tokens(logp_U), packing.of_tokens(entropy_U)

    zeros = torch.zeros(R * T, device=places_M.device, dtype=logp_M.dtype)
    logp_RT = zeros.scatter(0, places_M, logp_M).view(R, T)
    entropy_RT = zeros.scatter(0, places_M, entropy_M).view(R, T)
    return logp_RT, entropy_RT


@dataclass(frozen=True)
class _BackwardPass:
    """A micro-batch after its backward pass. The tensors stay on the device, without gradient."""

    batch: MicroBatch
    loss: Tensor
    sums: dict[str, Tensor]  # see `step_loss`
    logp_RT: Tensor


def _backward(
    policy: Policy,
    optimizer: Optimizer,
    batch: MicroBatch,
    settings: UpdateSettings,
    first_pass: FirstPass,
) -> _BackwardPass:
    """Add the gradient of one micro-batch to that of the step."""
    packing = policy.pack(batch.prompts, batch.completions)

    reference_RT = None
    if settings.beta:
        with policy.reference() as reference:
            reference_RT, _ = completion_logprobs(reference, batch, packing=packing)

    # Only a loss of the user's own may depend on the entropies.
    has_entropy_gradient = settings.own_loss is not None
    logp_RT, entropy_RT = completion_logprobs(
        policy, batch, settings.truncate, packing, has_entropy_gradient
    )

    old_RT = batch.old_RT
    is_to_first_pass = settings.kind == "gspo" and policy.dtype in (torch.float16, torch.bfloat16)
    if is_to_first_pass or batch.sampled_R is not None:
        first_RT = _logprobs_of_first_pass(first_pass, batch, logp_RT.detach())
        old_RT = first_RT
        if not is_to_first_pass and batch.sampled_R is not None:
            old_RT = torch.where(batch.sampled_R[:, None], batch.old_RT, first_RT)

    inputs = LossInputs(
        logp_RT=logp_RT,
        old_RT=old_RT,
        advantages=batch.advantages,
        mask_RT=batch.mask_RT,
        weights_R=batch.weights_R,
        ref_RT=reference_RT,
        entropy_RT=entropy_RT,
    )
    loss, sums = step_loss(inputs, settings, batch.sampled_R)
    own = settings.own_loss
    with policy.low_precision_backward():
        optimizer.backward(own.linearised(loss, inputs) if own else loss)
    return _BackwardPass(batch, loss.detach(), sums, logp_RT.detach())


def _logprobs_of_first_pass(first_pass: FirstPass, batch: MicroBatch, logp_RT: Tensor) -> Tensor:
    """Return the first pass's log-probabilities (R, T) of the batch's completions.

    If this is the first pass, they are `logp_RT`, and `first_pass` remembers them.
    """
    rows = [
        first_pass.setdefault(name, row[: len(tokens)])
        for name, row, tokens in zip(batch.row_ids, logp_RT, batch.completions)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@dataclass(frozen=True)
class _Figures:
    """The figures of a micro-batch or of a whole step."""

    loss: float
    sums: dict[str, float]  # over its tokens: those of `step_loss`, and KL(sampler || trainer)
    difference: float  # largest one of the sampler's and the trainer's log-probabilities, in nats
    worst: list[dict[str, Any]]  # the three tokens that differ most


def _figures(each: _BackwardPass) -> _Figures:
    batch = each.batch
    is_sampled_RT = batch.mask_RT
    if batch.sampled_R is not None:
        is_sampled_RT = is_sampled_RT & batch.sampled_R[:, None]
    difference_RT = zero_padding(batch.old_RT - each.logp_RT, is_sampled_RT)

    sums = {name: value.item() for name, value in each.sums.items()}
    # k3 is unbiased for the policy that sampled the tokens.
    kl_RT = zero_padding(kl_k3(batch.old_RT, each.logp_RT), is_sampled_RT)
    sums["sampler_kl"] = kl_RT.sum().item()
    return _Figures(
        each.loss.item(),
        sums,
        difference_RT.abs().max().item(),
        _worst_tokens(each, difference_RT, is_sampled_RT),
    )


def _together(every: Sequence[_Figures]) -> _Figures:
    """Return the figures of several micro-batches, or of all ranks."""
    worst = [token for each in every for token in each.worst]
    return _Figures(
        loss=sum(each.loss for each in every),
        sums={
            name: sum(each.sums.get(name, 0.0) for each in every)
            for name in {name: None for each in every for name in each.sums}
        },
        difference=max((each.difference for each in every), default=0.0),
        worst=sorted(worst, key=lambda token: -abs(token["sampler"] - token["trainer"]))[:3],
    )


def _worst_tokens(
    each: _BackwardPass, difference_RT: Tensor, is_sampled_RT: Tensor
) -> list[dict[str, Any]]:
    """Return the three sampled tokens of a micro-batch on which sampler and trainer differ most.

    Each has its group, sample, position and token id, and both log-probabilities.
    """
    batch = each.batch
    flat = difference_RT.abs().flatten()
    places = flat.topk(min(3, len(flat))).indices.tolist()

    tokens = []
    for row, position in (divmod(place, difference_RT.shape[1]) for place in places):
        if not is_sampled_RT[row, position]:  # fewer than three were sampled
            continue
        group, sample = batch.row_ids[row]
        tokens.append(
            {
                "group": group,
                "sample": sample,
                "position": position,
                "token": int(batch.tokens_RT[row, position]),
                "sampler": round(batch.old_RT[row, position].item(), 6),
                "trainer": round(each.logp_RT[row, position].item(), 6),
            }
        )
    return tokens


def _metrics(figures: _Figures, grad_norm: float, *, has_kl: bool) -> dict[str, Any]:
    """Return the figures of a step by the names of the metrics."""
    means = {
        "entropy": "entropy",
        "clipped_low": "clip_ratio/low_mean",
        "clipped_high": "clip_ratio/high_mean",
        "sampler_kl": "parity/kl",
    }
    if has_kl:
        means["kl"] = "kl"

    sums = figures.sums
    return {
        "loss": figures.loss,
        "grad_norm": grad_norm,
        "sampling/sampling_logp_difference/max": figures.difference,
        "parity/worst": figures.worst,
        # Under ``truncated: mask`` all tokens of a step may be shown instead of sampled.
        **{metric: sums[name] / sums["tokens"] for name, metric in means.items() if sums["tokens"]},
    }


def imitate(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    memory: UpdateMemory,
    max_grad_norm: float,
) -> dict[str, Any]:
    """Take one step towards the completions of `groups`, by the cross-entropy of their tokens.

    This is the update for demonstrations with advantage 1 by a loss whose gradient is that of log p
    where the ratio is 1. All tokens of the step have the same weight, end tokens included. "loss"
    is in nats a token.
    """
    settings = UpdateSettings(
        "cispo", clip_low=1.0, clip_high=1.0, max_length=0, max_grad_norm=max_grad_norm
    )
    return update(policy, optimizer, groups, settings, memory)

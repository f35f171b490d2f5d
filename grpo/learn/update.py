"""One update of the policy from the groups of a step.

For each micro-batch: log-probabilities under the policy (and the reference), the loss, the
gradient. Then one step of the optimizer. `imitate` is the same for right answers.

The probabilities q of an engine differ from the trainer's p by rounding. So the ratio is then taken
to p in the first pass, and each token is weighted by min(p / q, C), which is truncated importance
sampling (https://fengyao.notion.site/off-policy-rl; C = 2 there).

Shapes: R rows (completions), T tokens of a row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.data.errors import EngineError, UserError, lacks_memory
from grpo.learn.batch import MicroBatch, Truncate, completion_logprobs, idle_batch, micro_batches
from grpo.learn.loss import LossInputs, LossSettings, kl_k3, step_loss, zero_padding
from grpo.learn.optimizer import Optimizer
from grpo.model.check import check_step
from grpo.model.policy import Policy
from grpo.records import Group

# How the names of metrics begin that compare trainer and sampler.
PARITY = ("parity/", "sampling/")

# The most nats a token, KL(sampler || trainer), of an engine with the policy's weights: rounding
# makes less than a hundredth of it, and another model several nats.
MAX_ENGINE_KL = 0.5


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(LossSettings):
    """How a step updates the policy: the loss, and what surrounds it."""

    max_length: int  # the completion budget in tokens, by which Dr. GRPO divides
    max_grad_norm: float = 1.0  # gradients are clipped to it; 0: they are not
    truncate: Truncate | None = None  # the sampler's; the loss must use the same
    importance_limit: float = 0.0  # C of an engine, see above; 0: no weights


# Log-probabilities in the first pass over a rollout, by the indices of group and sample.
FirstPass = dict[tuple[int, int], Tensor]


class UpdateMemory:
    """What updates do to fit the GPU's memory; later updates keep what an earlier one had to do.

    The micro-batches are halved until each holds a single completion. After that gradient
    checkpointing is enabled, and the decoder's memory is freed before each update.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.micro_tokens = policy.tokens_at_once  # most tokens of a micro-batch

    def save_more(self, groups: Sequence[Group]) -> None:
        """Take less memory for `groups` from now on. Raises UserError if nothing is left to do."""
        longest = max(
            len(group.prompt) + len(completion.tokens)
            for group in groups
            for completion in group.completions
        )
        change = ""
        if self.policy.learner is not self.policy:
            raise UserError(  # the other ranks are within a pass and wait for this one
                f"out of memory in an update of micro-batches of {self.micro_tokens:,} tokens; "
                "give more ranks, a lower level, or a smaller model"
            )
        if self.micro_tokens > longest:
            self.micro_tokens = max(longest, self.micro_tokens // 2)
        elif not self.policy.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
            self.micro_tokens = max(longest, self.policy.tokens_at_once)
            change = "gradient checkpointing, the sampler's memory freed before each update, and "
        else:
            raise UserError(
                f"out of memory in the update of a single completion of {longest} tokens; "
                "give a smaller model, a lower level, or --lora-rank 16"
            )
        self.policy.events.append(
            f"out of memory: {change}micro-batches of {self.micro_tokens:,} tokens from now on "
            "(the gradient stays the same)"
        )


@torch.enable_grad()  # the code of a user may have switched gradients off
def update(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[Group],
    settings: UpdateSettings,
    memory: UpdateMemory,
    first_pass: FirstPass | None = None,
) -> dict[str, float]:
    """Take one optimizer step on `groups`, whose advantages are filled in; return its metrics.

    The metrics are described in docs/run-files.md. Each of several ranks takes some of the
    completions; gradients and metrics are those of all.

    The ratio of the loss is taken to the policy that sampled. For demonstrations, which nobody
    sampled, it is taken to the trainer's own log-probabilities in the first pass over this rollout;
    so it is for gspo in half precision, because rounding alone would exceed its narrow clip bounds.
    The first pass fills an empty `first_pass` with them, and later passes read it.

    Raises EngineError if an engine sampled from another policy, and FloatingPointError if the loss
    or the gradient is not finite, both before the weights change, or a weight or a moment after the
    step, before anything is saved.
    """
    ranks = optimizer.ranks
    first_pass = {} if first_pass is None else first_pass
    is_first = not first_pass
    while True:
        if policy.gradient_checkpointing:  # memory is short
            policy.free_decoder()
        optimizer.clear()
        batches: Iterable[MicroBatch] = micro_batches(
            groups,
            settings.own_loss.weights if settings.own_loss else settings.kind,
            max_length=settings.max_length,
            micro_tokens=memory.micro_tokens,
            device=policy.device,
            rank=ranks.rank,
            ranks=ranks.size,
        )

        own = None  # how many of them are this rank's; None: all
        if optimizer.sharding:
            optimizer.sharding.give_up()
            # A layer is gathered by all ranks together, so they make equally many passes.
            batches = [*batches]
            own = len(batches)
            batches += [idle_batch(groups, policy.device)] * (ranks.max(own) - own)

        # The sums stay on the device, so that the host can queue every micro-batch before it waits
        # for the first.
        passes = None
        try:
            passes = [_backward(policy, optimizer, each, settings, first_pass) for each in batches]
        except RuntimeError as error:
            if not lacks_memory(error):
                raise

        if passes is None:
            # Not while the error is handled: it keeps the tensors of the failed pass.
            optimizer.clear()
            torch.cuda.empty_cache()
            memory.save_more(groups)
            continue

        grad_norm = optimizer.collect(settings.max_grad_norm)
        if not optimizer.must_repeat(grad_norm):
            break

    # Here the host waits for the device.
    found = [{name: value.item() for name, value in each.items()} for each in passes[:own]]
    sums = _total(ranks.gather([_total(found)]))

    is_float16 = policy.dtype == torch.float16
    hint = "; numbers may be too large for float16: give --dtype bfloat16" if is_float16 else ""
    for name, value in (("loss", sums["loss"]), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise FloatingPointError(f"the {name} is {value}{hint}")

    drift = sums["parity_kl"] / max(1, sums["tokens"])
    if settings.importance_limit and is_first and drift > MAX_ENGINE_KL:
        raise EngineError(
            f"--engine: its log-probabilities are {drift:.3g} nats a token from the policy's (KL); "
            "it must sample from the model of --model, with the weights that it was given last"
        )
    optimizer.step()
    check_step(optimizer.tensors(policy.model))
    metrics = _metrics(sums, grad_norm)
    return metrics | {"loss_scale": optimizer.loss_scale} if is_float16 else metrics


def _backward(
    policy: Policy,
    optimizer: Optimizer,
    batch: MicroBatch,
    settings: UpdateSettings,
    first_pass: FirstPass,
) -> dict[str, Tensor]:
    """Add the gradient of one micro-batch to that of the step.

    Returns the sums of `step_loss`, the "loss", and how far sampler and trainer differ: "parity_kl"
    is the sum of KL(sampler || trainer), "difference" the largest one of log-probabilities (nats).
    """
    learner = policy.learner
    packing = learner.forward.pack(batch.prompts, batch.completions)

    reference_RT = None
    if settings.beta:
        with policy.reference() as reference:
            reference_RT, _ = reference.run(completion_logprobs, reference, batch, packing=packing)

    # Only a loss of the user's own may depend on the entropies.
    has_entropy_gradient = settings.own_loss is not None
    logp_RT, entropy_RT = learner.run(
        completion_logprobs, learner, batch, settings.truncate, packing, has_entropy_gradient
    )

    old_RT, importance_RT = batch.old_RT, None
    is_sampled_RT = batch.mask_RT
    if batch.sampled_R is not None:
        is_sampled_RT = is_sampled_RT & batch.sampled_R[:, None]

    is_half = policy.dtype in (torch.float16, torch.bfloat16)
    is_to_first_pass = settings.importance_limit > 0 or (settings.kind == "gspo" and is_half)
    if is_to_first_pass or batch.sampled_R is not None:
        first_RT = _logprobs_of_first_pass(first_pass, batch, logp_RT.detach())
        if limit := settings.importance_limit:
            weights_RT = (first_RT - old_RT).exp().clamp(max=limit)
            importance_RT = torch.where(is_sampled_RT, weights_RT, 1.0)
        old_RT = first_RT if is_to_first_pass else torch.where(is_sampled_RT, old_RT, first_RT)

    inputs = LossInputs(
        logp_RT=logp_RT,
        old_RT=old_RT,
        advantages=batch.advantages,
        mask_RT=batch.mask_RT,
        weights_R=batch.weights_R,
        ref_RT=reference_RT,
        entropy_RT=entropy_RT,
        importance_RT=importance_RT,
    )
    loss, sums = step_loss(inputs, settings, batch.sampled_R)
    optimizer.backward(loss)

    # k3 is unbiased for the policy that sampled the tokens.
    parity_RT = zero_padding(kl_k3(batch.old_RT, logp_RT.detach()), is_sampled_RT)
    difference_RT = zero_padding(batch.old_RT - logp_RT.detach(), is_sampled_RT)
    return sums | {
        "loss": loss.detach(),
        "parity_kl": parity_RT.sum(),
        "difference": difference_RT.abs().max(),
    }


def _logprobs_of_first_pass(first_pass: FirstPass, batch: MicroBatch, logp_RT: Tensor) -> Tensor:
    """Return the log-probabilities (R, T) of the first pass; if it is this one, remember them."""
    rows = [
        first_pass.setdefault(name, row[: len(tokens)])
        for name, row, tokens in zip(batch.row_ids, logp_RT, batch.completions)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _total(every: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sums of several micro-batches, or of all ranks, and their largest difference."""
    names = dict.fromkeys(name for each in every for name in each)
    return {
        name: (max if name == "difference" else sum)(each.get(name, 0.0) for each in every)
        for name in names
    }


def _metrics(sums: dict[str, float], grad_norm: float) -> dict[str, float]:
    metrics = {
        "loss": sums["loss"],
        "grad_norm": grad_norm,
        "sampling/sampling_logp_difference/max": sums["difference"],
    }
    means = {
        "entropy": "entropy",
        "clipped_low": "clip_ratio/low_mean",
        "clipped_high": "clip_ratio/high_mean",
        "parity_kl": "parity/kl",
        "kl": "kl",
        "importance": "sampling/importance_sampling_ratio/mean",
    }
    if sums["tokens"]:  # imitation has none
        metrics |= {means[name]: sums[name] / sums["tokens"] for name in means if name in sums}
    return metrics


def imitate(
    policy: Policy, optimizer: Optimizer, groups: Sequence[Group], memory: UpdateMemory
) -> dict[str, float]:
    """Take one step towards the completions of `groups`, by the cross-entropy of their tokens.

    These are demonstrations with advantage 1, whose ratio is 1: there the gradient of cispo is that
    of log p. All tokens of the step have the same weight. "loss" is in nats a token.
    """
    settings = UpdateSettings("cispo", clip_low=1.0, clip_high=1.0, max_length=0)
    return update(policy, optimizer, groups, settings, memory)

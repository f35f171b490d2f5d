"""One update of the policy from the groups of a step: log-probs, loss, gradient, optimizer.

Shapes: R rows (completions), T tokens, M tokens of all of them.
"""
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo.learn.batch import MicroBatch, micro_batches
from grpo.learn.logprobs import token_logprobs
from grpo.learn.loss import step_loss
from grpo.policy import Policy
from grpo.records import Group


def completion_logprobs(policy: Policy, batch: MicroBatch, truncate: Callable | None = None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions' tokens under the policy, (R, T), 0 at padding.

    The last token of the prompt predicts the first of the completion; the completion's last predicts nothing.
    """
    mask = batch.mask_RT
    completions = [row[:n].tolist() for row, n in zip(batch.tokens_RT.cpu(), mask.sum(1).tolist())]
    heat_RT = batch.temperatures_R[:, None].expand_as(batch.tokens_RT)
    logp_M, entropy_M = token_logprobs(policy.predict(batch.prompts, completions), policy.head, batch.tokens_RT[mask],
                                       heat_RT[mask], truncate=truncate)
    zeros_RT = torch.zeros(mask.shape, device=mask.device, dtype=logp_M.dtype)
    return zeros_RT.masked_scatter(mask, logp_M), zeros_RT.masked_scatter(mask, entropy_M)


def update(policy: Policy, optimizer: torch.optim.Optimizer, groups: Sequence[Group], *, kind: str, beta: float,
           clip_low: float, clip_high: float, max_length: int, micro_tokens: int, max_grad_norm: float,
           truncate: Callable | None = None) -> dict[str, float]:
    """Take one optimizer step on `groups` (advantages filled in); return means over the step's tokens.

    Keys: "loss", "grad_norm" (before clipping), "kl" (to the reference; only with `beta`), "entropy" (nats),
    "clip_ratio/low", "clip_ratio/high", "parity/max_abs_logprob_diff" and "parity/kl" (policy against sampler; on the
    first pass over a rollout they measure rounding alone). Raises FloatingPointError, before the weights change, when loss or
    gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    total, sums, worst = 0.0, defaultdict(float), 0.0
    for batch in micro_batches(groups, kind, micro_tokens=micro_tokens, max_length=max_length, device=policy.device):
        reference_RT = None
        if beta:
            with policy.reference():
                reference_RT = completion_logprobs(policy, batch, truncate)[0]
        logp_RT, entropy_RT = completion_logprobs(policy, batch, truncate)
        loss, parts = step_loss(
            kind, logp_RT, batch.old_RT, batch.advantages_R, batch.mask_RT, batch.weights_R, clip_low=clip_low,
            clip_high=clip_high, beta=beta, ref_RT=reference_RT, entropy_RT=entropy_RT)
        loss.backward()
        total += loss.item()
        for name, value in parts.items():
            sums[name] += value.item()
        difference_RT = (batch.old_RT - logp_RT.detach()) * batch.mask_RT
        worst = max(worst, difference_RT.abs().max().item())
        sums["parity"] += (difference_RT.exp() - difference_RT - 1).sum().item()  # k3 estimate, cf. loss.kl_k3
    grad_norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters, max_grad_norm or float("inf")))
    for name, value in (("loss", total), ("gradient norm", grad_norm)):
        if not torch.isfinite(torch.tensor(value)):
            raise FloatingPointError(f"the {name} is {value}")
    optimizer.step()
    mean = {name: value / sums["tokens"] for name, value in sums.items()}
    metrics = {"loss": total, "grad_norm": grad_norm, "entropy": mean["entropy"],
               "clip_ratio/low": mean["clipped_low"], "clip_ratio/high": mean["clipped_high"],
               "parity/max_abs_logprob_diff": worst, "parity/kl": mean["parity"]}
    return metrics | ({"kl": mean["kl"]} if beta else {})

"""The losses: arithmetic on tensors, nothing else.

A step's loss is  sum over rows r, tokens t of  weight_r * (policy_rt + beta * q_rt * kl_rt).  The
kinds differ in the weight of a row's tokens and in the policy term; q is the ratio exp(logp -
old), A the advantage of the row, or of the token itself (not for gspo, which has one ratio for
them all):

    kind     weight of a token        policy term, to be minimised         source
    grpo     1 / (R * its length)     -min(q A, clip(q) A)                 arXiv:2402.03300, eq. 3
    dapo     1 / (all tokens)         the same                             arXiv:2503.14476
    dr_grpo  1 / (R * max_length)     the same                             arXiv:2503.20783
    gspo     1 / (R * its length)     the same, q that of the sequence     arXiv:2507.18071, s_i
    cispo    1 / (all tokens)         -stop_gradient(clip(q)) A logp       arXiv:2506.13585

with clip(q) = min(max(q, 1 - clip_low), 1 + clip_high). The bounds are the caller's: DAPO has a
larger clip_high (0.28 instead of 0.2; with 0.2 it is what TRL calls bnpo), GSPO much narrower
bounds (3e-4, 4e-4), and CISPO no lower one (clip_low >= 1).
Departures: "all" means all rows of the step (TRL's bnpo: of a micro-batch), so that the gradient
does not depend on how a step is cut; every kind may have the KL term, inside the same mean, where
the k3 of a token is multiplied by its ratio (arXiv:2512.02556): at q = 1 that changes no value,
but k3 alone has the gradient of the KL the other way round, from the reference to the policy.

Shapes: R rows (completions), T tokens. Padding is False in `mask_RT`; what stands there, even NaN,
has no effect.
"""

import torch
from torch import Tensor

from grpo.choices import LOSSES


def token_weights(kind: str, lengths_R: Tensor, *, max_length: int) -> Tensor:
    """Return the weight of each token of each row, (R,) float64, from the lengths of *all* rows of
    the step.

    To be called before the first backward pass and cut along with the rows. `max_length` is the
    completion budget in tokens, which dr_grpo divides by. An empty row has weight 0 and counts in
    R.
    """
    assert kind in LOSSES
    lengths_R = lengths_R.double()
    if kind in ("grpo", "gspo"):
        weights_R = 1 / (len(lengths_R) * lengths_R)
    elif kind == "dr_grpo":
        weights_R = torch.full_like(lengths_R, 1 / (len(lengths_R) * max_length))
    else:
        weights_R = (1 / lengths_R.sum()).expand_as(lengths_R)
    return torch.where(lengths_R > 0, weights_R, 0.0)


def policy_loss(
    kind: str,
    logp_RT: Tensor,
    old_RT: Tensor,
    advantages: Tensor,
    mask_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy term of each token (0 at padding), and which tokens were clipped low and
    high: (R, T) each.

    `logp_RT` are log-probabilities under the policy, `old_RT` under the one that sampled (no
    gradient). `advantages` are (R,), one for all tokens of a row, or (R, T), except for gspo.
    Clipped means that the bound took effect: for cispo wherever the ratio is outside; for the
    others below with A < 0 and above with A > 0, where the token gets no gradient. In gspo a
    sequence is clipped as a whole, and all its tokens count.
    """
    assert kind in LOSSES and (advantages.dim() == 1 or kind != "gspo")
    advantages_RT = advantages[:, None] if advantages.dim() == 1 else advantages
    log_ratio_RT = _log_ratio(logp_RT, old_RT, mask_RT)
    if kind == "gspo":
        # An empty row is 0 / 0 here, and padding all over.
        log_ratio_RT = (
            log_ratio_RT.sum(-1, keepdim=True) / mask_RT.sum(-1, keepdim=True)
        ).expand_as(log_ratio_RT)
    ratio_RT = log_ratio_RT.exp()
    clipped_RT = ratio_RT.clamp(1 - clip_low, 1 + clip_high)
    low_RT, high_RT = ratio_RT < 1 - clip_low, ratio_RT > 1 + clip_high
    if kind == "cispo":
        loss_RT = -clipped_RT.detach() * advantages_RT * _zero_padding(logp_RT, mask_RT)
    else:
        loss_RT = -torch.minimum(ratio_RT * advantages_RT, clipped_RT * advantages_RT)
        low_RT, high_RT = low_RT & (advantages_RT < 0), high_RT & (advantages_RT > 0)
    return _zero_padding(loss_RT, mask_RT), low_RT & mask_RT, high_RT & mask_RT


def kl_k3(logp_RT: Tensor, ref_RT: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) of each token: exp(d) - d - 1 with d = ref
    - logp.

    Never negative, and unbiased for tokens drawn from the policy itself; its gradient is not that
    of the KL, see above. Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    difference_RT = ref_RT - logp_RT
    return difference_RT.exp() - difference_RT - 1


def step_loss(
    kind: str,
    logp_RT: Tensor,
    old_RT: Tensor,
    advantages: Tensor,
    mask_RT: Tensor,
    weights_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
    ref_RT: Tensor | None = None,
    entropy_RT: Tensor | None = None,
    importance_RT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some rows of a step, a float64 scalar, and sums over their tokens.

    `advantages` are those of `policy_loss`. `weights_R` are these rows' share of `token_weights`:
    the losses (and gradients, and sums) of all micro-batches add up to those of the step.
    `importance_RT` multiplies the policy term, not the KL. The sums are float64 scalars on the
    device, without gradient: "tokens", "clipped_low", "clipped_high" (counts), "kl" where `ref_RT`
    is given, "entropy" where `entropy_RT` is given (nats).
    """
    assert beta == 0 or ref_RT is not None
    loss_RT, low_RT, high_RT = policy_loss(
        kind, logp_RT, old_RT, advantages, mask_RT, clip_low=clip_low, clip_high=clip_high
    )
    if importance_RT is not None:
        loss_RT = loss_RT * _zero_padding(importance_RT, mask_RT)
    terms = {"tokens": mask_RT, "clipped_low": low_RT, "clipped_high": high_RT}
    if ref_RT is not None:
        terms["kl"] = kl_k3(_zero_padding(logp_RT, mask_RT), _zero_padding(ref_RT, mask_RT))
    if entropy_RT is not None:
        terms["entropy"] = _zero_padding(entropy_RT, mask_RT)
    if beta:
        loss_RT = loss_RT + beta * _log_ratio(logp_RT, old_RT, mask_RT).exp() * terms["kl"]
    loss = (weights_R[:, None] * loss_RT).sum()
    return loss, {
        name: term_RT.detach().sum(dtype=torch.float64) for name, term_RT in terms.items()
    }


def _log_ratio(logp_RT: Tensor, old_RT: Tensor, mask_RT: Tensor) -> Tensor:
    return _zero_padding(logp_RT, mask_RT) - _zero_padding(old_RT, mask_RT)


def _zero_padding(x_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Select, not multiply: NaN * 0 is NaN, and before the arithmetic, so that no NaN enters the
    gradient either.
    """
    return torch.where(mask_RT, x_RT, 0.0)

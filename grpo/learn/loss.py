"""The losses: arithmetic on tensors.

The loss of a step is

    sum over rows r and tokens t of  weight_r * (importance_rt * policy_rt + beta * q_rt * kl_rt)

where q = exp(logp - old) is the ratio, and A the advantage of the row or of the single token (gspo
has one ratio for a row, and so one advantage). The importance is 1 unless an engine sampled (see
`update`). The kinds differ in the weight and in the policy term, which is minimised:

    kind     weight of a token        policy term                          source
    grpo     1 / (R * its length)     -min(q A, clip(q) A)                 arXiv:2402.03300, eq. 3
    dapo     1 / (all tokens)         the same                             arXiv:2503.14476
    dr_grpo  1 / (R * max_length)     the same                             arXiv:2503.20783
    gspo     1 / (R * its length)     the same, q of the whole sequence    arXiv:2507.18071, s_i
    cispo    1 / (all tokens)         -stop_gradient(clip(q)) A logp       arXiv:2506.13585

with clip(q) = min(max(q, 1 - clip_low), 1 + clip_high). The caller chooses the bounds. DAPO has a
larger clip_high (0.28 instead of 0.2; at 0.2 it equals TRL's bnpo), GSPO much narrower bounds (3e-4
and 4e-4), and CISPO no lower bound (clip_low >= 1).

Departures from the papers:

- R and "all tokens" count the whole step, where TRL's bnpo counts a micro-batch. So the gradient
  does not depend on how a step is cut into micro-batches.
- Every kind may have the KL term, within the same mean. The k3 estimate of a token (see `kl_k3`) is
  multiplied by its ratio (arXiv:2512.02556). At q = 1 that leaves its value as it is, and changes
  its gradient to that of KL(policy || reference). With d = ref - logp and k3 = exp(d) - d - 1,

      grad k3      = (1 - exp(d)) grad logp      the mean is that of KL(reference || policy)
      grad (q k3)  = grad k3 + k3 grad logp
                   = -d grad logp                the mean is that of KL(policy || reference)

  over tokens that the policy samples, where grad logp itself has the mean 0. With `top_p` the
  policy is the truncated one, and the reference is whole; the mean of k3 is then smaller than the
  KL by the probability that the reference gives to tokens that cannot be sampled.

A loss of the user's own (docs/library.md) gets `LossInputs` and `LossSettings` and returns the
policy term of each token (R, T). All else is as for the built-in losses.

Shapes: R rows (completions), T tokens. `mask_RT` is False at padding; whatever the other tensors
hold there, even NaN, has no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.config import FROM_PYTHON, LOSSES, WEIGHTED_BY, python_name
from grpo.data.errors import UserError
from grpo.tasks.base import calling
from grpo.tasks.registry import load_function

# The policy term of each token, and which tokens were clipped low and high: (R, T) each.
PolicyTerm = tuple[Tensor, Tensor, Tensor]

# The logarithm of the largest ratio. It lies far beyond every clip bound, and keeps a ratio from
# becoming infinite: then the gradient of a clipped token would be 0 * inf.
MAX_LOG_RATIO = 80.0


@dataclass(frozen=True)
class LossSettings:
    """Which loss is computed, and its numbers."""

    kind: str  # one of LOSSES, or the name of an own loss
    clip_low: float
    clip_high: float
    beta: float = 0.0  # weight of the KL term
    own_loss: "OwnLoss | None" = None  # computes the policy term instead of `policy_loss`


@dataclass(frozen=True)
class LossInputs:
    """What the loss of some rows of a step is computed from.

    The ratio is taken to the policy of `old_RT`: the one that sampled, or that of the first pass
    (see `update`).
    """

    logp_RT: Tensor  # log-probabilities under the policy, with gradient
    old_RT: Tensor
    advantages: Tensor  # (R,), or (R, T) if each token has its own, which gspo does not take
    mask_RT: Tensor  # True at tokens, False at padding
    weights_R: Tensor  # these rows' part of `token_weights`, float64
    ref_RT: Tensor | None = None  # log-probabilities under the reference, if there is a KL term
    entropy_RT: Tensor | None = None  # in nats; with gradient if the loss is an own one
    importance_RT: Tensor | None = None  # weights of the policy term; None: 1


def token_weights(kind: str, lengths_R: Tensor, *, max_length: int) -> Tensor:
    """Return the weight of each token of each row of the step, (R,) float64.

    `max_length` is the completion budget in tokens, by which dr_grpo divides.
    """
    weighted_by = WEIGHTED_BY[kind]
    lengths_R = lengths_R.double()
    if weighted_by == "completion":
        return 1 / (len(lengths_R) * lengths_R)
    if weighted_by == "budget":
        return torch.full_like(lengths_R, 1 / (len(lengths_R) * max_length))
    assert weighted_by == "step"
    return (1 / lengths_R.sum()).expand_as(lengths_R)


def policy_loss(inputs: LossInputs, settings: LossSettings) -> PolicyTerm:
    """Return the policy term of each token, 0 at padding, and which were clipped low and high.

    A token counts as clipped if the bound took effect: for cispo wherever the ratio is outside, for
    the others where the token therefore gets no gradient.
    """
    kind = settings.kind
    mask_RT = inputs.mask_RT
    clip_low, clip_high = settings.clip_low, settings.clip_high

    is_by_row = inputs.advantages.dim() == 1
    assert kind in LOSSES and (is_by_row or kind != "gspo")
    advantages_RT = inputs.advantages[:, None] if is_by_row else inputs.advantages

    # The ratio q. That of gspo is the geometric mean over the sequence, s_i, at every token of it.
    log_ratio_RT = _log_ratio(inputs)
    if kind == "gspo":
        mean_R1 = log_ratio_RT.sum(-1, keepdim=True) / mask_RT.sum(-1, keepdim=True)
        log_ratio_RT = mean_R1.expand_as(log_ratio_RT)
    ratio_RT = log_ratio_RT.exp()

    # clip(q), and where q is out of range.
    clipped_RT = ratio_RT.clamp(1 - clip_low, 1 + clip_high)
    is_low_RT = ratio_RT < 1 - clip_low
    is_high_RT = ratio_RT > 1 + clip_high

    if kind == "cispo":
        # The clipped ratio is a constant factor, so every token keeps a gradient.
        loss_RT = -clipped_RT.detach() * advantages_RT * zero_padding(inputs.logp_RT, mask_RT)
    else:
        # The minimum is pessimistic: a bound takes effect only where it lowers the objective.
        loss_RT = -torch.minimum(ratio_RT * advantages_RT, clipped_RT * advantages_RT)
        is_low_RT = is_low_RT & (advantages_RT < 0)
        is_high_RT = is_high_RT & (advantages_RT > 0)

    return zero_padding(loss_RT, mask_RT), is_low_RT & mask_RT, is_high_RT & mask_RT


def kl_k3(logp_RT: Tensor, ref_RT: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) at each token, in nats (R, T), float64.

    k3 = exp(d) - d - 1 with d = ref - logp (Schulman, http://joschu.net/blog/kl-approx.html).
    """
    # k3 is about d^2 / 2. In float32, exp(d) - 1 has an error of 1e-7, which exceeds that for all d
    # below 5e-4, and makes k3 negative.
    difference_RT = (ref_RT - logp_RT).double()
    return difference_RT.expm1() - difference_RT


def step_loss(
    inputs: LossInputs, settings: LossSettings, sampled_R: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some rows of a step, a float64 scalar, and sums over their tokens.

    The sums are float64 scalars on the device, without gradient: "tokens", "clipped_low" and
    "clipped_high" (counts); "importance" if there is one, "kl" if there are `ref_RT`, and "entropy"
    if `entropy_RT` (nats).

    `sampled_R` is False at rows that the policy did not sample. They have no KL term, whose
    estimate is for sampled tokens, and no sum counts them.
    """
    mask_RT = inputs.mask_RT
    assert settings.beta == 0 or inputs.ref_RT is not None

    loss_RT, is_low_RT, is_high_RT = (settings.own_loss or policy_loss)(inputs, settings)
    terms = {"tokens": mask_RT, "clipped_low": is_low_RT, "clipped_high": is_high_RT}
    if inputs.importance_RT is not None:
        terms["importance"] = zero_padding(inputs.importance_RT, mask_RT)
        loss_RT = loss_RT * terms["importance"]
    if inputs.ref_RT is not None:
        logp_RT = zero_padding(inputs.logp_RT, mask_RT)
        terms["kl"] = kl_k3(logp_RT, zero_padding(inputs.ref_RT, mask_RT))
    if inputs.entropy_RT is not None:
        terms["entropy"] = zero_padding(inputs.entropy_RT, mask_RT)

    if sampled_R is not None:
        terms = {name: zero_padding(term_RT, sampled_R[:, None]) for name, term_RT in terms.items()}

    # The ratio on the KL term keeps its gradient: that is what turns k3's into the KL's.
    if settings.beta:
        loss_RT = loss_RT + settings.beta * _log_ratio(inputs).exp() * terms["kl"]

    loss = (inputs.weights_R[:, None] * loss_RT).sum()
    sums = {name: term_RT.detach().sum(dtype=torch.float64) for name, term_RT in terms.items()}
    return loss, sums


def _log_ratio(inputs: LossInputs) -> Tensor:
    """Return logp - old (R, T), 0 at padding, and no more than MAX_LOG_RATIO."""
    logp_RT = zero_padding(inputs.logp_RT, inputs.mask_RT)
    return (logp_RT - zero_padding(inputs.old_RT, inputs.mask_RT)).clamp(max=MAX_LOG_RATIO)


def zero_padding(x_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Return `x_RT` with 0 at padding, before any arithmetic: NaN * 0 would be NaN."""
    return torch.where(mask_RT, x_RT, 0.0)


class OwnLoss:
    """A user's loss function, called and checked.

    `spec` is how the user wrote it; without one the function was given in Python.
    """

    def __init__(self, function: Callable, spec: str | None = None):
        self.function = function
        self.spec = spec or python_name(function)
        self.weights = getattr(function, "token_weights", "dapo")
        if self.weights not in LOSSES:
            raise UserError(
                f"--loss {self.spec}: its token_weights is {self.weights!r}; give one of "
                f"{', '.join(LOSSES)}"
            )

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> PolicyTerm:
        """Return what `policy_loss` returns; no token counts as clipped.

        The function gets inputs with 0 at padding and advantages (R, T). Raises UserError if it
        raises, or if what it returns has the wrong shape or no gradient.
        """
        mask_RT = inputs.mask_RT
        names = ("logp_RT", "old_RT", "ref_RT", "entropy_RT", "advantages")
        given = {name: getattr(inputs, name) for name in names}
        if inputs.advantages.dim() == 1:
            given["advantages"] = inputs.advantages[:, None]
        padded = {name: zero_padding(x, mask_RT) for name, x in given.items() if x is not None}

        with calling(f"--loss {self.spec}"):
            loss_RT = self.function(replace(inputs, **padded), settings)

        is_tensor = isinstance(loss_RT, Tensor) and loss_RT.shape == mask_RT.shape
        if not (is_tensor and loss_RT.requires_grad):
            returned = getattr(loss_RT, "shape", type(loss_RT).__name__)
            raise UserError(
                f"--loss {self.spec}: returned {returned}; it must return a tensor of shape "
                f"{tuple(mask_RT.shape)} with a gradient, computed from inputs.logp_RT"
            )
        none_RT = torch.zeros_like(mask_RT)
        return zero_padding(loss_RT, mask_RT), none_RT, none_RT


def load_loss(spec: str) -> OwnLoss | None:
    """Return the loss ``path/to/file.py:function``; None for one of LOSSES."""
    if spec in LOSSES:
        return None
    if spec.startswith(FROM_PYTHON):
        raise UserError(f"--loss {spec}: give the function again, as grpo.train(loss=FUNCTION)")
    return OwnLoss(load_function(spec, "loss"), spec)

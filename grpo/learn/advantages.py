"""Advantages: how much better a completion is than the others of its group.

    A_i = (r_i - mean(r)) / (std(r) + eps)        GRPO, arXiv:2402.03300, section 4.1.2

Without the division these are the advantages of Dr. GRPO (arXiv:2503.20783).

The standard deviation is that of a sample (divisor n - 1), as in TRL and by default in `torch.std`;
the GRPO paper leaves it open. The module `statistics` computes means and deviations exactly and
rounds them once, to float64. So a group of equal rewards has advantages of exactly 0, instead of
rounding errors that the division would magnify.
"""

from collections.abc import Sequence
from statistics import mean, stdev

from grpo.choices import SCALES

# Added to a standard deviation before a division by it.
EPS = 1e-4


def advantages(
    rewards: Sequence[Sequence[float]], *, scale: str = "group", eps: float = EPS
) -> list[list[float]]:
    """Return the advantage of each completion, in the shape of `rewards`: one list for each group.

    `rewards` are lists, a NumPy array or a tensor, of floats or of integers. `scale` is one of:

    - "group": divide by the standard deviation of the group's rewards;
    - "batch": divide by that of all rewards given, which is *not* taken about the groups' means.
      With several ranks the caller gathers all rewards first. Under `on_degenerate: skip` they are
      those of the groups that are trained on; TRL's `scale_rewards="batch"` counts all groups;
    - "none": do not divide.

    A group has at least two rewards; for "batch", the batch has.
    """
    groups = floats(rewards)
    group_divisors = divisors(groups, scale=scale, eps=eps)
    return [
        _centred_over(group, divisor) for group, divisor in zip(groups, group_divisors, strict=True)
    ]


def floats(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rewards as Python floats.

    `statistics` would round the mean of NumPy integers to an integer.
    """
    return [[float(reward) for reward in group] for group in rewards]


def divisors(rewards: list[list[float]], *, scale: str, eps: float) -> list[float]:
    """Return the number by which each group's advantages are divided; `scale` as in `advantages`.

    `rewards` are the result of `floats`.
    """
    assert scale in SCALES and eps > 0
    if scale == "none":
        return [1.0] * len(rewards)
    if scale == "group":
        return [stdev(group) + eps for group in rewards]

    every_reward = [reward for group in rewards for reward in group]
    return [stdev(every_reward) + eps] * len(rewards) if rewards else []


def _centred_over(group: list[float], divisor: float) -> list[float]:
    """Return (reward - mean) / divisor for each reward of a group."""
    centre = mean(group)
    return [(reward - centre) / divisor for reward in group]

"""Rewards to advantages, relative to the group: GRPO (arXiv:2402.03300); without std, Dr. GRPO
(arXiv:2503.20783).

The standard deviation is that of a sample (divisor n - 1), as in TRL and as `torch.std` does by
default; the GRPO paper leaves it open. Means and deviations are computed exactly and rounded once
to float64 (`statistics`), so that a constant group gets zeros and not rounding errors that the
division would blow up.
"""

from collections.abc import Sequence
from statistics import mean, stdev

SCALES = ("group", "batch", "none")


def advantages(
    rewards: Sequence[Sequence[float]], *, scale: str = "group", eps: float = 1e-4
) -> list[list[float]]:
    """Return (reward - mean of its group) / (std + eps), in the shape of `rewards`: one list for
    each group.

    `rewards` are lists, a NumPy array or a tensor, of floats or of integers. `scale` says which
    std: "group", that of the group's rewards; "batch", that of all rewards given, *not* centred on
    their groups (TRL's `scale_rewards="batch"`), so across ranks the caller gathers first; "none",
    no division at all. A group, and for "batch" the batch, has at least two rewards.
    """
    groups = floats(rewards)
    return [
        _centred_over(group, divisor)
        for group, divisor in zip(groups, divisors(groups, scale=scale, eps=eps), strict=True)
    ]


def floats(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rewards as Python's floats: `statistics` rounds the mean of NumPy's integers to
    an integer.
    """
    return [[float(reward) for reward in group] for group in rewards]


def divisors(rewards: list[list[float]], *, scale: str, eps: float) -> list[float]:
    """Return what the advantages of each group are divided by, see `advantages`; `rewards` are
    those of `floats`.
    """
    assert scale in SCALES and eps > 0
    if scale == "none":
        return [1.0] * len(rewards)
    if scale == "group":
        return [stdev(group) + eps for group in rewards]
    everything = [reward for group in rewards for reward in group]
    return [stdev(everything) + eps] * len(rewards) if rewards else []


def _centred_over(group: list[float], divisor: float) -> list[float]:
    centre = mean(group)
    return [(reward - centre) / divisor for reward in group]

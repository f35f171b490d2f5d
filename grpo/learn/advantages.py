"""Rewards to advantages, relative to the group: GRPO (arXiv:2402.03300); without std, Dr. GRPO (arXiv:2503.20783).

The standard deviation is that of a sample (divisor n - 1), as in TRL and as `torch.std` does by default; the GRPO paper
leaves it open. Means and deviations are computed exactly and rounded once to float64 (`statistics`), so that a constant
group gets zeros and not rounding errors that the division would blow up.
"""

from statistics import mean, stdev

SCALES = ("group", "batch", "none")


def advantages(rewards: list[list[float]], *, scale: str, eps: float = 1e-4) -> list[list[float]]:
    """Return (reward - mean of its group) / (std + eps), in the shape of `rewards`: one list for each group.

    `scale` says which std: "group", that of the group's rewards; "batch", that of all rewards given, *not* centred on
    their groups (TRL's `scale_rewards="batch"`), so across ranks the caller gathers first; "none", no division at all.
    A group, and for "batch" the batch, has at least two rewards.
    """
    return [
        _centred_over(group, divisor)
        for group, divisor in zip(rewards, divisors(rewards, scale=scale, eps=eps), strict=True)
    ]


def divisors(rewards: list[list[float]], *, scale: str, eps: float) -> list[float]:
    """Return what the advantages of each group are divided by, see `advantages`."""
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

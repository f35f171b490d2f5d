"""How the rewards of a step's groups spread: by the size of the spread, and by the level of the
problems.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from grpo.records import Group

BOUNDS = (
    0,
    0.01,
    0.03,
    0.1,
    0.3,
)  # of the bins, each with its upper bound; the first holds 0 alone


def histogram(spreads: Sequence[float]) -> dict[str, int]:
    """Return how many of the spreads (standard deviations of a group's rewards) lie in each bin.

    >>> histogram([0.0, 0.01, 0.02, 0.5])
    {'0': 1, '0-0.01': 1, '0.01-0.03': 1, '0.03-0.1': 0, '0.1-0.3': 0, '>0.3': 1}
    """
    names = ["0", *(f"{low:g}-{high:g}" for low, high in pairwise(BOUNDS)), f">{BOUNDS[-1]:g}"]
    counts = Counter(bisect_left(BOUNDS, spread) for spread in spreads)
    return {name: counts[number] for number, name in enumerate(names)}


def by_level(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return for each level: its groups, their mean score and mean spread, and how many are of
    each class and in each trap.
    """
    levels: dict[int, list[Group]] = {}
    for group in groups:
        levels.setdefault(group.problem.level, []).append(group)
    return {
        str(level): {
            "groups": len(here),
            "value": fmean(score.value for group in here for score in group.scores),
            "group_std": fmean(group.spread for group in here),
            "class": dict(Counter(group.verdict for group in here)),
            "trap": dict(Counter(group.trap for group in here if group.trap)),
        }
        for level, here in sorted(levels.items())
    }

"""Metrics of a step's groups: standard deviations of reward, classes, actions, traps and levels.

Metrics about rewards, classes and traps count only the first try of each group, so that resampling
does not flatter them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from grpo.records import CLASSES, Group

# Upper bounds of the histogram's bins. The first bin holds only 0.
BOUNDS = (0, 0.01, 0.03, 0.1, 0.3)


def first_tries(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of first tries, without those that were sampled again."""
    return [group for group in groups if group.attempt == 0]


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics of a step's `groups` (every try), under their names in metrics.jsonl."""
    first = first_tries(groups)
    completions = sum(len(group.scores) for group in first)

    actions = Counter(group.action for group in groups)
    classes = Counter(group.class_name for group in first)
    traps = Counter(
        trap for group in first for score in group.scores if (trap := score.parts.get("trap"))
    )

    return {
        "frac_reward_zero_std": fmean(max(group.rewards) == min(group.rewards) for group in first),
        "group_std": fmean(group.reward_std for group in first),
        "group_std/hist": histogram([group.reward_std for group in first]),
        "distinct_completions": fmean(len(set(group.texts)) for group in first),
        "groups/count": len(first),
        "groups/kept": actions["keep"],
        "groups/resampled": actions["resample"],
        "groups/skipped": actions["skip"],
        "groups/demonstrated": actions["demonstrate"],
        **{f"groups/class/{name}": classes[name] for name in CLASSES},
        "groups/trapped": sum(group.trap is not None for group in first),
        **{f"traps/{name}": count / completions for name, count in traps.most_common()},
        "levels": by_level(first),
    }


def histogram(stds: Sequence[float]) -> dict[str, int]:
    """Return how many of the standard deviations `stds` lie in each bin.

    >>> histogram([0.0, 0.01, 0.02, 0.5])
    {'0': 1, '0-0.01': 1, '0.01-0.03': 1, '0.03-0.1': 0, '0.1-0.3': 0, '>0.3': 1}
    """
    names = ["0", *(f"{low:g}-{high:g}" for low, high in pairwise(BOUNDS)), f">{BOUNDS[-1]:g}"]
    counts = Counter(bisect_left(BOUNDS, std) for std in stds)
    return {name: counts[number] for number, name in enumerate(names)}


def by_level(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each level: number of groups, mean score, mean standard deviation of
    reward, and the number of groups in each class and in each trap.
    """
    levels: dict[int, list[Group]] = {}
    for group in groups:
        levels.setdefault(group.problem.level, []).append(group)

    return {
        str(level): {
            "groups": len(members),
            "value": fmean(score.value for group in members for score in group.scores),
            "group_std": fmean(group.reward_std for group in members),
            "class": dict(Counter(group.class_name for group in members)),
            "trap": dict(Counter(group.trap for group in members if group.trap)),
        }
        for level, members in sorted(levels.items())
    }

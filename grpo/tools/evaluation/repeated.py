"""Figures of several samples of each problem: pass@k, and the majority's answer.

- pass@k: the probability that at least one of k samples is right, by the unbiased estimator of Chen
  et al. 2021 (arXiv:2107.03374): with c right ones of n samples, 1 - C(n - c, k) / C(n, k).
- maj@n: the share of problems whose most frequent answer is right (self-consistency,
  arXiv:2203.11171). Of equally frequent answers the first counts.

Intervals are over problems: the samples of one problem are not independent.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb
from statistics import fmean
from typing import Any

from grpo.evaluate import turns_of
from grpo.records import Group
from grpo.statistics import mean_interval, rate_interval
from tasks.base import Task, answers_of


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the estimate of pass@k from `right` right ones of `n` samples, 1 <= k <= n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= right <= n and 1 <= k <= n
    return 1 - comb(n - right, k) / comb(n, k)


def sizes(samples: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, ... and the number of samples itself.

    >>> sizes(12)
    [1, 2, 4, 8, 12]
    """
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def repeated_figures(task: Task, groups: Sequence[Group]) -> dict[str, Any]:
    """Return pass@k for several k, and the majority's score; {} if there is one sample each.

    For example ``{"pass_at": [{"k": 1, "mean": 0.25, "ci_low": 0.2, "ci_high": 0.3}, ...],
    "majority": {"k": 4, "mean": 0.3, "ci_low": 0.2, "ci_high": 0.4}}``.
    """
    samples = min(len(group.scores) for group in groups)
    if samples == 1:
        return {}

    rights = [[score.exact for score in group.scores] for group in groups]
    pass_at = []
    for k in sizes(samples):
        values = [pass_at_k(len(right), sum(right), k) for right in rights]
        low, high = mean_interval(values)
        pass_at.append({"k": k, "mean": fmean(values), "ci_low": low, "ci_high": high})

    majorities = [_majority_is_right(task, group) for group in groups]
    low, high = rate_interval(sum(majorities), len(majorities))
    majority = {"k": samples, "mean": fmean(majorities), "ci_low": low, "ci_high": high}
    return {"pass_at": pass_at, "majority": majority}


def _majority_is_right(task: Task, group: Group) -> bool:
    """Return whether the most frequent answer is right.

    A text without an answer has no vote, nor has one that the budget cut off.
    """
    found = answers_of(task, group.problem, turns_of(task, group.opened, group.texts))
    answers = [
        None if completion.is_truncated else answer
        for completion, answer in zip(group.completions, found, strict=True)
    ]
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return False
    (winner, _), *_ = counts.most_common(1)  # of equals, the one that was counted first
    return group.scores[answers.index(winner)].exact

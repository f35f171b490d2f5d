"""Completions that the budget cuts off: the soft penalty, and those that the loss leaves out.

A truncated completion often earns nothing although its beginning was right, which teaches noise.
DAPO (arXiv:2503.14476, section 3.4) tries two answers: "overlong filtering" leaves such completions
out of the loss, and "soft overlong punishment" (equation 13) lowers the rewards of all completions
that end near the budget, the more the nearer.

Departures from the paper: the budget is that of the problem, and the length over which the penalty
rises is at most the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo.records import Group
from tasks.base import COMPONENT

# The part of a score that holds the penalty; as a component of the reward it is a metric.
PENALTY = f"{COMPONENT}length_penalty"

# The paper's lengths: 4,096 of 20,480 tokens.
DEFAULT_SHARE = 0.2


def soft_penalty(length: int, *, budget: int, tokens: int | None = None) -> float:
    """Return what the `length` of a completion adds to its reward, from -1 to 0 (DAPO, eq. 13).

    It is 0 up to `tokens` before the end of the `budget`, and -1 at its end. By default `tokens` is
    a fifth of the budget.

    >>> [soft_penalty(length, budget=100, tokens=20) for length in (80, 85, 100)]
    [0.0, -0.25, -1.0]
    """
    if tokens is None:
        tokens = round(DEFAULT_SHARE * budget)
    tokens = min(max(tokens, 1), budget)
    return -min(max(length - (budget - tokens), 0), tokens) / tokens


def add_soft_penalty(
    groups: Sequence[Group], budget_of: Callable[[Group], int], tokens: int | None
) -> None:
    """Add the soft penalty to the rewards of scored `groups`, in place.

    Every score keeps its value, and has the penalty among its parts.
    """
    for group in groups:
        budget = budget_of(group)
        scores = []
        for score, completion in zip(group.scores, group.completions, strict=True):
            penalty = soft_penalty(len(completion.tokens), budget=budget, tokens=tokens)
            parts = {**score.parts, PENALTY: penalty}
            scores.append(replace(score, reward=score.reward + penalty, parts=parts))
        group.scores = scores

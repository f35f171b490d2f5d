"""Interleaving with a sparse reward: 1 for the whole target, 0 for anything else.

At 12 words the embedded model is right in about 1 of 50 completions, so most groups fail with
sixteen different texts. It shows what the temperature does to groups that fail.
"""

from collections.abc import Sequence
from dataclasses import replace

from grpo.tasks.base import Problem, Score
from grpo.tasks.interleave import Interleave


class ExactInterleave(Interleave):
    name = "exact-interleave"
    rewards = ()
    default_level = 12

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        scores = super().score(problem, completions)
        return [replace(score, reward=float(score.exact)) for score in scores]

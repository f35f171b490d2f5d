"""How difficult each problem of a data set is for the policy, measured before training.

GRPO learns nothing from problems that are always solved, and nothing from those that never are. So
a run can keep the problems whose mean score lies within a range (`keep_difficulty`). Each problem
is sampled as the run will sample it, with a seed of its own, so that neither the pre-flight nor a
training step sees the completions by which its problems were selected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from grpo.curriculum.survey import SurveySubject
from grpo.records import Group, truncated_share
from grpo.rollout.budget import fitting
from tasks.base import Problem

SEED = 3_000_029  # of the samples, whatever the seed of the run

# Problems that are sampled at once.
BATCH = 64

# What is done with a problem: it is kept, or why it is left out.
Outcome = Literal["kept", "too hard", "too easy", "too long"]


@dataclass(frozen=True)
class Difficulty:
    """The difficulty of a problem, e.g. ``Difficulty("91c0...", 1, 0.25, 0.0, "kept")``.

    `score` is the mean score of its completions, and `truncated` the share of them that the budget
    cut off. Both are None if the problem does not fit the model, which is then `too long`.
    """

    key: str
    level: int
    score: float | None
    truncated: float | None
    outcome: Outcome


def outcome_of(score: float, limits: Sequence[float]) -> Outcome:
    """Return the outcome of a problem with this mean score; both `limits` belong to the range.

    >>> [outcome_of(score, [0.2, 0.8]) for score in (0.1, 0.2, 0.8, 0.9)]
    ['too hard', 'kept', 'kept', 'too easy']
    """
    low, high = limits
    if score < low:
        return "too hard"
    return "kept" if score <= high else "too easy"


def measure_difficulty(
    subject: SurveySubject,
    limits: Sequence[float],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> list[Difficulty]:
    """Return the difficulty of every problem of the supply's data set, in its order.

    `show` is told how many problems are done, and how many there are.
    """
    problems = list({problem.key: problem for problem in subject.supply.problems}.values())
    fit = [problem for problem in problems if _fits(subject, problem)]

    scores: dict[str, tuple[float, float]] = {}
    size = BATCH * subject.ranks.size
    for start in range(0, len(fit), size):
        local = subject.answer(subject.ranks.share(fit[start : start + size]), SEED)
        for key, score, truncated in subject.ranks.gather([_figures(group) for group in local]):
            scores[key] = score, truncated
        show(min(start + size, len(fit)), len(fit))

    found = []
    for problem in problems:
        if problem.key not in scores:
            found.append(Difficulty(problem.key, problem.level, None, None, "too long"))
            continue
        score, truncated = scores[problem.key]
        outcome = outcome_of(score, limits)
        found.append(Difficulty(problem.key, problem.level, score, truncated, outcome))
    return found


def _fits(subject: SurveySubject, problem: Problem) -> bool:
    asked = subject.settings.sampling.max_new_tokens
    return bool(list(fitting(subject.policy, [problem], [], asked)))


def _figures(group: Group) -> tuple[str, float, float]:
    score = fmean(score.value for score in group.scores)
    return group.problem.key, score, truncated_share([group])

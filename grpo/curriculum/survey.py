"""The survey: what a policy can do at each level before training.

A few problems of each level are sampled exactly as the run will sample them. The problems are from
the training split, with a seed of their own, so every run of a task has the same ones and tables
can be compared. They do not count as seen, because nothing is learned from them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo.distributed import SINGLE, Ranks
from grpo.evaluate import EvaluationSettings, Sampling, evaluate, select
from grpo.model.policy import Policy
from grpo.records import Group, truncated_share
from grpo.variance import ClassRule, group_class
from tasks.base import Problem, levels_of
from tasks.scoring import range_of
from tasks.supply import LADDER, Supply, patience

SEED = 3_000_003  # of the problems and the samples, whatever the seed of the run
PROBLEMS = 4  # of each level; with 16 completions each, enough to see whether groups vary
LEVELS = (1, 2, 3, 5, *LADDER)  # for a task that does not name its own

# A level is within reach if at least half of its groups vary and at least one in four has a right
# answer. It is solved if nearly all answers are right: a ladder would leave it in a few steps.
VARIED = 0.5
ANY_EXACT = 0.25
SOLVED = 0.9


@dataclass(frozen=True)
class LevelSurvey:
    """The results of one level, e.g. ``LevelSurvey(10, 4, 0.46, 0.19, 0.2, 1.0, 0.5, ...)``.

    `value` (score), `reward`, `exact` (right answers) and `truncated` are means over all
    completions. `reward_std` is the mean standard deviation within a group, with divisor n.
    `varied` and `any_exact` are the shares of the groups that vary, and that have a right answer
    (pass@G). `distinct` is the mean number of different texts in a group. Levels that were sampled
    together divide their `seconds` by tokens.
    """

    level: int
    groups: int
    value: float
    reward: float
    reward_std: float
    varied: float
    any_exact: float
    exact: float
    truncated: float
    distinct: float
    tokens: int
    seconds: float

    @property
    def is_solved(self) -> bool:
        """Whether nearly all answers are right."""
        return self.exact >= SOLVED

    @property
    def is_within_reach(self) -> bool:
        """Whether training can begin at this level."""
        return self.varied >= VARIED and self.any_exact >= ANY_EXACT

    @property
    def finding(self) -> str:
        """The deciding figures, in words."""
        if self.is_solved:
            return f"{self.exact:.0%} of its answers are right"
        return f"{self.varied:.0%} of its groups vary and {self.any_exact:.0%} hold a right answer"


@dataclass(frozen=True)
class SurveySettings:
    """How a run samples and classifies groups.

    E.g. ``SurveySettings(Sampling(1.0), group_size=16, rule=ClassRule())``.
    """

    sampling: Sampling
    group_size: int
    rule: ClassRule
    draft: str = "auto"


@dataclass(frozen=True)
class SurveySubject:
    """A policy to be measured before training, on which problems, and how.

    E.g. ``SurveySubject(policy, supply, SurveySettings(Sampling(1.0), 16, ClassRule()))``.
    """

    policy: Policy
    supply: Supply
    settings: SurveySettings
    ranks: Ranks = SINGLE

    def answer(self, problems: Sequence[Problem], seed: int) -> list[Group]:
        """Return a scored group for each problem, on this rank alone."""
        how = self.settings
        settings = EvaluationSettings(how.sampling, seed, how.group_size, draft=how.draft)
        return evaluate(self.policy, self.supply.task, problems, settings)


def levels_to_survey(supply: Supply, training_levels: Sequence[int]) -> list[int]:
    """Return the `training_levels` and the levels that are easier than the last of them, rising.

    The easier levels are those of the dataset, or else those that the task names, or else LEVELS.
    """
    last = training_levels[-1]
    offered = supply.levels or levels_of(supply.task, last) or LEVELS
    return sorted({level for level in offered if level < last} | set(training_levels))


def survey(
    subject: SurveySubject, levels: Sequence[int], *, training_levels: Sequence[int]
) -> tuple[list[LevelSurvey], list[Group]]:
    """Sample problems of the `levels`, which rise; return a row for each level, and all groups.

    Beyond the first of the `training_levels` the survey ends at a level without a right answer,
    because harder ones would take longest and show nothing. A level for which the task has no
    problems is left out, unless it is one of the `training_levels`.
    """
    # The easier levels are one batch, which takes as many forward passes as the longest of them.
    first = training_levels[0]
    batches = [[level for level in levels if level <= first]]
    batches += [[level] for level in levels if level > first]

    rows: list[LevelSurvey] = []
    groups: list[Group] = []
    for batch in batches:
        start = time.perf_counter()

        problems: list[Problem] = []
        for level in batch:
            is_asked = level in training_levels
            problems += draw(subject, level, is_asked=is_asked)

        sampled = _sample(subject, problems)
        rows += _rows(sampled, time.perf_counter() - start)
        groups += sampled
        if not rows or not rows[-1].any_exact:
            break

    for index, group in enumerate(groups):
        group.index = index
    return rows, groups


def draw(subject: SurveySubject, level: int, *, is_asked: bool) -> list[Problem]:
    """Return PROBLEMS distinct problems of a level, or as many as there are.

    If the task cannot make problems of the level, its error is raised if the user asked for the
    level (`is_asked`); otherwise the list is empty.
    """
    supply = subject.supply
    try:
        family = supply.family_size(level)
        found = select(
            subject.policy,
            supply.sample(level, SEED),
            PROBLEMS,
            frozenset(),
            subject.settings.sampling,
            fruitless=patience(PROBLEMS, family),
            family=family,
        )
    except Exception:
        # The task is user code, and need not have easier levels that nobody asked for.
        if is_asked:
            raise
        return []
    return found.problems


def _sample(subject: SurveySubject, problems: Sequence[Problem]) -> list[Group]:
    """Return a group for each problem, sampled, scored and classified."""
    ranks = subject.ranks
    groups = ranks.gather(subject.answer(ranks.share(problems), SEED))
    for group in groups:
        group.class_name = group_class(group, subject.settings.rule, range_of(subject.supply.task))
        group.action = "skip"  # nothing is learned from it
    return groups


def _rows(groups: Sequence[Group], seconds: float) -> list[LevelSurvey]:
    """Return a row for each level of the groups, which took `seconds` together."""
    tokens = sum(group.tokens for group in groups)
    by_level: dict[int, list[Group]] = {}
    for group in groups:
        by_level.setdefault(group.problem.level, []).append(group)

    return [
        summarise_level(level, members, seconds * sum(group.tokens for group in members) / tokens)
        for level, members in by_level.items()
    ]


def summarise_level(level: int, groups: Sequence[Group], seconds: float = 0.0) -> LevelSurvey:
    """Return the row of a level's scored and classified groups."""
    scores = [score for group in groups for score in group.scores]
    return LevelSurvey(
        level=level,
        groups=len(groups),
        value=fmean(score.value for score in scores),
        reward=fmean(score.reward for score in scores),
        reward_std=fmean(group.reward_std for group in groups),
        varied=fmean(group.class_name == "varied" for group in groups),
        any_exact=fmean(any(score.exact for score in group.scores) for group in groups),
        exact=fmean(score.exact for score in scores),
        truncated=truncated_share(groups),
        distinct=fmean(len(set(group.texts)) for group in groups),
        tokens=sum(group.tokens for group in groups),
        seconds=seconds,
    )

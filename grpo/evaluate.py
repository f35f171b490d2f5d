"""Held-out evaluation: score distinct problems of a split that training never draws from.

Each mean comes with its 95 % interval.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from grpo.data.errors import UserError
from grpo.model.policy import Policy
from grpo.records import Group, truncated_share
from grpo.rollout.generate import Drafting, budget_for, fitting, sample_groups
from grpo.rollout.sampling import sample_key, truncation
from grpo.statistics import mean_interval
from grpo.tasks.base import (
    Problem,
    Task,
    component_means,
    declared_budget,
    family_size,
    scores_of_groups,
    without_end,
)
from grpo.tasks.supply import DistinctProblems, first_distinct, patience, problem_stream

# Says how far an evaluation is: ``progress("scoring", 64, 200)``.
ShowProgress = Callable[[str, int, int], None]

BATCH = 64  # problems that are answered at once

# A warning is shown if a larger share of the completions is truncated.
TOO_MANY_TRUNCATED = 0.5


def held_out_stream(
    task: Task, level: int, split: str, *, seed: int, size: int
) -> tuple[Iterator[Problem], int]:
    """Return the problems of a split, and how many fruitless draws end a search for `size` ones."""
    stream = problem_stream(task, seed=seed, split=split, level=level)
    return stream, patience(size, family_size(task, level))


def select(
    policy: Policy,
    problems: Iterable[Problem],
    size: int,
    seen: Set[str] = frozenset(),
    budget: int | None = None,
    fruitless: int | None = None,
) -> DistinctProblems:
    """Return `size` distinct `problems` that training has not `seen` and that fit the model's
    context and the `budget` of --max-new-tokens; if there are fewer, all of them. `fruitless` is
    that of `first_distinct`.
    """
    too_long: list[Problem] = []
    found = first_distinct(fitting(policy, problems, too_long, budget), size, seen, fruitless)
    return replace(found, too_long=len({problem.key for problem in too_long}))


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    config: Any,
    seed: int = 0,
    samples: int = 1,
    progress: ShowProgress = lambda part, done, total: None,
) -> list[Group]:
    """Return a group of so many scored `samples` for each problem.

    Each completion is an independent draw, by the temperature (0: greedy), top_p and max_new_tokens
    of `config`. `progress` is called when a batch is about to be sampled or scored, with the number
    of problems that are done.
    """
    groups: list[Group] = []
    drafting = Drafting()
    for start in range(0, len(problems), BATCH):
        part = problems[start : start + BATCH]
        progress("sampling", start, len(problems))
        found = sample_groups(
            policy,
            task,
            part,
            indices=range(start, start + len(part)),
            keys=[_keys(seed, problem, samples) for problem in part],
            temperature=config.temperature,
            budgets=budgets(policy, task, part, config.max_new_tokens),
            truncate=truncation(config.top_p),
            drafting=drafting,
        )
        progress("scoring", start, len(problems))
        score_groups(task, found)
        groups += found
    return groups


# Global settings that a user's reward must not change: training continues with them.
TORCH = ("default_dtype", "default_device", "float32_matmul_precision")


def score_groups(task: Task, groups: Sequence[Group]) -> None:
    """Fill in the scores of `groups`. Only completions that ended by themselves are exact, and of
    windows behind which the answer goes on those that did not.
    """
    turns = [(group.problem, turns_of(task, group.opened, group.texts)) for group in groups]
    before = {name: getattr(torch, f"get_{name}")() for name in TORCH}
    found = scores_of_groups(task, turns)
    for name, value in before.items():
        if getattr(torch, f"get_{name}")() != value:
            raise UserError(
                f"task {task.name}: score() called torch.set_{name}; set it back to {value}"
            )
    for group, scores in zip(groups, found, strict=True):
        group.scores = [
            without_end(task, group.problem, completion.text, score)
            if completion.is_truncated or (group.problem.goes_on and completion.finish == "stop")
            else score
            for completion, score in zip(group.completions, scores, strict=True)
        ]


def turns_of(task: Task, opened: str, texts: Sequence[str]) -> list[str]:
    """Return completions as `task` reads them: if it reads reasoning, they begin with the tag that
    the prompt `opened` it with, "" if none.
    """
    begin = opened if getattr(task, "reads_reasoning", False) else ""
    return [begin + text for text in texts]


def _keys(seed: int, problem: Problem, samples: int) -> list[int]:
    """Return a key for each sample; the first does not depend on their number."""
    first = sample_key("eval", seed, problem.key)
    return [first] + [sample_key("eval", seed, problem.key, i) for i in range(1, samples)]


def budgets(
    policy: Policy, task: Task, problems: Sequence[Problem], asked: int | None
) -> list[int]:
    """Return the most new tokens that a completion of each problem may take."""
    return [
        budget_for(policy, policy.encode(one), one.target, asked, declared_budget(task, one.level))
        for one in problems
    ]


def truncation_warning(line: dict[str, Any], where: str) -> str:
    """Return a warning, which begins with `where`, if most completions were truncated."""
    if line["truncated"] <= TOO_MANY_TRUNCATED:
        return ""
    return (
        f"{where}: {line['truncated']:.0%} of the completions were truncated at the budget of "
        f"{line['budget']} tokens; if answers need more, give a larger --max-new-tokens, or "
        "shorter prompts if the model's context is full"
    )


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Return n, the mean value, the rate of exact answers and the mean of each component of the
    reward, each with its 95 % interval, the share of truncated completions, and the number of those
    that the reward did not judge, which are in no mean. It must have judged one.

    A problem counts once, by the mean of its samples: n and the intervals are over problems.
    """
    judged = [group.judged for group in groups if group.judged]
    values = [fmean(score.value for score in scores) for scores in judged]
    exact = [fmean(score.exact for score in scores) for scores in judged]
    exact_low, exact_high = mean_interval(exact)  # of one sample each: of a binomial count
    components = component_means(judged)
    return {
        "n": len(values),
        **mean_of(values),
        "exact": fmean(exact),
        "exact_low": exact_low,
        "exact_high": exact_high,
        "truncated": truncated_share(groups),
        "completions": sum(len(group.scores) for group in groups),
        "unjudged": sum(score.abstained for group in groups for score in group.scores),
        "components": {name: mean_of(found) for name, found in components.items()},
    }


def mean_of(values: Sequence[float], least: float = 0.0) -> dict[str, float]:
    """Return the mean of values from `least` to 1 with its 95 % interval."""
    low, high = mean_interval(values, (least, 1.0))
    return {"mean": fmean(values), "ci_low": low, "ci_high": high}

"""Held-out evaluation: fresh problems of a split that training never draws from, scored and given an interval."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo.policy import Policy
from grpo.records import Group
from grpo.rollout.drafting import Drafting
from grpo.rollout.engine import budget_for, generate
from grpo.rollout.sampling import sample_key
from tasks.base import Problem, Task, draft_of, scores_of

RESAMPLES = 10_000


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    truncate: Callable | None = None,
    batch: int = 64,
) -> list[Group]:
    """Return one group of one scored completion for each problem; `temperature` 0 is greedy."""
    groups, draft, drafting = [], draft_of(task), Drafting()
    for start in range(0, len(problems), batch):
        part = problems[start : start + batch]
        prompts = [policy.encode(problem.prompt) for problem in part]
        answers = generate(
            policy,
            prompts,
            keys=[[sample_key("eval", seed, problem.key)] for problem in part],
            temperatures=[temperature] * len(part),
            truncate=truncate,
            drafting=drafting,
            guesses=[draft(problem) for problem in part] if draft else None,
            budgets=[
                budget_for(policy, prompt, problem.target) for prompt, problem in zip(prompts, part)
            ],
        )
        groups += [
            Group(
                start + i,
                problem,
                prompt,
                temperature,
                completions,
                scores=scores_of(task, problem, [completion.text for completion in completions]),
            )
            for i, (problem, prompt, completions) in enumerate(zip(part, prompts, answers))
        ]
    return groups


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Return n, mean value with its 95 % percentile-bootstrap interval (Efron 1979), and the rate of exact answers."""
    scores = [group.scores[0] for group in groups]
    values = np.array([score.value for score in scores])
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return {
        "n": len(values),
        "mean": float(values.mean()),
        "ci_low": float(low),
        "ci_high": float(high),
        "exact": float(np.mean([score.exact for score in scores])),
    }

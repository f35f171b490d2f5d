"""Demonstrations: right answers of the task that stand among sampled completions or alone.

A policy that is sure of a mistake never samples the right answer: all completions of the group make
the same mistake, and no difference between them says what would be right. So with `demonstrate` the
last completion of such a group is replaced by the right answer (LUFFY, arXiv:2504.14945). The group
then has variance, and its advantages point to what none of its completions wrote.

Departures from the paper:

- Its demonstrations are those of a stronger model, in every group. These are the task's own, only
  where no completion is right.
- The paper's loss shapes the policy's probability p of a token as p / (p + 0.1), whose slope
  vanishes with p. A policy that is sure of a mistake gives the right token 1e-5 or less
  (runs/LOG.md, 2026-11-27), and so would not learn it. Here the ratio is taken to the policy
  itself, as if it had sampled the answer: the gradient of a token is its advantage times that of
  log p.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo.distributed import SINGLE, Ranks
from grpo.model.policy import Policy
from grpo.records import Completion, Group
from grpo.variance import common_trap
from tasks.base import Problem


def demonstration(policy: Policy, problem: Problem) -> Completion:
    """Return the right answer of a problem as a completion."""
    tokens = (*policy.target_tokens(problem.target), policy.end)
    zeros = (0.0,) * len(tokens)
    return Completion(tokens, zeros, policy.decode(tokens), "stop", is_demonstration=True)


def demonstrate(
    policy: Policy,
    score: Callable[[Sequence[Group]], None],
    groups: Sequence[Group],
    ranks: Ranks = SINGLE,
) -> list[Group]:
    """Return a copy of each group without a right completion that shows the right answer.

    The copy is to be learned from, and the group's action becomes "demonstrate". A group that will
    be sampled again is left alone, and so is one whose problem has no target, or one that is not
    scored as right, or earns no more than the best completion. `score` fills in the scores of
    groups. Each of several `ranks` scores some of the answers.
    """
    stuck = [
        group
        for group in groups
        if group.action != "resample"
        and group.problem.target.strip()
        and not any(score.exact for score in group.scores)
    ]
    answers = [
        replace(group, completions=[demonstration(policy, group.problem)], scores=[])
        for group in ranks.share(stuck)
    ]
    score(answers)

    shown = []
    for group, answer in zip(stuck, ranks.gather(answers), strict=True):
        (earned,) = answer.scores
        if not earned.exact or earned.reward <= max(group.rewards):
            continue
        scores = [*group.scores[:-1], earned]
        copy = replace(
            group,
            completions=[*group.completions[:-1], *answer.completions],
            scores=scores,
            attempt=group.attempt + 1,
            class_name="varied",
            trap=common_trap(scores),
            action="keep",
            advantages=[],
        )
        shown.append(copy)
        group.action = "demonstrate"
    return shown

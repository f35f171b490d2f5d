"""Right answers as completions: for groups in which every completion fails, and for imitation.

Demonstrations in the group (LUFFY, arXiv:2504.14945): where no completion of a group is right, the
last one is replaced by the right answer. The group then has variance, and the policy a direction.
Departures: the paper mixes demonstrations of a stronger model into every group; ours are the task's
own right answers, and only groups that fail get one.
"""

from dataclasses import replace

from grpo.model.policy import Policy
from grpo.records import Completion, Group
from tasks.base import Problem, Task, is_right, scores_of


def demonstration(policy: Policy, problem: Problem) -> Completion:
    """Return the right answer of `problem` as a completion that nobody sampled."""
    tokens = (*policy.target_tokens(problem.target), policy.end)
    return Completion(tokens, (0.0,) * len(tokens), policy.decode(tokens), "stop", True)


def right_answer(policy: Policy, task: Task, index: int, problem: Problem) -> Group:
    """Return the right answer of `problem` as a group of one, with advantage 1: what imitation
    learns from.
    """
    completion = demonstration(policy, problem)
    return Group(
        index,
        problem,
        policy.encode(problem),
        1.0,
        [completion],
        scores=scores_of(task, problem, [completion.text]),
        action="imitate",
        advantages=[1.0],
        shots=policy.shots(problem),
    )


def fails(group: Group) -> bool:
    """Return whether no completion of `group` is right, so that nothing in it shows the policy
    where to go.
    """
    return group.verdict != "solved" and not any(map(is_right, group.scores))


def with_demonstration(policy: Policy, task: Task, group: Group) -> Group:
    """Return a copy of `group` to be learned from, whose last completion is the right answer."""
    shown = demonstration(policy, group.problem)
    (score,) = scores_of(task, group.problem, [shown.text])
    return replace(
        group,
        completions=[*group.completions[:-1], shown],
        scores=[*group.scores[:-1], score],
        attempt=group.attempt + 1,
        verdict="varied",
        action="keep",
        advantages=[],
    )

"""Right answers of the training stream, for the warm start (`grpo.curriculum.warm_start`)."""

from data.errors import UserError
from grpo.curriculum.warm_start import right_answer
from grpo.evaluate import turns_of
from grpo.records import Group
from grpo.training.problems import ProblemStream
from tasks.base import compares
from tasks.scoring import scores_of


def has_right_targets(stream: ProblemStream, level: int) -> bool:
    """Return whether the next problem has a target, and it is scored as right.

    A task with continuous rewards may have targets that are no better than other texts, and rows of
    the user's own have none. One that compares completions does not say what a target alone earns.
    """
    _, problem = stream.at(stream.next_index, level)
    if not problem.target.strip() or compares(stream.task):
        return False
    turns = turns_of(stream.task, stream.policy.opened(problem), [problem.target])
    (score,) = scores_of(stream.task, problem, turns)
    return score.exact


def no_answers(setting: str, task: str, remedy: str) -> UserError:
    """Return the error of a `setting` that needs right answers, for a task whose targets are not.

    The `remedy` says what is done with them, and what to do instead.
    """
    return UserError(
        f"{setting}: task {task} does not score the target of its problems as right, so there is "
        f"nothing to {remedy}"
    )


def draw_answers(stream: ProblemStream, level: int, size: int) -> list[Group]:
    """Return the right answers of the next `size` problems, which then count as seen."""
    groups: list[Group] = []
    while len(groups) < size:
        index, problem = stream.at(stream.next_index, level)
        groups.append(right_answer(stream.policy, stream.task, index, problem))
        stream.mark_seen([(index, problem)])
    return groups

"""The endless stream of a task's problems, addressed by seed, split, level and index."""

import hashlib
import random
from collections.abc import Iterator
from itertools import count

from data.errors import UserError
from tasks.checks import calling, check_problem
from tasks.protocol import SPLITS, Problem, Task
from tasks.wording import worded


def problem_at(task: Task, *, seed: int, split: str, level: int, index: int) -> Problem:
    """Return problem `index` of a stream: a pure function of the task's name and the arguments.

    The arguments are hashed, not added, so that neighbouring seeds have nothing in common.
    """
    assert split in SPLITS, split
    text = f"{task.name}/{seed}/{split}/{level}/{index}"
    rng = random.Random(hashlib.sha256(text.encode()).digest())

    what = f"task {task.name}: make({level}, {split!r}, rng)"
    with calling(what):
        problem = task.make(level, split, rng)
    check_problem(problem, f"{what} returned a problem that")
    if problem.level != level:
        raise UserError(
            f"{what} returned a problem of level {problem.level}; give it level {level}"
        )
    return worded(task, problem)


def problem_stream(
    task: Task, *, seed: int, split: str, level: int, start: int = 0
) -> Iterator[Problem]:
    """Yield problems `start`, `start + 1`, ... of the endless stream."""
    for index in count(start):
        yield problem_at(task, seed=seed, split=split, level=level, index=index)

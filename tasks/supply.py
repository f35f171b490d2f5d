"""The supply of problems, one for every task: what training draws, and what evaluation may use.

Three kinds of training supply: `fresh` (problem after problem of the endless stream; the default), ``fixed:N`` (the first N
different problems of the stream, over and over) and a data set from a file. The last two are epoch sets: each epoch
goes through all of them, in an order shuffled by the seed. Problem `index` is a pure function of seed, level and
index, so a run can be taken up anywhere.
"""

import hashlib
import random
from collections.abc import Container, Iterable, Sequence
from itertools import islice

from tasks.base import Problem, Task, UserError, problem_at, problem_stream


class Supply:
    """What training draws from. `kind` is "fresh" or "fixed:N"; a `dataset` goes before it.

    Of a data set each level has the problems of that level, or, where it is `mixed`, every level has all of them.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        kind: str = "fresh",
        dataset: Sequence[Problem] = (),
        mixed: bool = False,
    ):
        self.task, self.seed, self.mixed = task, seed, mixed
        self.dataset: dict[int, list[Problem]] = {}
        for problem in dataset:
            self.dataset.setdefault(0 if mixed else problem.level, []).append(problem)
        self.fixed = fixed_size(kind)
        self._sets: dict[int, list[Problem]] = {}
        self._order: tuple[int, int, list[int]] = (0, -1, [])  # size, epoch, order

    def at(self, index: int, level: int) -> Problem:
        """Return problem `index` of training at `level`."""
        if not (self.fixed or self.dataset):
            return problem_at(self.task, seed=self.seed, split="train", level=level, index=index)
        problems = self.dataset[0 if self.mixed else level] if self.dataset else self._fixed(level)
        epoch, place = divmod(index, len(problems))
        return problems[self._epoch(len(problems), epoch)[place]]

    def family_size(self, level: int) -> int | None:
        """Return how many different problems there are at `level`, where the task knows it."""
        return getattr(self.task, "family_size", lambda level: None)(level)

    def _fixed(self, level: int) -> list[Problem]:
        if level not in self._sets:
            self._sets[level] = distinct_problems(
                self.task, seed=self.seed, split="train", level=level, size=self.fixed
            )
        return self._sets[level]

    def _epoch(self, size: int, epoch: int) -> list[int]:
        if self._order[:2] != (size, epoch):
            self._order = (size, epoch, epoch_order(self.seed, epoch, size))
        return self._order[2]


def fixed_size(kind: str) -> int:
    """Return N of "fixed:N", 0 for "fresh". Raises UserError for anything else."""
    name, _, size = kind.partition(":")
    if kind == "fresh":
        return 0
    if name == "fixed" and size.isascii() and size.isdecimal() and int(size):
        return int(size)
    raise UserError(
        f"--problems {kind}: give fresh, or fixed:N with a number of problems, e.g. fixed:2500"
    )


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order of an epoch: a permutation of 0 ... size - 1, another for each seed and epoch."""
    digest = hashlib.sha256(f"epoch/{seed}/{epoch}/{size}".encode()).digest()
    return random.Random(digest).sample(range(size), size)


def distinct_problems(task: Task, *, seed: int, split: str, level: int, size: int) -> list[Problem]:
    """Return the first `size` problems of the stream with keys of their own.

    Raises UserError when the task cannot make the level, or has too few different problems of it: 10 x `size` draws in
    a row brought nothing new. (Where exactly `size` exist, the last one is missed with a probability of e^-10.)
    """
    found: dict[str, Problem] = {}
    repeats = 0
    for problem in problem_stream(task, seed=seed, split=split, level=level):
        repeats = repeats + 1 if problem.key in found else 0
        found.setdefault(problem.key, problem)
        if len(found) == size:
            return list(found.values())
        if repeats == 10 * size:
            raise UserError(
                f"level {level} of task {task.name}, {split}: only {len(found)} different problems found, "
                f"and {size} are asked for; ask for {len(found)} or less"
            )


def held_out(
    problems: Iterable[Problem], size: int, seen: Container[str], where: str
) -> tuple[list[Problem], int]:
    """Return (`size` of `problems` that training has not seen, the first ones; how many seen ones were dropped).

    At most 2 x `size` are looked at, so that a stream without end may be given. Raises UserError, naming `where` they
    come from, when too few are left; it says how many more are needed.
    """
    kept, dropped = [], 0
    for problem in islice(problems, 2 * size):
        if problem.key in seen:
            dropped += 1
        else:
            kept.append(problem)
        if len(kept) == size:
            return kept, dropped
    raise UserError(
        f"{where}: {dropped} of {dropped + len(kept)} problems were trained on, {len(kept)} are left and {size} are asked "
        f"for; generate {size - len(kept)} more that training has not seen"
    )

"""The problems that training draws, and those that evaluation may use, for any task.

Training draws from the endless stream of new problems, or from a data set: a file, or a task's own
fixed set. A set is used in epochs: each goes through all problems, in an order shuffled by the
seed. If a run mixes levels, they share one count, so an epoch of a level lacks the problems whose
index went to another level. Problem `index` is a pure function of seed, level and index, so a run
can be resumed at any step.
"""

import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count, pairwise
from pathlib import Path

from grpo.data.errors import UserError
from grpo.data.files import read_jsonl, write_whole
from grpo.tasks.base import (
    FIELDS,
    SPLITS,
    Problem,
    Task,
    TaskError,
    asked,
    calling,
    check_problem,
    family_size,
    key_of,
    problems_of,
    worded,
)

LADDER = (10, 25, 50, 100, 200, 500)  # words of each text


def parse_levels(text: str, flag: str) -> list[int]:
    """Return the rising levels written as "10,25,50" after a `flag`."""
    parts = [part.strip() for part in text.split(",")]
    levels = [int(part) if part.isascii() and part.isdecimal() else 0 for part in parts]
    if any(low >= high for low, high in pairwise([0, *levels])):
        raise UserError(f"{flag} {text}: give rising whole numbers with commas, e.g. 10,25,50")
    return levels


def problem_at(task: Task, *, seed: int, split: str, level: int, index: int) -> Problem:
    """Return problem `index` of a stream: a pure function of the task's name and the arguments."""
    assert split in SPLITS, split
    # Hashed, not added, so that neighbouring seeds have nothing in common.
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


def problem_stream(task: Task, *, seed: int, split: str, level: int) -> Iterator[Problem]:
    """Yield the problems of the endless stream, from the first on."""
    for index in count():
        yield problem_at(task, seed=seed, split=split, level=level, index=index)


class Supply:
    """The problems that training draws: those of the `dataset`, or else the endless stream.

    Training at a level uses the problems of the dataset that have this level, or all of them if it
    is `mixed`.
    """

    def __init__(
        self, task: Task, *, seed: int, dataset: Sequence[Problem] = (), mixed: bool = False
    ):
        self.task, self.seed, self.mixed = task, seed, mixed
        self.dataset = list(dataset)
        self.by_level: dict[int, list[Problem]] = defaultdict(list)
        for problem in self.dataset:
            self.by_level[problem.level].append(problem)

    def at(self, index: int, level: int) -> Problem:
        """Return training problem `index` at `level`."""
        if not self.dataset:
            return problem_at(self.task, seed=self.seed, split="train", level=level, index=index)
        problems = self.dataset if self.mixed else self.by_level[level]
        epoch, place = divmod(index, len(problems))
        return worded(self.task, problems[epoch_order(self.seed, epoch, len(problems))[place]])

    @property
    def levels(self) -> list[int]:
        """The levels of the dataset, rising; [] without one."""
        return sorted({problem.level for problem in self.dataset})

    def sample(self, level: int, seed: int) -> Iterable[Problem]:
        """Return problems of `level` that training may draw, in an order that depends on `seed`."""
        if not self.dataset:
            return problem_stream(self.task, seed=seed, split="train", level=level)
        problems = self.by_level[level]
        shuffled = random.Random(f"sample/{seed}/{level}").sample(problems, len(problems))
        return (worded(self.task, one) for one in shuffled)

    def family_size(self, level: int) -> int | None:
        """Return how many different problems of `level` there are to train on; without a dataset
        it is what the task says, in all splits, or None.
        """
        return len(self.by_level[level]) if self.dataset else family_size(self.task, level)


AT_ENDS = 1 / 4  # the share of windows that begin with the answer, or end with it


def window_of(task: Task, words: int | None, seed: int, index: int, problem: Problem) -> Problem:
    """Return a window of so many `words` if the answer is longer, else the problem itself."""
    last = len(problem.target.split()) - words if words else 0
    if last <= 0:
        return problem
    draw = random.Random(f"window/{seed}/{index}")
    start = draw.choice([0, last]) if draw.random() < AT_ENDS else draw.randint(0, last)
    return asked(task, "window", problem, words, start)


@lru_cache(64)
def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order of an epoch: a permutation of 0 ... size - 1 for each seed and epoch."""
    digest = hashlib.sha256(f"epoch/{seed}/{epoch}/{size}".encode()).digest()
    return random.Random(digest).sample(range(size), size)


@dataclass(frozen=True)
class DistinctProblems:
    """What `first_distinct` found of the problems `asked` for.

    `dropped` counts distinct problems that training has seen, `too_long` those that do not fit the
    model. `error` says why the supply failed.
    """

    problems: list[Problem]
    asked: int
    dropped: int = 0
    too_long: int = 0
    error: str = ""

    @property
    def why_none(self) -> str:
        """Why there is no problem, in words."""
        if self.error:
            return self.error
        if self.dropped:
            return f"no problem is left: all {self.dropped} that were found were trained on"
        return "there is no problem"


def patience(size: int, family: int | None = None) -> int:
    """Return how many fruitless draws in a row end the search for `size` distinct problems of a
    `family` of known or unknown size.

    It is ten for each possible problem. If exactly `size` equally likely problems exist, the last
    one is missed with a probability of e^-10.
    """
    most = size if family is None else min(size, family)
    return 10 * max(10, most)


def first_distinct(
    problems: Iterable[Problem], size: int, seen: Container[str] = (), fruitless: int | None = None
) -> DistinctProblems:
    """Return the first `size` distinct `problems` that training has not `seen`, or fewer.

    Two problems with the same key are the same problem. The search also ends with the `problems`,
    after `fruitless` draws in a row without a new one (see `patience`), and when the task refuses
    with a UserError, which the result then names.
    """
    kept: dict[str, Problem] = {}
    dropped: set[str] = set()
    error = ""
    idle = 0

    try:
        for problem in problems:
            idle += 1
            if problem.key in seen:
                dropped.add(problem.key)
            elif problem.key not in kept:
                kept[problem.key] = problem
                idle = 0

            if len(kept) == size or idle == fruitless:
                break
    except TaskError:
        raise
    except UserError as failure:
        error = str(failure)

    return DistinctProblems(list(kept.values()), size, len(dropped), error=error)


def distinct_problems(
    task: Task, *, seed: int, split: str, level: int, size: int, seen: Container[str] = ()
) -> list[Problem]:
    """Return the first `size` problems of the stream that all differ, without those `seen`."""
    stream = problem_stream(task, seed=seed, split=split, level=level)
    found = first_distinct(stream, size, seen, patience(size, family_size(task, level)))

    if found.error:
        raise UserError(found.error)
    if len(found.problems) < size:
        raise UserError(
            f"level {level} of task {task.name}, {split}: only {len(found.problems)} different "
            f"problems found, and {size} are asked for; ask for {len(found.problems)} or less"
        )
    return found.problems


def examples_of(task: Task, level: int, key: str, *, seed: int, count: int) -> tuple[Problem, ...]:
    """Return the `count` solved problems that a prompt of this `level` shows before the question.

    They are of the training split, so none is a held-out problem, and the problem itself, which has
    this `key`, is never among them. They are a pure function of the arguments.
    """
    own_seed = int(key_of("examples", seed, key), 16)
    try:
        found = distinct_problems(
            task, seed=own_seed, split="train", level=level, size=count, seen={key}
        )
    except TaskError:
        raise
    except UserError as error:
        raise UserError(f"--shots {count}: {error}") from error
    if missing := [problem.title for problem in found if not problem.target]:
        raise UserError(f"--shots {count}: {missing[0]} has no target to show; leave out --shots")
    return tuple(found)


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write one problem a line. The file is complete, or as it was before."""
    lines = [json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in problems]
    write_whole(path, "".join(lines).encode())


def read_problems(path: str | Path, task: Task | None = None) -> list[Problem]:
    """Return the problems of a file, in its order.

    Every line must be a JSON object with exactly the fields of `Problem`, and suit the `task`.
    """
    problems = []
    for where, value in read_jsonl(path):
        if value.keys() != FIELDS.keys():
            raise UserError(f"{where}: is no problem; a problem has {', '.join(FIELDS)}")
        problem = Problem(**value)
        check_problem(problem, where)

        if task is not None and problem.task != task.name:
            raise UserError(
                f"{where}: its task is {problem.task!a}; give problems of task {task.name}"
            )
        if task is not None and hasattr(task, "key"):
            with calling(f"{where}: its data is not that of task {task.name}: key()"):
                key = task.key(problem)
            if key != problem.key:  # by which repeated and held-out problems are known
                raise UserError(
                    f"{where}: its key is {problem.key!a}, and its data has {key}; make it again"
                )
        problems.append(problem)
    if not problems:
        raise UserError(f"{path}: holds no problem; docs/data-and-tasks.md has an example")
    return problems


def training_set(dataset: str | None, task: Task) -> list[Problem]:
    """Return the problems of --dataset, or those of a task that has a fixed set; [] if neither."""
    if dataset:
        if named := re.fullmatch(r".+-(validation|test)-\d+", Path(dataset).stem):
            raise UserError(
                f"--dataset {dataset}: its problems are of the {named[1]} split, which evaluations "
                "use; give a data set of the train split"
            )
        return read_problems(dataset, task)
    problems = problems_of(task, "train")
    if not problems and any(problems_of(task, split) for split in ("validation", "test")):
        raise UserError(
            f"task {task.name}: none of its problems is of the train split; give some that are"
        )
    return problems

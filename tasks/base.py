"""What a task is: problems out of (seed, split, level, index), scores out of completions.

`grpo` knows this file and no task by name. A task is looked up with `load_task`: either a name of `REGISTRY` or
`path/to/file.py:ClassName` for a task of the user's own.
"""

import hashlib
import importlib
import importlib.util
import math
import numbers
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from data.errors import Parser, UserError, exit_status, needs

__all__ = [
    "Parser",
    "Problem",
    "Score",
    "Task",
    "UserError",
    "exit_status",
    "needs",
    "load_task",
    "options_of",
    "split_options",
    "draft_of",
    "credits_of",
    "scores_of",
    "trust",
    "problem_at",
    "problem_stream",
    "split_of_key",
    "key_of",
    "REGISTRY",
]

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One exercise, e.g. ``Problem("reverse", 2, "Reverse: a b", "b a", key="91c0...", data={"words": ["a", "b"]})``.

    `prompt` is the user's turn in plain text (the chat template is the policy's business), `target` the answer that
    earns the full reward, `key` a canonical hash: two problems with one key are the same exercise. `data` is whatever
    the task's own `score` needs, as JSON values.
    """

    task: str
    level: int
    prompt: str
    target: str
    key: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """What one completion is worth.

    `reward` is what the policy is paid, in [0, 1]; `value` what reports and evaluations show (the reward itself
    where the task makes no difference), in [0, 1]; `exact` whether the answer is right in full; `parts` named numbers
    and labels that explain it, e.g. ``{"matches": 18, "gaps": 2, "trap": "copies A"}``. The label `trap`, where a task gives it, names the
    cheap strategy that the completion follows (None: none); the monitor counts them, and raises an alarm when most are in one.
    `credits`, where they were asked for, say how the reward was earned on the way (see `credits_of`).
    """

    reward: float
    parts: Mapping[str, Any] = field(default_factory=dict)
    value: float = None  # type: ignore[assignment]
    exact: bool = False
    credits: tuple[tuple[int, float], ...] | None = None

    def __post_init__(self):
        if self.value is None:
            object.__setattr__(self, "value", self.reward)


class Task(Protocol):
    """What the trainer asks of a task. A constructor without arguments must work.

    Optional: `default_steps(level)`, training steps where none are asked for; `metric`, what reports call the score;
    `level_unit`, what a level counts ("words"); `options`, a mapping of flag to help: each is a flag of the programs and a
    keyword of the constructor, which gets a string; `key(problem)`, the canonical key made anew from `problem.data`;
    `family_size(level)`, how many different problems there are, or None; `draft(problem)`, see `draft_of`;
    `credits(problem, completions)` and `credited`, see `credits_of`.
    """

    name: str
    rewards: tuple[
        str, ...
    ]  # names for --reward, the default first; () where the task has one reward only
    default_level: int

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return one problem of `split` ("train", "validation" or "test"), drawn with `rng` alone."""

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion of `problem`, in order."""


REGISTRY = {
    "interleave": "tasks.interleave:Interleave",
    "arithmetic": "tasks.arithmetic:Arithmetic",
}


def load_task(
    spec: str, reward: str | None = None, options: Mapping[str, str] = MappingProxyType({})
) -> Task:
    """Return the task named `spec` (of `REGISTRY`, or ``path/to/file.py:ClassName``), paid by `reward`, with its `options`.

    Raises UserError when there is no such task, file, class, reward or option.
    """
    kind, known = _load_class(spec), options_of(spec)
    rewards = tuple(getattr(kind, "rewards", ()))
    for name in options:
        if name not in known:
            raise UserError(
                f"--{name}: task {spec} has no such flag; it has {', '.join(f'--{n}' for n in known) or 'none'}"
            )
    if reward is None:
        return kind(**options)
    if reward not in rewards:
        names = ", ".join(rewards) if rewards else "none: the task has one reward"
        raise UserError(f"--reward {reward}: task {spec} has no such reward; it has {names}")
    return kind(reward=reward, **options)


def trust(spec: str, given: str | None, where: Path):
    """Raise UserError where the record of a run, `where`, names a program as its task, and the command line (`given`) does not name it too.

    A run may come from a stranger, and to load a task is to execute it.
    """
    if spec not in REGISTRY and given != spec:
        raise UserError(
            f"{where}: its task is a program that would be executed, {spec}; if you trust it, give --task {spec} as well"
        )


def options_of(spec: str) -> Mapping[str, str]:
    """Return the flags of task `spec` and what they mean."""
    return getattr(_load_class(spec), "options", {})


def draft_of(task: Task) -> Callable[[Problem], Callable[[str], str]] | None:
    """Return what makes the task's guesses at how completions of a problem go on, None where it makes none.

    ``draft(problem)(text)`` gets what has been written, perhaps up to the middle of a word, and returns the text with which it
    most likely goes on until its end, so that text and guess are a whole completion: after "the ow" perhaps "l saw it."; ""
    where there is no guess, and where the completion should end now. A wrong guess costs time, never correctness.
    Each completion asks a copy of its own (`copy.copy`), which may remember what it was asked before.
    """
    return getattr(task, "draft", None)


def credits_of(
    task: Task,
) -> Callable[[Problem, Sequence[str]], list[tuple[tuple[int, float], ...]]]:
    """Return what says how the reward of completions was earned on the way, for --credit alignment.

    ``credits(problem, completions)`` returns for each completion a tuple of pairs (end, amount), one for each word (or other piece), in
    order: what the word that ends at character `end` of the text adds to the reward, as far as the text up to `end` alone can tell.
    What the amounts leave of the reward (what is missing at the end, and a constant that is nobody's) is settled when the text ends.

    Raises UserError where the task has no credits, or none for the reward that it pays: `credited`, where it is given, names those.
    """
    credits, reward = getattr(task, "credits", None), getattr(task, "reward", None)
    credited = getattr(task, "credited", (reward,))
    if credits is None:
        raise UserError(
            f"--credit alignment: task {task.name} does not say what each word of a completion earns; give --credit outcome"
        )
    if reward not in credited:
        raise UserError(
            f"--credit alignment: --reward {reward} of task {task.name} is no sum over words; give one of "
            f"{', '.join(credited)}, or --credit outcome"
        )
    return credits


def split_options(spec: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split command line words into (the options of task `spec`, the rest): ``--family product`` or ``--family=product``."""
    known, options, rest = options_of(spec), {}, []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in known:
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            raise UserError(f"--{name}: expected one argument: {known[name]}")
        options[name] = value
    return options, rest


def _load_class(spec: str):
    where, _, name = REGISTRY.get(spec, spec).rpartition(":")
    if spec in REGISTRY:
        return getattr(importlib.import_module(where), name)
    path = Path(where)
    if not where or not path.suffix == ".py":
        known = ", ".join(sorted(REGISTRY))
        raise UserError(
            f"--task {spec}: no such task; give one of {known}, or path/to/file.py:ClassName"
        )
    if not path.is_file():
        raise UserError(f"--task {spec}: no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"users_task_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses resolve postponed annotations
    module_spec.loader.exec_module(module)
    if not isinstance(getattr(module, name, None), type):
        raise UserError(f"--task {spec}: {path} defines no class {name}")
    return getattr(module, name)


def problem_at(task: Task, *, seed: int, split: str, level: int, index: int) -> Problem:
    """Return problem `index` of the stream: a pure function of the task's name and the four arguments.

    The arguments are hashed, never added, so neighbouring seeds have nothing in common.
    """
    assert split in SPLITS, split
    text = f"{task.name}/{seed}/{split}/{level}/{index}"
    return task.make(level, split, random.Random(hashlib.sha256(text.encode()).digest()))


def scores_of(task: Task, problem: Problem, completions: Sequence[str]) -> list[Score]:
    """Return `task.score(problem, completions)`. Raises UserError where that raises, or is anything but one finite Score for each completion."""
    where = f"task {task.name}, problem {problem.key}"
    try:
        scores = list(task.score(problem, completions))
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{where}: score() raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error
    if len(scores) != len(completions):
        raise UserError(
            f"{where}: score() returned {len(scores)} scores for {len(completions)} completions; it must return one for each"
        )
    for i, score in enumerate(scores, start=1):
        if not isinstance(score, Score):
            raise UserError(
                f"{where}: score() returned {type(score).__name__} for completion {i}; it must return a Score for each"
            )
        for name in ("reward", "value"):
            if not (
                isinstance(number := getattr(score, name), numbers.Real) and math.isfinite(number)
            ):
                raise UserError(
                    f"{where}: score() returned a {name} of {number!r} for completion {i}; it must be a finite number"
                )
    return scores


def problem_stream(
    task: Task, *, seed: int, split: str, level: int, start: int = 0
) -> Iterator[Problem]:
    """Yield problems `start`, `start + 1`, ... of the stream without end."""
    index = start
    while True:
        yield problem_at(task, seed=seed, split=split, level=level, index=index)
        index += 1


def key_of(*parts: Any) -> str:
    """Return the canonical key of a problem made of `parts`: 16 hex digits of SHA-256."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def split_of_key(key: str) -> str:
    """Return the split that generated problems of this key belong to: "train" (80 %), "validation" or "test" (10 % each)."""
    tenth = int(key, 16) % 10
    return {8: "validation", 9: "test"}.get(tenth, "train")

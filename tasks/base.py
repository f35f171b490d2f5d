"""What a task is: problems out of (seed, split, level, index), scores out of completions.

`grpo` knows this file and no task by name. A task is looked up with `load_task`: either a name of
`REGISTRY` or `path/to/file.py:ClassName` for a task of the user's own.
"""

import hashlib
import importlib
import importlib.util
import math
import numbers
import random
import string
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    "flags_of_tasks",
    "split_options",
    "draft_of",
    "credits_of",
    "range_of",
    "rescaled",
    "declared_budget",
    "levels_of",
    "plain_texts_of",
    "check_wording",
    "worded",
    "is_right",
    "scores_of",
    "sources_of",
    "unseen_texts",
    "foreign_of",
    "summary_of",
    "task_file",
    "trust",
    "problem_at",
    "problem_stream",
    "split_of_key",
    "key_of",
    "REGISTRY",
]

SPLITS = ("train", "validation", "test")
ROUNDING = (
    1e-6  # share of the reward's range by which rounding, in float32 too, may take it past an end
)

Range = tuple[float, float]


@dataclass(frozen=True)
class Problem:
    """One exercise, e.g. ``Problem("reverse", 2, "Reverse: a b", "b a", key="91c0...",
    data={"words": ["a", "b"]})``.

    `prompt` is the user's turn in plain text (the chat template is the policy's business),
    `target` the answer that earns the full reward, `key` a canonical hash: two problems with one
    key are the same exercise. `data` is whatever the task's own `score` needs, as JSON values.
    """

    task: str
    level: int
    prompt: str
    target: str
    key: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict:
        """Return the fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """What one completion is worth.

    `reward` is what the policy is paid, within the task's `reward_range` (default [0, 1]); `value`
    what reports and evaluations show, in [0, 1]; `exact` whether the answer is right in full;
    `parts` named numbers and labels that explain it, e.g. ``{"matches": 18, "gaps": 2, "trap":
    "copies A"}``. Where a task gives no `value`, it is the reward, which `scores_of` maps from its
    range to [0, 1]; a task whose range is unknown must give it. The label `trap`, where a task
    gives it, names the cheap strategy that the completion follows (None: none); the monitor counts
    them, and raises an alarm when most are in one. `credits`, where they were asked for, say how
    the reward was earned on the way (see `credits_of`).

    Numbers may be those of NumPy or PyTorch: `scores_of` makes them Python's.
    """

    reward: float
    parts: Mapping[str, Any] = field(default_factory=dict)
    value: float = None  # type: ignore[assignment]
    exact: bool = False
    credits: tuple[tuple[int, float], ...] | None = None
    gives_value: bool = field(init=False, repr=False, compare=False, default=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gives_value", self.value is not None)
        if self.value is None:
            object.__setattr__(self, "value", self.reward)


def is_right(score: Score) -> bool:
    """Return whether an answer is right in full; a task need not say so where its highest score
    does.
    """
    return score.exact or score.value >= 1.0


class Task(Protocol):
    """What the trainer asks of a task. A constructor without arguments must work.

    Optional: `reward_range`, the lowest and the highest reward, e.g. (-1.0, 0.0), or None where
    they are not known (then no group is called solved or failed, and each `Score` gives its
    `value`); (0.0, 1.0) where it is not declared; `default_steps(level)`, training steps where
    none are asked for; `metric`, what reports call the score; `level_unit`, what a level counts
    ("words"); `options`, a mapping of flag to help: each is a flag of the programs and a keyword
    of the constructor, which gets a string; `key(problem)`, the canonical key made anew from
    `problem.data`; `family_size(level)`, how many different problems there are, or None;
    `max_new_tokens(level)`, how many tokens a completion may take where it needs more than the
    target does, see `declared_budget`; `draft(problem)`, see `draft_of`; `credits(problem,
    completions)` and `credited`, see `credits_of`; `sources()`, see `sources_of`; `levels(level)`,
    see `levels_of`; `plain_texts(split)`, see `plain_texts_of`; `placeholders`, what a wording of
    the user's own may hold: a mapping of name to a function that makes the text from a problem's
    `data`, e.g. ``{"words": lambda data: " ".join(data["words"])}``. `load_task` keeps such a
    wording as the task's attribute `wording`, and `worded` applies it; of a task that draws its
    problems from texts, the option `texts` (a folder of the user's own), `unseen(known)`, see
    `unseen_texts`, and `foreign(level)`, see `foreign_of`.
    """

    name: str
    rewards: tuple[
        str, ...
    ]  # names for --reward, the default first; () where the task has one reward only
    default_level: int

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return one problem of `split` ("train", "validation" or "test"), drawn with
        `rng` alone.
        """

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion of `problem`, in order."""


REGISTRY = {
    "interleave": "tasks.interleave:Interleave",
    "arithmetic": "tasks.arithmetic:Arithmetic",
}


def load_task(
    spec: str,
    reward: str | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    wording: str = "",
) -> Task:
    """Return the task named `spec` (of `REGISTRY`, or ``path/to/file.py:ClassName``), paid by
    `reward`, with its `options`.

    A `wording` replaces the prompt of all its problems (see `worded`). Raises UserError when there
    is no such task, file, class, reward or option, and for a wording that does not suit the task.
    """
    task = _make_task(spec, reward, options)
    if wording:
        check_wording(spec, wording, "--wording")
        task.wording = wording  # type: ignore[attr-defined]
    return task


def _make_task(spec: str, reward: str | None, options: Mapping[str, str]) -> Task:
    kind, known = _load_class(spec), options_of(spec)
    rewards = tuple(getattr(kind, "rewards", ()))
    for name in options:
        if name not in known:
            raise UserError(_no_such_flag(name, spec))
    if reward is None:
        return kind(**options)
    if reward not in rewards:
        names = ", ".join(rewards) if rewards else "none: the task has one reward"
        raise UserError(f"--reward {reward}: task {spec} has no such reward; it has {names}")
    return kind(reward=reward, **options)


def trust(spec: str, given: str | None, where: Path) -> None:
    """Raise UserError where the record of a run, `where`, names a program as its task, and the
    command line (`given`) does not name it too.

    A run may come from a stranger, and to load a task is to execute it.
    """
    if spec not in REGISTRY and given != spec:
        raise UserError(
            f"{where}: its task is a program that would be executed, {spec}; if you trust it, give "
            f"--task {spec} as well"
        )


def options_of(spec: str) -> Mapping[str, str]:
    """Return the flags of task `spec` and what they mean."""
    return getattr(_load_class(spec), "options", {})


def check_wording(spec: str, wording: str, where: str) -> None:
    """Raise UserError, which names `where` the `wording` stands, unless it has all placeholders of
    task `spec` and no others.
    """
    placeholders = getattr(_load_class(spec), "placeholders", {})
    if not placeholders:
        raise UserError(
            f"{where}: task {spec} has no placeholders, so its wording cannot be replaced"
        )

    known = ", ".join(f"{{{name}}}" for name in placeholders)
    try:
        found = _fields_of(wording)
    except ValueError as error:
        raise UserError(
            f"{where}: {error}; task {spec} has the placeholders {known}, and a brace that is text "
            "is written twice"
        ) from error

    for name in found:
        if name not in placeholders:
            raise UserError(
                f"{where}: no placeholder of task {spec} is called {name!r}; it has {known}, and a "
                "brace that is text is "
                "written twice"
            )
    for name in placeholders:
        if name not in found:
            raise UserError(f"{where}: lacks {{{name}}}; task {spec} has the placeholders {known}")


def _fields_of(wording: str) -> list[str]:
    """Return what stands between braces: ["a", "b"] of "A: {a}, B: {b}". Raises ValueError where
    braces do not match.
    """
    fields = []
    for _, name, form, conversion in string.Formatter().parse(wording):
        if name is not None:
            fields.append(
                name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            )
    return fields


def worded(task: Task, problem: Problem) -> Problem:
    """Return the `problem` in the wording that `load_task` gave the task, or as it is where it
    gave none.

    Only the prompt changes. Raises UserError where the problem's data lacks what a placeholder
    stands for.
    """
    wording = getattr(task, "wording", "")
    placeholders = getattr(task, "placeholders", {})
    if not (wording and placeholders):
        return problem

    try:
        texts = {name: text_of(problem.data) for name, text_of in placeholders.items()}
    except (LookupError, TypeError) as error:
        raise UserError(
            f"task {task.name}, problem {problem.key}: its data lacks what the placeholders of "
            "--wording stand for "
            f"({type(error).__name__}: {error})"
        ) from error
    return replace(problem, prompt=wording.format(**texts))


def flags_of_tasks() -> str:
    """Return the flags of the tasks of `REGISTRY` and what they mean, for the end of a program's
    --help.
    """
    tasks = {name: options_of(name) for name in REGISTRY}
    texts = [
        f"of --task {name}: " + "; ".join(f"--{flag}: {text}" for flag, text in flags.items())
        for name, flags in tasks.items()
        if flags
    ]
    return ". ".join(texts).replace("%", "%%")


def draft_of(task: Task) -> Callable[[Problem], Callable[[str], str]] | None:
    """Return what makes the task's guesses at how completions of a problem go on, None where it
    makes none.

    ``draft(problem)(text)`` gets what has been written, perhaps up to the middle of a word, and
    returns the text with which it most likely goes on until its end, so that text and guess are a
    whole completion: after "the ow" perhaps "l saw it."; "" where there is no guess, and where the
    completion should end now. A wrong guess costs time, never correctness. Each completion asks a
    copy of its own (`copy.copy`), which may remember what it was asked before.
    """
    return getattr(task, "draft", None)


def credits_of(
    task: Task,
) -> Callable[[Problem, Sequence[str]], list[tuple[tuple[int, float], ...]]]:
    """Return what says how the reward of completions was earned on the way, for --credit alignment.

    ``credits(problem, completions)`` returns for each completion a tuple of pairs (end, amount),
    one for each word (or other piece), in order: what the word that ends at character `end` of the
    text adds to the reward, as far as the text up to `end` alone can tell. What the amounts leave
    of the reward (what is missing at the end, and a constant that is nobody's) is settled when the
    text ends.

    Raises UserError where the task has no credits, or none for the reward that it pays:
    `credited`, where it is given, names those.
    """
    credits, reward = getattr(task, "credits", None), getattr(task, "reward", None)
    credited = getattr(task, "credited", (reward,))
    if credits is None:
        raise UserError(
            f"--credit alignment: task {task.name} does not say what each word of a completion "
            "earns; give --credit outcome"
        )
    if reward not in credited:
        raise UserError(
            f"--credit alignment: --reward {reward} of task {task.name} is no sum over words; give "
            "one of "
            f"{', '.join(map(str, credited))}, or --credit outcome"
        )
    return credits


def declared_budget(task: Task, level: int) -> int:
    """Return the completion budget in tokens that the task declares for `level`, 0 where it
    declares none.

    A task whose completions reason before a short answer needs more room than the answer takes.
    The budget never falls below what the target takes, and --max-new-tokens overrides it. Raises
    UserError for anything but a whole number >= 0.
    """
    declared = getattr(task, "max_new_tokens", lambda level: 0)(level)
    if isinstance(declared, bool) or not isinstance(declared, numbers.Integral) or declared < 0:
        raise UserError(
            f"task {task.name}: max_new_tokens({level}) returned {declared!r}; it must be a number "
            "of tokens"
        )
    return int(declared)


def levels_of(task: Task, level: int) -> list[int]:
    """Return the levels on the way to `level`, rising from the easiest, as the task names them; []
    where it names none.

    A task whose levels are no scale of 1, 2, 3 ... names them, because only it knows which are
    easier.
    """
    return list(getattr(task, "levels", lambda level: ())(level))


def plain_texts_of(task: Task, split: str) -> list[str]:
    """Return running texts of `split` in plain language that the task draws on; [] where it has
    none.

    A language model should find them likely: by that the pre-flight tells one that was converted
    wrongly.
    """
    return list(getattr(task, "plain_texts", lambda split: ())(split))


def split_options(spec: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split command line words into (the options of task `spec`, the rest): ``--family product``
    or ``--family=product``.

    Raises UserError for an option that another task of `REGISTRY` has and this one has not.
    """
    known, options, rest = options_of(spec), {}, []
    others = {name for other in REGISTRY for name in options_of(other)} - set(known)
    words = iter(arguments)
    for word in words:
        name, equals, written = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in others:
            raise UserError(_no_such_flag(name, spec))
        if not word.startswith("--") or name not in known:
            rest.append(word)
            continue
        value = written if equals else next(words, None)
        if value is None:
            raise UserError(f"--{name}: expected one argument: {known[name]}")
        options[name] = value
    return options, rest


def _no_such_flag(name: str, spec: str) -> str:
    names = ", ".join(f"--{known}" for known in options_of(spec))
    return f"--{name}: task {spec} has no such flag; it has {names or 'none'}"


def _load_class(spec: str) -> Any:
    where, _, name = REGISTRY.get(spec, spec).rpartition(":")
    if spec in REGISTRY:
        return getattr(importlib.import_module(where), name)
    path = Path(where)
    if not where or path.suffix != ".py":
        known = ", ".join(sorted(REGISTRY))
        raise UserError(
            f"--task {spec}: no such task; give one of {known}, or path/to/file.py:ClassName"
        )
    if not path.is_file():
        raise UserError(f"--task {spec}: no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"users_task_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses resolve postponed annotations
    module_spec.loader.exec_module(module)
    if not isinstance(getattr(module, name, None), type):
        raise UserError(f"--task {spec}: {path} defines no class {name}")
    return getattr(module, name)


def task_file(spec: str) -> list[Path]:
    """Return the file of a task of the user's own, ``path/to/file.py:ClassName``; nothing for a
    task of `REGISTRY`.
    """
    return [] if spec in REGISTRY else [Path(spec.rpartition(":")[0])]


def sources_of(task: Task) -> dict[str, str]:
    """Return the fingerprints of the texts that the task's problems are drawn from, by name:
    ``{"tale-flood": "91c0..."}``.

    They are what the optional ``sources()`` of a task returns; {} for a task whose problems come
    from its code alone. With other sources the same seed and index mean another problem, so a run
    must not go on with them unawares.
    """
    return dict(getattr(task, "sources", dict)())


def unseen_texts(task: Task, known: Collection[str]) -> Task:
    """Return `task` with every text held out that was not trained or chosen on, so that all may be
    evaluated on.

    `known` are the fingerprints of the texts that a model's training drew from, in all splits; of
    these only the test split is held out. A task that draws from no texts is returned as it is.
    """
    unseen = getattr(task, "unseen", None)
    return unseen(known) if unseen else task


def foreign_of(task: Task, level: int) -> Mapping[str, Task]:
    """Return `task` on texts of foreign kinds, by kind: ``{"tables": task, ...}``, with problems
    in the test split alone.

    Foreign are kinds of text (tables, code, other alphabets) that nothing is trained on. Raises
    UserError where there are none.
    """
    found: Mapping[str, Task] = getattr(task, "foreign", lambda level: {})(level)
    if not found:
        raise UserError(f"--foreign: task {task.name} has no foreign kinds of text; leave it out")
    return found


def summary_of(sources: Mapping[str, str]) -> str:
    """Return one line that stands for all of `sources`: "96 with fingerprint 91c0..."."""
    parts = [part for item in sorted(sources.items()) for part in item]
    return f"{len(sources)} with fingerprint {key_of(*parts)}"


def problem_at(task: Task, *, seed: int, split: str, level: int, index: int) -> Problem:
    """Return problem `index` of the stream: a pure function of the task's name and the four
    arguments.

    The arguments are hashed, never added, so neighbouring seeds have nothing in common.
    """
    assert split in SPLITS, split
    text = f"{task.name}/{seed}/{split}/{level}/{index}"
    rng = random.Random(hashlib.sha256(text.encode()).digest())
    return worded(task, task.make(level, split, rng))


def range_of(task: Task) -> Range | None:
    """Return the lowest and the highest reward of `task`, None where it says that they are unknown.

    Raises UserError where its `reward_range` is anything but None or two finite, rising numbers.
    """
    declared = getattr(task, "reward_range", (0.0, 1.0))
    if declared is None:
        return None
    given = [_number(end) for end in declared] if isinstance(declared, Sequence) else []
    ends = [end for end in given if end is not None]
    if len(given) != 2 or len(ends) != 2 or ends[0] >= ends[1]:
        raise UserError(
            f"task {task.name}: reward_range is {declared!r}; give the lowest and the highest "
            "reward, e.g. (-1.0, 0.0), "
            "or None where they are not known"
        )
    return ends[0], ends[1]


def rescaled(reward: float, reward_range: Range) -> float:
    """Return where `reward` lies in its range: 0 at the low end, 1 at the high end."""
    low, high = reward_range
    return (reward - low) / (high - low)


def scores_of(task: Task, problem: Problem, completions: Sequence[str]) -> list[Score]:
    """Return `task.score(problem, completions)`, checked, with Python's own numbers, and every
    `value` filled in.

    Raises UserError where `score` raises, or returns anything but one Score for each completion,
    of finite numbers that lie within the task's range (beyond its ends by rounding they are moved
    to the end) and parts that JSON can hold.
    """
    where = f"task {task.name}, problem {problem.key}"
    reward_range = range_of(task)
    try:
        scores = list(task.score(problem, completions))
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{where}: score() raised {type(error).__name__}: {error} ({place.filename}, line "
            f"{place.lineno})"
        ) from error
    if len(scores) != len(completions):
        raise UserError(
            f"{where}: score() returned {len(scores)} scores for {len(completions)} completions; "
            "it must return one for each"
        )
    checked = []
    for i, score in enumerate(scores, start=1):
        try:
            checked.append(_checked(score, reward_range, f"for completion {i}"))
        except ValueError as error:
            raise UserError(f"{where}: score() returned {error}") from error
    return checked


def _checked(score: Any, reward_range: Range | None, whose: str) -> Score:
    """Return `score` with Python's numbers and its value. Raises ValueError that says what it was
    instead, and `whose` it is.
    """
    if not isinstance(score, Score):
        raise ValueError(f"{type(score).__name__} {whose}; it must return a Score for each")

    reward = _within(score.reward, "reward", reward_range, whose)
    if score.gives_value:
        value = _within(score.value, "value", (0.0, 1.0), whose)
    elif reward_range is None:
        raise ValueError(
            f"no value {whose}; a task whose reward_range is None must give one, in [0, 1]"
        )
    else:
        value = rescaled(reward, reward_range)

    if not isinstance(score.parts, Mapping):
        raise ValueError(f"parts of type {type(score.parts).__name__} {whose}; give a mapping")
    parts = {str(name): _plain(part, f"{name!r} {whose}") for name, part in score.parts.items()}
    return replace(score, reward=reward, value=value, exact=bool(score.exact), parts=parts)


def _within(given: Any, name: str, limits: Range | None, whose: str) -> float:
    """Return the number `given`, at an end of its `limits` where rounding took it past that end."""
    number = _number(given)
    if number is None:
        raise ValueError(f"a {name} of {given!r} {whose}; it must be a finite number")
    if limits is None:
        return number

    low, high = limits
    nearest = min(max(number, low), high)
    if abs(number - nearest) > ROUNDING * (high - low):
        declared = ", the task's reward_range" if name == "reward" else ""
        raise ValueError(
            f"a {name} of {number:g} {whose}; it must lie in [{low:g}, {high:g}]{declared}"
        )
    return nearest


def _number(given: Any) -> float | None:
    """Return `given` (a real number of Python, NumPy or PyTorch, as an array without axes too) as
    a float, None unless it is finite.
    """
    plain = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(plain, numbers.Real):
        return None
    try:
        number = float(plain)
    except OverflowError:  # a whole number beyond the largest float
        return None
    return number if math.isfinite(number) else None


def _plain(part: Any, whose: str) -> Any:
    """Return a part as JSON holds it: numbers, labels and arrays of NumPy and PyTorch become
    Python's.

    Raises ValueError for what JSON cannot hold.
    """
    if hasattr(part, "tolist"):
        part = part.tolist()
    if part is None or isinstance(part, (bool, int, float, str)):
        return part
    if isinstance(part, Mapping):
        return {str(name): _plain(inner, whose) for name, inner in part.items()}
    if isinstance(part, (list, tuple)):
        return [_plain(inner, whose) for inner in part]
    raise ValueError(
        f"a {type(part).__name__} as part {whose}; give numbers, labels, or lists and mappings of "
        "them"
    )


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
    """Return the split that generated problems of this key belong to: "train" (80 %), "validation"
    or "test" (10 % each).
    """
    tenth = int(key, 16) % 10
    return {8: "validation", 9: "test"}.get(tenth, "train")

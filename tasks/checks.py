"""Checks of a user's task: what it raises becomes a one-line message, and what it returns must have
the right types.
"""

import copy
import json
import math
import numbers
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from data.errors import UserError
from data.text import is_encodable, shortened, shown
from tasks.protocol import OptionalMembers, Problem, Task

FIELDS: dict[str, type] = {
    "task": str,
    "level": int,
    "prompt": str,
    "target": str,
    "key": str,
    "data": Mapping,
}

METHODS = ("make", "score")

# What a task has and may have.
MEMBERS = (*Task.__annotations__, *METHODS, *OptionalMembers.__annotations__)

# Where the code of Python and of installed packages begins.
LIBRARIES = (
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


class TaskError(UserError):
    """A task's own code is wrong; by a plain UserError a task refuses a level."""


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Run a task's own code within this block; `what` names the code, e.g. "task t: make()".

    Turns any exception except UserError, and any attempt to exit, into a TaskError that names file
    and line.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise raised(what, error) from error


def raised(what: str, error: BaseException) -> TaskError:
    """Return the one-line error for what a user's own code raised, with its file and line.

    That is the innermost line of the user's own, rather than one of a library that it calls.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    last = (users or frames)[-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno

    try:
        said = shortened(" ".join(str(error).split()), 300)
    except Exception:  # the text of an exception is made by the user's code, too
        said = ""
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return TaskError(f"{what} raised {reason} ({file}, line {line})")


# Torch's settings that a process has once, and that the trainer's numbers depend on, by the name of
# the function that sets each: the name of the one that returns it, and its value before torch is
# imported (None: not known).
TORCH_SETTINGS: dict[str, tuple[str, Any]] = {
    "set_default_dtype": ("get_default_dtype", "torch.float32"),
    "set_default_device": ("get_default_device", "cpu"),
    "set_float32_matmul_precision": ("get_float32_matmul_precision", "highest"),
    "use_deterministic_algorithms": ("are_deterministic_algorithms_enabled", False),
    "set_grad_enabled": ("is_grad_enabled", True),
    "set_num_threads": ("get_num_threads", None),
}


@contextmanager
def process_unchanged(where: str) -> Iterator[None]:
    """Raise UserError, which begins with `where`, if the block changes what a process has once.

    That is its working directory, from where the files of a run are found, and TORCH_SETTINGS. They
    are restored. The seeds of random numbers need no check: training draws none from them.
    """
    folder, settings, has_torch = os.getcwd(), _torch_settings(), "torch" in sys.modules
    yield
    try:
        after = os.getcwd()
    except FileNotFoundError:
        after = "a folder that is gone"
    if after != folder:
        os.chdir(folder)
        raise UserError(
            f"{where} changed the working directory to {after}; give subprocess a cwd=..."
        )

    for setter, value in _torch_settings().items():
        before = settings[setter]
        if before is None or str(value) == str(before):
            continue

        if has_torch:
            # With "cpu" as default device torch would look at each call.
            getattr(sys.modules["torch"], setter)(None if str(before) == "cpu" else before)
        raise UserError(
            f"{where} changed torch by torch.{setter} from {before} to {value}, which alters "
            "the training; remove the call, or restore the value"
        )


def _torch_settings() -> dict[str, Any]:
    """Return the value of each of TORCH_SETTINGS."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {setter: value for setter, (_, value) in TORCH_SETTINGS.items()}

    values = {}
    for setter, (getter, _) in TORCH_SETTINGS.items():
        try:
            values[setter] = getattr(torch, getter)()
        except (
            RuntimeError
        ):  # the precisions of torch.backends, set one by one, may be no such value
            values[setter] = "mixed"
    return values


@contextmanager
def data_unchanged(where: str, problems: Sequence[Problem]) -> Iterator[None]:
    """Raise UserError, which begins with `where`, if the block changes the data of a problem.

    The run stores the data, and the task's other methods read it.
    """
    before = [_copied(problem.data) for problem in problems]
    yield
    for problem, data in zip(problems, before, strict=True):
        if _differs(problem.data, data):
            raise UserError(
                f"{where} changed problem.data; let it change a copy, copy.deepcopy(problem.data)"
            )


def _copied(value: Any) -> Any:
    """Return a JSON value with copies of its lists and mappings.

    Texts are shared, so that those of any length are copied and compared at once.
    """
    if not isinstance(value, (dict, list, tuple)):  # first, because most values are texts
        return value
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    copied = map(_copied, value)
    return tuple(copied) if isinstance(value, tuple) else list(copied)


def _differs(value: Any, other: Any) -> bool:
    try:
        return bool(value != other)
    except Exception:  # arrays and tensors do not compare with a list
        return True


def check_task(task: Any, spec: str) -> None:
    """Raise UserError unless `task` has what every task must have."""
    where = f"--task {spec}"

    for member in MEMBERS:  # a property may raise
        with calling(f"{where}: {member}"):
            getattr(task, member, None)

    name = getattr(task, "name", None)
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: its name is {name!r}; give the class a name, a text")

    for method in METHODS:
        if not callable(getattr(task, method, None)):
            raise UserError(f"{where}: has no method {method}(); docs/your-task.md has an example")

    rewards = getattr(task, "rewards", ())
    if not isinstance(rewards, (tuple, list)) or not all(isinstance(r, str) for r in rewards):
        raise UserError(f"{where}: rewards is {rewards!r}; it must be a tuple of names")

    reward = getattr(task, "reward", None)
    if reward is not None and not (isinstance(reward, str) and reward in rewards):
        names = ", ".join(rewards) or "none, so give this member another name"
        raise UserError(
            f"{where}: reward is {shown(reward)}; it must be the name of one of its rewards: "
            f"{names}"
        )

    for name in ("metric", "level_unit"):
        text = getattr(task, name, "")
        if not isinstance(text, str):
            raise UserError(f"{where}: {name} is {text!r}; it must be a text")

    level = getattr(task, "default_level", 1)
    if isinstance(level, bool) or not isinstance(level, int):
        raise UserError(f"{where}: default_level is {level!r}; it must be a whole number")


def is_task(value: Any) -> bool:
    """Return whether `value` has the methods of a task, and a name."""
    has_methods = all(callable(getattr(value, method, None)) for method in METHODS)
    return has_methods and isinstance(getattr(value, "name", None), str)


def finite_number(given: Any) -> float | None:
    """Return a finite number of Python, NumPy or PyTorch as a float; None for anything else."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(plain, numbers.Real):
        return None
    try:
        number = float(plain)
    except OverflowError:  # an integer beyond the largest float
        return None
    return number if math.isfinite(number) else None


def maps_texts(value: Any) -> bool:
    """Return whether `value` is a mapping of texts to texts."""
    return isinstance(value, Mapping) and all(
        isinstance(text, str) for item in value.items() for text in item
    )


def check_options(options: Any, spec: str) -> None:
    """Raise UserError unless `options` is a mapping of flags to their help."""
    if not maps_texts(options):
        raise UserError(f"--task {spec}: options is {options!r}; it must map flags to their help")


def check_problem(problem: Any, where: str) -> None:
    """Raise TaskError, which begins with `where`, unless `problem` is a Problem of texts and JSON.

    The key must not be empty, and no text may contain half of a surrogate pair, which is not a
    character.
    """
    if not isinstance(problem, Problem):
        raise TaskError(f"{where}: is {type(problem).__name__}, and must be a Problem")

    for name, kind in FIELDS.items():
        value = getattr(problem, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TaskError(f"{where}: {name} is {shown(value)}; it must be {_KINDS[kind]}")
        if isinstance(value, str):
            _check_text(value, f"{where}: {name}")
    if not problem.key:
        raise TaskError(f"{where}: its key is empty; make one by key_of()")

    turns = problem.data.get("messages") or []
    if not isinstance(turns, list | tuple) or not all(map(_is_turn, turns)):
        raise TaskError(
            f"{where}: messages are {shown(turns)}; give a list of turns, each with role and "
            "content, which are texts"
        )

    try:
        _check_text(json.dumps(problem.data, ensure_ascii=False), f"{where}: data")
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise TaskError(f"{where}: data is not what JSON can hold ({error})") from error


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and all(
        isinstance(turn.get(name), str) for name in ("role", "content")
    )


_KINDS = {str: "a text", int: "a whole number", Mapping: "a mapping"}


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{where}: holds a lone surrogate, {text[error.start]!a}") from error


def check_stored(task: Task, problem: Problem, where: str) -> None:
    """Raise UserError, which begins with `where`, unless a stored `problem` suits `task`.

    If a problem names this task, and the task can compute keys, the stored key must be the one
    computed from the data. A user's own problems may name another task; they are not checked
    further.
    """
    check_problem(problem, where)

    if problem.task == task.name and hasattr(task, "key"):
        with calling(f"{where}: its data is not that of task {task.name}: key()"):
            key = task.key(problem)
        if key != problem.key:
            raise UserError(
                f"{where}: its key is {shortened(problem.key)}, and its data has {key}; "
                "make it again with python -m tasks.generate"
            )


class CheckedGuess:
    """A task's guesser of continuations (see `draft_of`); its errors become one-line messages."""

    def __init__(self, task: Task, guess: Callable[[str], str]):
        self.task, self.guess = task, guess

    def __copy__(self) -> "CheckedGuess":
        return CheckedGuess(self.task, copy.copy(self.guess))

    def __call__(self, text: str) -> str:
        """Return the continuation of `text`. Raises UserError unless it is a text."""
        with calling(f"task {self.task.name}: the guesser of draft()"):
            guessed = self.guess(text)
        if not isinstance(guessed, str) or not is_encodable(guessed):
            raise UserError(
                f"task {self.task.name}: the guesser of draft() returned {shown(guessed)}; it must "
                "return a text"
            )
        return guessed

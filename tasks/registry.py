"""Tasks by name: those of the project, and ``path/to/file.py:ClassName`` for a user's task.

A task of the project may have an argument: ``gsm8k:FOLDER``.
"""

import functools
import importlib
import importlib.util
import inspect
import math
import string
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo.data.errors import UserError, shortened, shown
from grpo.data.files import kind_of
from grpo.tasks.base import (
    ABSTAINED,
    COMPONENT,
    CUT_OFF,
    Problem,
    Score,
    Task,
    calling,
    finite_number,
)

REGISTRY = {
    "interleave": "grpo.tasks.interleave:Interleave",
    "arithmetic": "grpo.tasks.arithmetic:Arithmetic",
    "data": "grpo.tasks.rows:Rows",
    "gsm8k": "grpo.tasks.answers:Gsm8k",
}

# The option that names a user's reward function.
REWARD_FILE = "reward-file"


def load_task(
    spec: str,
    reward: str | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    wording: str = "",
) -> Task:
    """Return the task `spec`, a name of `REGISTRY` or ``path/to/file.py:ClassName``.

    `reward` is one of the task's `rewards`, or None for the default. A `wording` replaces the
    prompt of all problems (see `worded`).
    """
    task_class = _load_class(spec)
    for name in options:
        if name not in options_of(spec):
            raise UserError(_no_such_flag(name, spec))

    keywords = {name.replace("-", "_"): value for name, value in options.items()}
    if is_of_project(spec):
        name, _, argument = spec.partition(":")
        expected = getattr(task_class, "argument", "")
        if bool(argument) != bool(expected):
            raise UserError(f"--task {spec}: give {f'{name}:{expected}' if expected else name}")
        if argument:
            keywords["argument"] = argument
    if reward is not None:
        rewards = tuple(getattr(task_class, "rewards", ()))
        if reward not in rewards:
            names = ", ".join(rewards) if rewards else "none: the task has one reward"
            raise UserError(f"--reward {reward}: task {spec} has no such reward; it has {names}")
        keywords["reward"] = reward

    with calling(f"--task {spec}: its constructor"):
        task: Task = task_class(**keywords)
    for member in ("name", "make", "score"):
        if not getattr(task, member, None):
            raise UserError(
                f"--task {spec}: has no {member}; docs/data-and-tasks.md has an example"
            )
    if wording:
        check_wording(spec, wording)
        task.wording = wording  # type: ignore[attr-defined]
    return task


def is_of_project(spec: str) -> bool:
    """Return whether `spec` names a task of the project, with or without an argument."""
    return spec.partition(":")[0] in REGISTRY


def _load_class(spec: str) -> Any:
    if is_of_project(spec):
        module, _, name = REGISTRY[spec.partition(":")[0]].rpartition(":")
        return getattr(importlib.import_module(module), name)

    known = ", ".join(sorted(REGISTRY))
    fix = f"no such task; give one of {known}, or path/to/file.py:ClassName"
    return load_from_file(spec, "task", "class", fix)


# ---- a user's own files

FOLDERS: set[str] = set()  # of the files that were executed


def load_from_file(program: str, flag: str, kind: str, fix: str) -> Any:
    """Execute the file of a `program`, ``path/to/file.py:name``; return its "class" or "function".

    The `flag` that names it is part of the module's name, so that a task and a reward in files of
    the same name do not replace each other. The file imports from its own folder, as a script does,
    and from the working directory. `fix` says what to give where this is no program.
    """
    file_name, _, name = program.rpartition(":")
    path, where = Path(file_name), f"--{flag} {program}"
    if not file_name.endswith(".py"):
        raise UserError(f"{where}: {fix}")
    if kind_of(path) != "file":
        raise UserError(f"{where}: no file {shortened(file_name, 300)}")

    spec = importlib.util.spec_from_file_location(f"users_{flag}_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has both"
    module = importlib.util.module_from_spec(spec)

    folder, here = str(path.resolve().parent), str(Path.cwd())
    if not {here, ""} & {*sys.path}:  # of an installed program it is not there
        sys.path.insert(0, here)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    # Not the module of the same name that a file in another folder has imported.
    for imported, other in list(sys.modules.items()):
        file = Path(getattr(other, "__file__", None) or "")
        top, *inner = imported.split(".")  # a module, or a package
        above = [str(each) for each in file.parents][len(inner) + (file.stem == "__init__") :]
        is_users = bool(above) and above[0] in FOLDERS - {folder}
        if is_users and (Path(folder, f"{top}.py").is_file() or Path(folder, top).is_dir()):
            del sys.modules[imported]
    FOLDERS.add(folder)
    # Dataclasses look up postponed annotations in sys.modules.
    sys.modules[spec.name] = module
    with calling(f"{where}: the file"):
        spec.loader.exec_module(module)

    found = getattr(module, name, None)
    if not (isinstance(found, type) if kind == "class" else callable(found)):
        raise UserError(f"{where}: {file_name} defines no {kind} {name}")
    return found


def load_function(spec: str, flag: str = REWARD_FILE) -> Callable:
    """Return the function ``path/to/file.py:name`` that --reward-file or --loss names."""
    return load_from_file(spec, flag, "function", "give path/to/file.py:function")


def source_text(function: Callable) -> str:
    """Return the source code of a function, or of another callable's class."""
    if isinstance(function, functools.partial):
        return f"{function.args} {function.keywords}\n{source_text(function.func)}"
    plain = inspect.isroutine(function) or isinstance(function, type)
    try:
        return inspect.getsource(function if plain else type(function))
    except (OSError, TypeError):  # e.g. it was made at run time
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def programs_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's programs, ``path/to/file.py:name``, that settings name, by flag."""
    reward = values.get("task_options", {}).get(REWARD_FILE)
    named = {"task": values.get("task"), REWARD_FILE: reward, "loss": values.get("loss")}
    return {flag: spec for flag, spec in named.items() if spec and ".py:" in spec}


def require_trusted(
    values: Mapping[str, Any], allowed: Collection[str | None], where: str | Path
) -> None:
    """Raise UserError, which begins with `where`, unless all `programs_in` settings are `allowed`.

    They may be the record of a stranger's run, and loading any of them executes a file.
    """
    trusted = {_place_of(program) for program in allowed if program}
    for flag, program in programs_in(values).items():
        if _place_of(program) not in trusted:
            raise UserError(
                f"{where}: its {flag.removesuffix('-file')} is a program that would be executed, "
                f"{program}; if you trust it, give --{flag} {program} as well"
            )


def _place_of(program: str) -> tuple[Path, str]:
    """Return the file and the name of ``path/to/file.py:Name``, whatever path leads to the file."""
    path, _, name = program.rpartition(":")
    return Path(path).resolve(), name


# ---- how a score is explained


def explain(
    spec: str, problem: Problem, completion: str, score: Score, reward: str | None = None
) -> str:
    """Return in words how a completion earned its reward, e.g. "1.000 = the answer 42 is right".

    `spec` and `reward` are as in a run's config.yaml. The task is not made, because its texts may
    be gone. A task of the user's is a program that is not loaded either: the stored parts of the
    score explain it. The result may quote the completion, so escape it before it is shown.
    """
    if score.parts.get("reason") in (CUT_OFF, ABSTAINED):
        return f"{score.reward:.3f} = {score.parts['reason']}"
    explain_score = getattr(_load_class(spec), "explain", None) if is_of_project(spec) else None
    if explain_score is not None:
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            return str(explain_score(problem, completion, score, reward))

    components = {
        name.removeprefix(COMPONENT): number
        for name, value in score.parts.items()
        if name.startswith(COMPONENT) and (number := finite_number(value)) is not None
    }
    if not components:
        return f"{score.reward:.3f}, as the task scored it"
    terms = [f"{number:.3f} {name}" for name, number in components.items()]
    if abs(math.fsum(components.values()) - score.reward) < 1e-3:
        return f"{score.reward:.3f} = {' + '.join(terms)}"
    return f"{score.reward:.3f}, {', '.join(terms)}"


# ---- wordings and flags


def check_wording(spec: str, wording: str) -> None:
    """Raise UserError unless `wording` has the placeholders of task `spec` and no others."""
    placeholders = getattr(_load_class(spec), "placeholders", {})
    known = ", ".join(f"{{{name}}}" for name in placeholders) or "none"
    hint = f"task {spec} has the placeholders {known}, and a brace that is text is written twice"
    try:
        fields = {
            name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            for _, name, form, conversion in string.Formatter().parse(wording)
            if name is not None
        }
    except ValueError as error:  # the braces do not match
        raise UserError(f"--wording: {error}; {hint}") from error
    if fields != set(placeholders) or not fields:
        raise UserError(f"--wording: its placeholders are {shown(sorted(fields))}; {hint}")


def options_of(spec: str) -> Mapping[str, str]:
    """Return the flags of task `spec`, and the help of each."""
    return getattr(_load_class(spec), "options", {})


def flags_of_tasks() -> str:
    """Return the flags of all tasks of `REGISTRY`, as text for --help."""
    texts = [
        f"of --task {name}: " + "; ".join(f"--{flag}: {text}" for flag, text in flags.items())
        for name in REGISTRY
        if (flags := options_of(name))
    ]
    return ". ".join(texts).replace("%", "%%")


def implied_task(arguments: Sequence[str]) -> str | None:
    """Return the task that the words of a command line imply: "data" for --data FILE."""
    words = {word.partition("=")[0] for word in arguments}
    return "data" if words & {"--data", f"--{REWARD_FILE}"} else None


def split_options(spec: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split command line words into the options of task `spec` and the rest.

    An option is written ``--family product`` or ``--family=product``. One that another task of
    `REGISTRY` has and this one lacks is refused.
    """
    known = options_of(spec)
    others = {name for other in REGISTRY for name in options_of(other)} - set(known)
    options = {}
    rest = []

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

"""A user's own code: how its files are loaded, its errors reported, and its functions compared."""

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of
from data.text import shortened

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

    said = shortened(" ".join(str(error).split()), 300)
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return TaskError(f"{what} raised {reason} ({file}, line {line})")


# Torch's settings that a process has once, and that the trainer's numbers depend on: the name of
# the function that sets each, and of the one that returns it.
TORCH_SETTINGS = {
    "set_default_dtype": "get_default_dtype",
    "set_default_device": "get_default_device",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
    "use_deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "set_grad_enabled": "is_grad_enabled",
    "set_num_threads": "get_num_threads",
}


@contextmanager
def process_unchanged(where: str) -> Iterator[None]:
    """Raise UserError, which begins with `where`, if the block changes what a process has once.

    That is its working directory, from where the files of a run are found, and TORCH_SETTINGS. They
    are restored. The seeds of random numbers need no check: training draws none from them.
    """
    folder, settings = os.getcwd(), _torch_settings()
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
        before = settings.get(setter, value)
        if str(value) != str(before):
            # With "cpu" as default device torch would look at each call.
            getattr(sys.modules["torch"], setter)(None if str(before) == "cpu" else before)
            raise UserError(
                f"{where} changed torch by torch.{setter} from {before} to {value}, which alters "
                "the training; remove the call, or restore the value"
            )


def _torch_settings() -> dict[str, Any]:
    """Return the value of each of TORCH_SETTINGS; {} before torch is imported."""
    torch = sys.modules.get("torch")
    values: dict[str, Any] = {}
    for setter, getter in TORCH_SETTINGS.items() if torch else ():
        try:
            values[setter] = getattr(torch, getter)()
        except RuntimeError:  # of precisions that torch.backends has one by one
            values[setter] = "mixed"
    return values


def load_from_file(path: Path, name: str, *, kind: str, where: str) -> Any:
    """Execute a user's file and return its attribute `name`; None if it has none.

    `kind` ("task", "reward") is part of the module's name, so that a task and a reward in files of
    the same name do not replace each other. Raises UserError, which begins with `where`, if there
    is no such file, if it raises an exception, or if it changes the process (`process_unchanged`).
    """
    import torch  # noqa: F401 - so that a file that imports it first cannot change it

    if kind_of(path) != "file":
        raise UserError(f"{where}: no file {shortened(str(path), 300)}")

    spec = importlib.util.spec_from_file_location(f"users_{kind}_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has both"
    module = importlib.util.module_from_spec(spec)

    # Dataclasses look up postponed annotations in sys.modules.
    sys.modules[spec.name] = module
    with process_unchanged(f"{where}: the file"), calling(f"{where}: the file"):
        spec.loader.exec_module(module)
    return getattr(module, name, None)


def load_function(spec: str) -> Callable:
    """Return the reward function ``path/to/file.py:name``. Raises UserError if there is none."""
    where, _, name = spec.rpartition(":")
    path = Path(where)
    if path.suffix != ".py":
        raise UserError(f"--reward-file {spec}: give path/to/file.py:function")
    function = load_from_file(path, name, kind="reward", where=f"--reward-file {spec}")
    if not callable(function):
        raise UserError(f"--reward-file {spec}: {path} defines no function {name}")
    return function


PLAIN = (bool, int, float, str, bytes, type(None))


def function_digest(function: Callable) -> str:
    """Return 16 hex digits that stand for what a function, or another callable, does.

    >>> function_digest(lambda x: x + 1) == function_digest(lambda x:  x+1)
    True
    """
    return hashlib.sha256("\x1f".join(_parts(function)).encode()).hexdigest()[:16]


def _parts(function: Any) -> Iterator[str]:
    if isinstance(function, partial):
        yield from _parts(function.func)
        yield from map(_plain, function.args)
        yield from (f"{name}={_plain(value)}" for name, value in sorted(function.keywords.items()))
        return

    if inspect.ismethod(function):
        function = function.__func__
    elif not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function)  # of an object with __call__
    try:
        yield _source(function)
    except (OSError, TypeError, SyntaxError, ValueError):  # e.g. its code was made at run time
        yield function.__qualname__

    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield _plain(cell.cell_contents)
        except ValueError:  # an empty cell
            continue


def _source(function: Any) -> str:
    """Return the source code of a function or a class, without comments and layout.

    Raises OSError, TypeError or SyntaxError if it cannot be found.
    """
    if isinstance(function, type):
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))

    # The lines of a lambda alone may be the middle of a call, which cannot be parsed.
    function = inspect.unwrap(function)
    lines, _ = inspect.findsource(function)
    first = function.__code__.co_firstlineno
    found = [
        ast.unparse(node)
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        == first
    ]
    if not found:
        raise OSError("no function begins in this line")
    return "\n".join(found)


def _plain(value: Any) -> str:
    """Return a number or a text as it is, and the type of anything else."""
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__

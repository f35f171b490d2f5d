"""Loads a user's Python files, which hold tasks and reward functions."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of
from data.text import shortened
from tasks.checks import calling, process_unchanged


def load_from_file(path: Path, name: str, *, kind: str, where: str) -> Any:
    """Execute a user's file and return its attribute `name`; None if it has none.

    `kind` ("task", "reward") is part of the module's name, so that a task and a reward in files of
    the same name do not replace each other. Raises UserError, which begins with `where`, if there
    is no such file, if it raises an exception, or if it changes the process (`process_unchanged`).
    """
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

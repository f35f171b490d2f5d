"""In a checkout the folders `align`, `data` and `tasks` can be imported by their own names, too.

`tasks.base` is then the module `grpo.tasks.base` under a second name: loaded again under another
name, each of its classes would exist twice.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any


class SecondName:
    """Finds and loads `PACKAGE.NAME` as `grpo.PACKAGE.NAME`, for one of the three packages."""

    def __init__(self, package: str):
        self.package = package
        sys.modules[package] = import_module(f"grpo.{package}")

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return how a module of the package is loaded; None for all others."""
        if name.startswith(f"{self.package}.") and find_spec(f"grpo.{name}"):
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has the name already."""
        self.module = import_module(f"grpo.{spec.name}")
        self.spec = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is: it was executed under its own name."""
        module.__spec__ = self.spec

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of a module, for `python -m`."""
        spec = find_spec(f"grpo.{name}")
        assert spec is not None, "find_spec has found it"
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]

"""In a checkout the folders `align`, `data` and `tasks` can be imported by their own names, too."""

import sys
from importlib import import_module
from pkgutil import iter_modules

# What `python -m` runs: as a program, a module needs a specification of its own.
PROGRAMS = ("audit", "make")


def share_modules(package: str) -> None:
    """Let `package` and its modules be those of `grpo.PACKAGE`: loaded again under another name,
    each of their classes would exist twice.
    """
    own = sys.modules[package] = import_module(f"grpo.{package}")
    for module in iter_modules(own.__path__):
        if module.name not in PROGRAMS:
            name = f"{package}.{module.name}"
            sys.modules[name] = import_module(f"grpo.{name}")

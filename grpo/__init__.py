"""A GRPO trainer.

As a library: `from grpo import train, make_trainer, load_run, load_model` (see `grpo.library`).

The folders `align`, `data` and `tasks` of the repository are `grpo.align`, `grpo.data` and
`grpo.tasks`, through the links in this folder. In a checkout they have their own names, too.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

__version__ = "0.1.0"

# Imported when they are first used: most load torch, which takes seconds.
_MODULES = {
    "RunData": "grpo.run.logs",
    "load_run": "grpo.run.logs",
    **dict.fromkeys(("make_trainer", "Trainer", "Model"), "grpo.api"),
    **dict.fromkeys(
        ("train", "load_model", "TrainedRun", "GRPOTrainer", "GRPOConfig"), "grpo.library"
    ),
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Return a name of the library."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")


def share_modules(package: str) -> None:
    """Let `package` and its modules be those of `grpo.PACKAGE`: loaded again under another name,
    each of their classes would exist twice.
    """
    own = sys.modules[package] = import_module(f"grpo.{package}")
    for module in iter_modules(own.__path__):
        # What `python -m` runs needs a specification of its own.
        if module.name not in ("audit", "make"):
            name = f"{package}.{module.name}"
            sys.modules[name] = import_module(f"grpo.{name}")

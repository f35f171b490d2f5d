"""A GRPO trainer.

As a library: `from grpo import train, make_trainer, load_run, load_model` (see `grpo.library`).

The folders `align`, `data` and `tasks` of the repository are `grpo.align`, `grpo.data` and
`grpo.tasks`, through the links in this folder.
"""

from importlib import import_module
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

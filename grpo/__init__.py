"""A GRPO trainer.

As a library: `from grpo import train, make_trainer, load_run, load_model` (see `grpo.library`).
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOP_LEVEL = ("align", "data", "tasks")  # packages that are installed beside grpo


def _check_names() -> None:
    """Raise ImportError if a file or folder of the user's hides one of grpo's own packages.

    `python -m grpo.NAME` ends with exit status 2 instead.
    """
    home = Path(__file__).resolve().parent.parent
    for name in TOP_LEVEL:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.parent.parent != home:
            message = (
                f"grpo needs its own package {name!r}, but {found or 'none'} is found first: "
                "rename that file or folder, or run from elsewhere"
            )
            if sys.argv[:1] == ["-m"]:
                print(f"grpo: {message}", file=sys.stderr)
                sys.exit(2)
            raise ImportError(message)


_check_names()

# Imported when they are first used: most load torch, which takes seconds.
_MODULES = {
    "RunData": "grpo.run.logs",
    "load_run": "grpo.run.logs",
    **dict.fromkeys(("make_trainer", "Trainer", "Model"), "grpo.api"),
    **dict.fromkeys(("train", "load_model", "TrainedRun"), "grpo.library"),
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Return a name of the library."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")

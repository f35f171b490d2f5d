"""A GRPO trainer. What a notebook wants of it: `from grpo import load_run`."""

import sys
from importlib.util import find_spec
from pathlib import Path

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

from grpo.run.reader import RunData, load_run  # noqa: E402  (its imports need the check)

__all__ = ["RunData", "load_run"]

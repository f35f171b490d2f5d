"""What torchrun tells a process: its number among the processes that it has started.

Nothing here imports torch, which takes seconds to load.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


def _from_environment(name: str, default: int) -> int:
    """Return a number that torchrun sets."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


# A RANK without a WORLD_SIZE means nothing; another job may have left it.
SIZE = _from_environment("WORLD_SIZE", 1)
RANK = _from_environment("RANK", 0) if SIZE > 1 else 0


@contextmanager
def only_rank0_prints() -> Iterator[None]:
    """Within this block the standard output of all ranks but 0 is discarded."""
    if RANK == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield

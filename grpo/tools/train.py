"""The program `train.py`: read the flags, and train.

A mistake in the flags is reported before torch is loaded, which takes seconds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from data.errors import exit_status
from data.streams import interrupts_end, reason_of
from grpo.config import parse
from grpo.torchrun import RANK


def main(argv: list[str]) -> int:
    """Train with these flags; return the exit status."""
    # Training continues if standard output or error is lost. Then a line is added here.
    lost_streams: list[str] = []

    def note_lost(name: str, error: Exception) -> None:
        lost_streams.append(f"{name} is lost ({reason_of(error)}); training continues without it")

    name = f"train.py, rank {RANK}" if RANK else "train.py"
    with only_rank0_prints():
        return exit_status(name, lambda: start(argv, lost_streams), on_lost=note_lost)


@contextmanager
def only_rank0_prints() -> Iterator[None]:
    """Within this block standard output is lost, except that of rank 0."""
    if RANK == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def start(argv: list[str], lost_streams: list[str]) -> int:
    """Read the flags, and start the run on this rank."""
    config, given = parse(argv)

    with interrupts_end():
        from grpo.distributed import join_ranks
        from grpo.tools.train_run import start_run
    return start_run(config, given, join_ranks(config.device), lost_streams).status

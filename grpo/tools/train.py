"""The program `train.py`: read the flags, and train.

A mistake in the flags is reported before torch is loaded, which takes seconds.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from grpo.config import parse
from grpo.data.errors import Lasting, exit_status, importing
from grpo.distributed import RANK, join_ranks

# How often a waiting thread of OpenMP asks whether there is work, before it sleeps. The default is
# 300,000, with which two runs on the same two cores spend most of their time asking: a step takes
# 6.0 times as long as alone. With 2,000 it takes 2.4 times as long, and alone 1.02 times; with 300
# 1.8 and 1.2 times (runs/archive/LOG.md, 2026-11-25).
SPIN_COUNT = "2000"


def let_threads_sleep() -> None:
    """Make threads that wait for work sleep soon. Must be called before torch is loaded.

    What the user has set by OMP_WAIT_POLICY or GOMP_SPINCOUNT stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with these flags; return the exit status. Training goes on if the console is lost."""
    let_threads_sleep()
    name = f"train.py, rank {RANK}" if RANK else "train.py"
    stdout = Lasting(None if RANK else sys.stdout)  # only rank 0 prints
    with redirect_stdout(stdout), redirect_stderr(Lasting(sys.stderr)):
        return exit_status(name, lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: Sequence[str]) -> int:
    """Read the flags, and start the run on this rank."""
    config, given = parse(argv)
    with importing():
        from grpo.run.session import start_run

    return start_run(config, given, join_ranks(config.device)).status

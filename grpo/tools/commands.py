"""The commands that an installed package has: grpo-train, grpo-eval, grpo-inspect, grpo-report.

Nothing is imported before it is needed, so that --help is quick.
"""

import os
import sys

from data.streams import interrupts_end

# How often a waiting thread of OpenMP asks whether there is work, before it sleeps. The default is
# 300,000, with which two runs on the same two cores spend most of their time asking: a step takes
# 6.0 times as long as alone. With 2,000 it takes 2.4 times as long, and alone 1.02 times; with 300
# 1.8 and 1.2 times (runs/LOG.md, 2026-11-25).
SPIN_COUNT = "2000"


def let_threads_sleep() -> None:
    """Make threads that wait for work sleep soon. Must be called before torch is loaded.

    What the user has set by OMP_WAIT_POLICY or GOMP_SPINCOUNT stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def train() -> None:
    """Run `train.py`."""
    let_threads_sleep()
    with interrupts_end():
        from grpo.run.interrupt import end_process
        from grpo.tools.train import main
    end_process(main(sys.argv[1:]))


def evaluate() -> None:
    """Run `eval.py`."""
    let_threads_sleep()
    with interrupts_end():
        from grpo.tools.evaluation.program import main
    sys.exit(main(sys.argv[1:]))


def inspect() -> None:
    """Run `python -m grpo.inspect`."""
    with interrupts_end():
        from grpo.tools.inspect import main
    sys.exit(main())


def report() -> None:
    """Run `python -m grpo.report`."""
    with interrupts_end():
        from grpo.tools.report.program import main
    sys.exit(main())

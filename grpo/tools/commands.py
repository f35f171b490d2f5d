"""The commands that an installed package has: grpo-train, grpo-eval, grpo-inspect, grpo-report.

Nothing is imported before it is needed, so that --help is quick.
"""

import sys

from data.streams import interrupts_end


def train() -> None:
    """Run `train.py`."""
    with interrupts_end():
        from grpo.flags import show_help
    show_help(sys.argv[1:])  # before torch is loaded, which takes seconds

    with interrupts_end():
        from grpo.run.background import end_process
        from grpo.tools.train import main
    end_process(main(sys.argv[1:]))


def evaluate() -> None:
    """Run `eval.py`."""
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

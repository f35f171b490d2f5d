"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25`.

Problems come from the test split, whose documents are used neither to train nor to choose
anything. They are distinct: if fewer exist than were asked for, all of them are evaluated and the
output says so. Problems that the run was trained on are dropped and counted.

A run is evaluated as it was trained: task, level, wording, system turn, examples, variables of the
chat template, temperature, top-k, top-p and completion budget are the run's own unless a flag
overrides them.

--texts evaluates on every text of the folder except those that the run was trained on. --foreign
adds kinds of text that no run is trained on (`data/foreign.py`), and reports each kind.
"""

from data.errors import exit_status
from data.streams import interrupts_end
from grpo.tools.evaluation.flags import parse


def main(argv: list[str]) -> int:
    """Evaluate with these flags; return the exit status."""
    return exit_status("eval.py", lambda: start(argv))


def start(argv: list[str]) -> int:
    """Read the flags, and evaluate. Torch is loaded after that, because it takes seconds."""
    assert __doc__ is not None
    flags, others = parse(argv, description=__doc__.splitlines()[0])

    with interrupts_end():
        from grpo.tools.evaluation.evaluate import report
    return report(flags, others)

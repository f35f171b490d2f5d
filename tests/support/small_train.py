"""Small runs by `train.py`, for tests from the command line to the files."""

from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import FEW

from grpo.run.session import Run
from grpo.tasks.registry import load_task
from grpo.tasks.supply import distinct_problems, write_problems
from grpo.tools import train

TOP = Path(__file__).resolve().parents[2]

SMALL = [*FEW, *"--words 6 --steps 4 --config {'eval_problems':4} --save-every 2".split()]
SMALL += ["--eval-every", "3"]


class Killed(BaseException):
    """Ends a run where it stands, as a kill does."""


@contextmanager
def killed_in(step, *, is_saved):
    """Kill the run in this step, before or after it would be saved."""
    save_if_due = Run.save_if_due

    def kill(self, report):
        if is_saved or report.step < step:
            save_if_due(self, report)
        if report.step == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "save_if_due", kill)
        yield


def run(*arguments, status=0):
    assert train.main([*SMALL, *arguments]) == status


def fails(capsys, *arguments, main=train.main, status=2):
    """Return the one line that a bad command line gets."""
    capsys.readouterr()
    assert main([str(each) for each in arguments]) == status
    (line,) = capsys.readouterr().err.strip().split("\n")
    return line


def make_set(path, *levels):
    """Write three training problems of each level, one level after the other."""
    task = load_task("interleave")
    sets = [distinct_problems(task, seed=0, split="train", level=level, size=3) for level in levels]
    write_problems(path, sum(sets, []))

"""Flags, a task and a complete run, for tests in which the texts do not matter; validation checks
at every step, because short runs have none otherwise.
"""

from pathlib import Path

import pytest

from grpo.run.session import PROMOTION_SEED, PURPOSES
from grpo.tools import train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# Few and small groups, and nothing before the first step.
FEW = ["--prompts", "2", "--group-size", "4", "--preflight", "off", "--device", "cpu"]

# `train.py --resume` needs these flags again.
BY_PLACE = ["--task", f"{EXAMPLES / 'by_place.py'}:ByPlace"]

# The source code of a user's task. Its rewards vary in each group, whatever the policy writes.
OWN = """
from grpo.tasks.base import Problem, Score, key_of

class Own:
    name, rewards, default_level = "own", (), 1

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, number, number, key_of(number))

    def score(self, problem, completions):
        return [Score(0.1 * i) for i in range(len(completions))]
"""


def check_often(monkeypatch) -> None:
    """Have each step checked on three held-out problems, and levels open at once."""
    monkeypatch.setattr("grpo.ending.CHECK_EVERY", 1)
    monkeypatch.setattr("grpo.curriculum.OPEN_AT", 0.051)
    monkeypatch.setitem(PURPOSES, "promotion", (PROMOTION_SEED, 3, "promotion"))


def whole_run(flags, home):
    """Train a run named "whole" in the folder `home` and return the run's directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train.main([*flags, "--name", "whole"]) == 0
    return home / "runs" / "whole"

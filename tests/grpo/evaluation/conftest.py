"""Fixtures of evaluations: a folder with two small tasks, and a run of the tiny model."""

from pathlib import Path

import pytest
from frequent_checks import check_often
from small_evaluations import FEW, PONDER

from grpo.tools import train


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_often(monkeypatch)
    Path("ponder.py").write_text(PONDER)
    Path("few.py").write_text(FEW)


@pytest.fixture()
def run(tiny_model):
    """Return a function that trains the tiny model for two steps in runs/a."""
    small = (
        "--name a --preflight off --lora-rank 0 --device cpu --prompts 2 --group-size 2 --steps 2"
    )
    evaluations = "--config {'eval_problems':3} --eval-every 1"

    def start(*arguments):
        flags = [*small.split(), *evaluations.split(), "--model", str(tiny_model)]
        status = train.main([*flags, *arguments])
        return 0 if status == 3 else status  # a random model may have nothing to learn from

    return start

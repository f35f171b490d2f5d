"""Rows, rewards and settings of small runs by the library."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

from compare_runs import without_times

WORDS = "owl tide salt moss bell rope loom kiln".split()


ROWS = [{"prompt": f"Copy text A.\nA: {a} {b}", "answer": f"{a} {b}"} for a in WORDS for b in WORDS]


# "tiny" is a link to the tiny model, see conftest.py.
QUICK = dict(
    model="tiny",
    steps=2,
    prompts=2,
    group_size=4,
    max_new_tokens=8,
    preflight="off",
    eval_problems=4,
)


FLAGS = (
    "--model tiny --prompts 2 --group-size 4 --max-new-tokens 8 --preflight off "
    "--config {'eval_problems':4}"
).split()


def reward(prompt, completion, answer, **row):
    """It differs within nearly every group, whatever the policy writes."""
    right = completion.split() == answer.split()
    return {"length": len(completion) % 7 / 7, "all": 0.2 * right}


OWN = inspect.getsource(reward)


def alike(one, other):
    """Assert that two runs have the same rollouts, rewards and metrics, times apart."""
    assert without_times(one.metrics) == without_times(other.metrics)
    assert one.rollouts() == other.rollouts()


def example(name):
    """Run a file of examples/ and return what it printed."""
    path = Path(__file__).resolve().parents[2] / "examples" / name
    environment = {**os.environ, "PYTHONPATH": str(path.parents[1])}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The core runs with the folder `grpo/fast` deleted: slower, and with the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]

# Two steps of GRPO on the embedded model by the library, without a run directory.
STEPS = """
import json
import sys
from importlib.util import find_spec

# An editable installation would find the folder in its checkout.
sys.meta_path = [
    finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")
]
from grpo import make_trainer

trainer = make_trainer(
    task="interleave", level=3, prompts=2, group_size=4, device="cpu", seed=0
)
steps = []
for _ in range(2):
    trainer.step()
    answers = [answer for group in trainer.current for answer in group.completions]
    steps.append([[answer.tokens, answer.logprobs] for answer in answers])
print(json.dumps({"path": trainer.policy.path, "has_fast": bool(find_spec("grpo.fast")),
                  "steps": steps}))
"""


def two_steps(folder: Path) -> dict:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", STEPS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_steps_without_it_are_those_with_it(tmp_path):
    for package in ("align", "data", "tasks", "grpo"):
        ignored = shutil.ignore_patterns("fast", "__pycache__")
        shutil.copytree(TOP / package, tmp_path / package, ignore=ignored)

    full, core = two_steps(TOP), two_steps(tmp_path)
    assert full["has_fast"] and full["path"] == "fast"
    assert not core["has_fast"] and core["path"] == "plain"

    # The tokens are the same, too: no uniform number lies within rounding of a border.
    for ours, theirs in zip(core["steps"], full["steps"], strict=True):
        assert len(ours) == 8
        for (tokens, logprobs), (expected_tokens, expected) in zip(ours, theirs, strict=True):
            assert tokens == expected_tokens
            assert logprobs == pytest.approx(expected, abs=1e-4)

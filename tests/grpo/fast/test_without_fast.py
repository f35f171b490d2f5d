"""The core runs with the folder `grpo/fast` deleted: slower, and with the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]

# A step of GRPO on the embedded model by the library, without a run directory.
STEP = """
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
report = trainer.step()
answers = [answer for group in trainer.current for answer in group.completions]
print(json.dumps({"path": trainer.policy.path, "has_fast": bool(find_spec("grpo.fast")),
                  "answers": [[answer.tokens, answer.logprobs] for answer in answers],
                  "figures": [report.metrics["loss"], report.metrics["grad_norm"]]}))
"""


def one_step(folder: Path) -> dict:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", STEP]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_without_it_is_the_step_with_it(tmp_path):
    for package in ("align", "data", "tasks", "grpo"):
        ignored = shutil.ignore_patterns("fast", "__pycache__")
        shutil.copytree(TOP / package, tmp_path / package, ignore=ignored)

    full, core = one_step(TOP), one_step(tmp_path)
    assert full["has_fast"] and full["path"] == "fast"
    assert not core["has_fast"] and core["path"] == "plain"

    # The tokens are the same, too: no uniform number lies within rounding of a border.
    assert len(core["answers"]) == len(full["answers"]) == 8
    for (tokens, logprobs), (expected_tokens, expected) in zip(core["answers"], full["answers"]):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected, abs=1e-4)
    assert (
        core["figures"] == pytest.approx(full["figures"], rel=0.02, abs=1e-5)
        and full["figures"][1] > 0
    )

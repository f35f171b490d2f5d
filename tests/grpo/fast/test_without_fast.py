"""The core runs with the folder `grpo/fast` deleted: slower, and with the same numbers.

A step needs no run directory, no console and no tools.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo import make_trainer

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

trainer = make_trainer(**json.loads(sys.argv[1]))
report = trainer.step()
answers = [answer for group in trainer.current for answer in group.completions]
comfort = [name for name in sys.modules if name.startswith(("grpo.run", "grpo.show", "grpo.tools"))]
print(json.dumps({"path": trainer.policy.path, "has_fast": bool(find_spec("grpo.fast")),
                  "answers": [[answer.tokens, answer.logprobs] for answer in answers],
                  "figures": [report.metrics["loss"], report.metrics["grad_norm"]],
                  "comfort": comfort}))
"""
OPTIONS = dict(task="interleave", level=3, prompts=2, group_size=4, device="cpu", seed=0)


def test_a_step_needs_neither_the_fast_path_nor_runs_console_and_tools(tmp_path):
    for package in ("align", "data", "tasks", "grpo"):
        ignored = shutil.ignore_patterns("fast", "__pycache__")
        shutil.copytree(TOP / package, tmp_path / package, ignore=ignored)
    before = sorted(tmp_path.rglob("*.json*"))
    done = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", STEP, json.dumps(OPTIONS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    core = json.loads(done.stdout.splitlines()[-1])
    assert not core["has_fast"] and core["path"] == "cached" and core["comfort"] == []
    assert sorted(tmp_path.rglob("*.json*")) == before  # no run, and no log

    trainer = make_trainer(**OPTIONS)
    report = trainer.step()
    assert trainer.policy.path == "fast"
    full = [answer for group in trainer.current for answer in group.completions]
    # The tokens are the same, too: no uniform number lies within rounding of a border.
    assert len(core["answers"]) == len(full) == 8
    for (tokens, logprobs), answer in zip(core["answers"], full):
        assert tokens == list(answer.tokens)
        assert logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    loss, norm = report.metrics["loss"], report.metrics["grad_norm"]
    assert core["figures"] == pytest.approx([loss, norm], rel=0.02, abs=1e-5) and norm > 0

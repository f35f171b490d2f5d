"""The core runs alone: a step needs no run directory, no console and no tools."""

import subprocess
import sys

STEP = """
import sys
from grpo import make_trainer

options = dict(level=2, prompts=2, group_size=2, max_new_tokens=20, device="cpu", lora_rank=0)
report = make_trainer(model=sys.argv[1], **options).step()
assert report.groups
print([name for name in sys.modules if name.startswith(("grpo.run", "grpo.show", "grpo.tools"))])
"""


def test_a_step_imports_nothing_of_runs_console_or_tools(tiny_model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(tiny_model)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert not list(tmp_path.iterdir())

"""A system whose text is not UTF-8: every file is read and written as UTF-8 all the same. Ruff sees
every file that is opened without an encoding (PLW1514).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]

# Each program in turn, in one process, because to import torch takes longest.
PROGRAMS = """
import codecs, locale, runpy, sys
encoding = codecs.lookup(locale.getpreferredencoding(False)).name
assert encoding != "utf-8", "the locale was not taken"
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, 3), line
"""


@pytest.mark.slow
def test_every_program_works_where_text_is_ascii(tiny_flags, tmp_path):
    task = "--task interleave --words 2 --preflight off --config {'eval_problems':2}"
    lines = [
        f"train {task} --steps 2 --prompts 2 --group-size 4 --name run {' '.join(tiny_flags)}",
        "train --resume runs/run --steps 3",
        "eval --model runs/run --words 2 --problems 2",
        "grpo.inspect runs/run step 1",
        "grpo.report runs/run",
        "grpo.export runs/run exported",
        "grpo.tasks.audit runs/run",
    ]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS],
        input="\n".join(lines),
        env={**os.environ, **locale, "PYTHONPATH": str(TOP)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr

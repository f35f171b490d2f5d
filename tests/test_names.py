"""A user's own `tasks.py` or `data/` beside a script: it works, or one line names the clash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo import TOP_LEVEL

ROOT = Path(__file__).resolve().parents[1]
API = ("-c", "from grpo import load_run; print(load_run.__name__)")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, which then comes first on its path, as beside a script."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_plain_data_folder_is_no_clash(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.csv").write_text("a,b")
    done = python(tmp_path, *API)
    assert (done.returncode, done.stdout) == (0, "load_run\n"), done.stderr


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_module_of_the_same_name_is_named(tmp_path, name):
    mine = tmp_path / f"{name}.py"
    mine.write_text("")
    said = f"grpo needs its own package '{name}', but {mine} is found first: rename that file"
    done = python(tmp_path, *API)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {said}")

    done = python(tmp_path, "-m", "grpo.inspect", "runs/a", "steps")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"grpo: {said}")

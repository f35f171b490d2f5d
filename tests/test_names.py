"""A user's own `data/`, `tasks.py` or `align.py` beside a script or a reward file is the user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.tasks.registry import load_function

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture()
def project(tmp_path):
    """A folder with modules of the same names as our folders."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("")
    (tmp_path / "data" / "prep.py").write_text("def f(text):\n    return text.strip()\n")
    (tmp_path / "tasks.py").write_text("import data.prep\n")
    (tmp_path / "align.py").write_text("raise ImportError('nothing here needs it')\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, which then comes first on its path, as beside a script."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_modules_of_the_same_names_are_the_users(project):
    script = "import tasks, grpo.config, grpo.tasks.rows; print(tasks.data.prep.f(' a '))"
    done = python(project, "-c", script)
    assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr


@pytest.mark.parametrize("file", ["own.py", "rewards/own.py"])
def test_a_reward_file_imports_from_its_own_folder_or_the_working_one(project, file, monkeypatch):
    (project / "rewards").mkdir()
    (project / file).write_text("from data.prep import f\n")
    monkeypatch.chdir(project if "/" in file else ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])  # as for `python train.py`
    assert load_function(f"{project / file}:f")(" a ") == "a"
    assert Path(sys.modules.pop("data").__file__).parent == project / "data"
    del sys.modules["data.prep"]


def test_two_reward_files_import_each_its_own_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    functions = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper_of_a_test.py").write_text(f"def f():\n    return '{name}'\n")
        inner = tmp_path / name / "package_of_a_test"
        inner.mkdir()
        (inner / "__init__.py").write_text("from .g import g\n")
        (inner / "g.py").write_text(f"def g():\n    return '{name}'\n")
        imports = "from helper_of_a_test import f\nfrom package_of_a_test import g\n"
        (tmp_path / name / "own.py").write_text(imports)
        functions += [load_function(f"{tmp_path / name / 'own.py'}:{each}") for each in "fg"]
    assert [function() for function in functions] == ["a", "a", "b", "b"]


def test_no_class_exists_twice_in_a_checkout():
    script = "import sys"
    for name in ("align.needleman", "data.errors", "tasks.base"):
        script += f"; import {name}, grpo.{name}"
        script += f"; assert sys.modules['{name}'] is sys.modules['grpo.{name}']"
    done = python(ROOT, "-c", script)
    assert done.returncode == 0, done.stderr


def test_a_program_runs_by_its_folder_s_name():
    done = python(ROOT, "-m", "tasks.audit", "--help")
    assert (done.returncode, done.stdout[:13]) == (0, "usage: python"), done.stderr

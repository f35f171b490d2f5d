"""The installed package in a project with `data/`, `tasks.py` and `align.py` of its own. It makes a
wheel and a fresh environment.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
ROWS = "--data rows.jsonl --reward-file own.py:reward"
QUICK = "--steps 2 --prompts 2 --group-size 4 --max-new-tokens 8 --preflight off"
QUICK += " --config '{eval_problems: 4}'"

FILES = {
    "data/__init__.py": "",
    "data/prep.py": "def reward(completion, answer):\n    return completion.strip() == answer\n",
    "tasks.py": "raise SystemExit('nobody imports this')\n",
    "align.py": "raise SystemExit('nobody imports this')\n",
    "train.py": "raise SystemExit('nobody starts this')\n",
    "own.py": "from data.prep import reward\n",
    "script.py": """from grpo import load_run, train
from own import reward

if __name__ == "__main__":
    run = train("rows.jsonl", reward, steps=2, prompts=2, group_size=4, preflight="off",
                eval_problems=2, max_new_tokens=8, name="b")
    print(run.report(), len(load_run("runs/b").metrics), len(run.policy.generate(["hello"])))
""",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the folder of the programs of a fresh environment that has the wheel."""
    home = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "-q"]
    run([*pip, "wheel", "--no-deps", "-w", home, str(TOP)], home, check=True)
    (wheel,) = home.glob("*.whl")
    run([sys.executable, "-m", "venv", home / "venv"], home, check=True)
    programs = home / "venv" / "bin"
    limits = ["-c", str(TOP / "constraints.txt")]
    run([programs / "pip", "install", "-q", *limits, str(wheel)], home, check=True)
    return programs


@pytest.fixture()
def project(installed, tmp_path, monkeypatch):
    """Work in the folder of a project, where the programs are found."""
    rows = [{"prompt": f"Copy text A.\nA: {n}", "answer": str(n)} for n in range(64)]
    for name, text in {**FILES, "rows.jsonl": "\n".join(map(json.dumps, rows))}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", str(installed), prepend=os.pathsep)
    return tmp_path


def run(command, folder, **more):
    """Run a command that sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, **more
    )


def said(folder, command):
    done = run(shlex.split(command), folder)
    assert done.returncode in (0, 3), f"{command}: {done.stderr}"
    return done.stdout


@pytest.mark.install
def test_the_programs_and_the_commands_that_they_print(project):
    trained = said(project, f"grpo-train {ROWS} {QUICK} --name a")
    printed = trained.split("\nnext\n")[1].splitlines()
    assert len(printed) >= 4 and all(line.startswith("  grpo-") for line in printed)
    for line in printed:
        said(project, line)
    assert (project / "runs" / "a" / "report.html").exists()

    exported = said(project, "grpo-export runs/a out")
    assert "model of step" in exported and (project / "out" / "config.json").exists()
    assert said(project, "grpo-train --version") == said(project, "grpo-eval --version")


@pytest.mark.install
def test_the_library(project):
    last = said(project, "python script.py").splitlines()[-1]
    assert last == "runs/b/report.html 2 1"

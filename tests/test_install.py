"""The installed package: console scripts in a folder with files of the same names as ours, and the
library in a folder of its own. It makes a wheel and a fresh environment.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
QUICK = "--words 3 --steps 2 --prompts 2 --group-size 4 --preflight off --eval-problems 4 --name a"

SCRIPT = """
from grpo import load_run, train

def reward(completion, answer):
    return float(completion.strip() == answer)

if __name__ == "__main__":
    rows = [{"prompt": f"Copy text A.\\nA: {word}", "answer": word} for word in "abcdefghijklmnop"]
    run = train(rows, reward, steps=2, prompts=2, group_size=4, preflight="off", eval_problems=2,
                max_new_tokens=8, name="b")
    print(run.report(), len(load_run("runs/b").metrics), len(run.policy.generate(["hello"])))
"""


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


def run(command, folder, **more):
    """Run a command that sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, **more
    )


def said(folder, *command):
    done = run(command, folder)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


@pytest.mark.install
def test_the_programs_work_beside_files_of_the_same_names(installed, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("data/mine.txt", "tasks.py", "align.py", "train.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not ours')\n")
    trained = said(tmp_path, installed / "grpo-train", *QUICK.split())
    assert "  grpo-eval --model runs/a " in trained and "python train.py" not in trained
    assert "similarity" in said(
        tmp_path, installed / "grpo-eval", "--model", "runs/a", "--problems", "3"
    )
    assert "reward" in said(tmp_path, installed / "grpo-inspect", "runs/a", "steps")
    assert "report.html" in said(tmp_path, installed / "grpo-report", "runs/a")


@pytest.mark.install
def test_the_library_works_in_a_folder_of_its_own(installed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    last = said(tmp_path, installed / "python", "script.py").splitlines()[-1]
    assert last == "runs/b/report.html 2 1"


@pytest.mark.install
def test_a_module_of_the_same_name_beside_a_script_is_named(installed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tasks.py").write_text("")
    done = run([installed / "python", "script.py"], tmp_path)
    assert done.returncode == 1
    assert "grpo needs its own package 'tasks'" in done.stderr.splitlines()[-1]

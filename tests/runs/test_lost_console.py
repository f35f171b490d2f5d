"""A run without a console is the run that had one: a reader that leaves, a full disk, a terminal
that is closed.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from small_runs import OWN, whole_run
from tiny_models import make_tiny_model

from grpo.distributed import Interrupt

TOP = Path(__file__).resolve().parents[2]
FLAGS = (
    "--task own.py:Own --model model --lora-rank 0 --prompts 2 --group-size 4 --max-new-tokens 8 "
    "--steps 3 --preflight off --config {'eval_problems':2} --save-every 9 --device cpu"
).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, a task, and the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("console")
    make_tiny_model(folder / "model")
    (folder / "own.py").write_text(OWN)
    whole_run(FLAGS, folder)
    return folder


@pytest.fixture()
def here(home, monkeypatch):
    monkeypatch.chdir(home)


def shell(line):
    """Run a line of bash, in which $TRAIN starts the program; return it when it has ended."""
    return subprocess.run(
        ["bash", "-c", line],
        env={
            **os.environ,
            "PYTHONPATH": str(TOP),
            "PYTHONUNBUFFERED": "",  # what is printed into a pipe is buffered, as for most users
            "TRAIN": f"{sys.executable} {TOP / 'train.py'}",
        },
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.slow
def test_a_lost_console_does_not_lose_the_run(here):
    done = shell(f"$TRAIN {shlex.join(FLAGS)} --name lost | head -1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_run(Path("runs/whole"), Path("runs/lost"))


@pytest.mark.parametrize("gentle", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_after_a_gentle_one(monkeypatch, capfd, gentle):
    """A terminal that is closed hangs up more than once, and a scheduler sends SIGTERM after its
    SIGUSR1; a first Ctrl-C or SIGTERM after them is the first one still.
    """
    monkeypatch.setattr("grpo.distributed.SAME", -1.0)
    was = signal.signal(gentle, signal.SIG_DFL)
    try:
        with Interrupt() as interrupt:
            for number in (gentle, gentle, signal.SIGINT, gentle):
                signal.raise_signal(number)
            assert interrupt.wanted == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(gentle) == signal.SIG_DFL
    finally:
        signal.signal(gentle, was)
    assert capfd.readouterr().err.count("finishing and saving what is under way") == 2

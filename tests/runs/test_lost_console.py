"""A run without a console is the run that had one: a reader that leaves, a full or closed output,
a terminal that is closed.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from tiny_models import make_tiny_model

from grpo.run.interrupt import Interrupt
from grpo.tools import train

TOP = Path(__file__).resolve().parents[2]
FLAGS = [
    "--task",
    "own.py:Own",
    "--model",
    "model",
    "--lora-rank",
    "0",
    "--prompts",
    "2",
    "--group-size",
    "4",
    "--max-new-tokens",
    "8",
    "--steps",
    "3",
    "--preflight",
    "off",
    "--eval-problems",
    "2",
    "--save-every",
    "9",
    "--device",
    "cpu",
]
OWN = '''
"""In its third step's first score it does what HAPPENS says, then may wait for the file `go`."""

import os
import signal
import time
from pathlib import Path

from tasks.base import Problem, Score, key_of

EVENT = os.environ.get("HAPPENS", "")


class Own:
    name, rewards, default_level = "own", (), 1
    scored = 0

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, number, number, key_of(number))

    def score(self, problem, completions):
        Own.scored += 1
        if Own.scored == 5 and EVENT:  # 2 of the evaluation, 2 of the first step, then the second
            self.happen()
        return [Score(0.1 * i) for i in range(len(completions))]

    def happen(self):
        if EVENT == "SIGHUP":
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            return
        Path("here").touch()
        deadline = time.monotonic() + 60
        while not Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, a task, and the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("console")
    make_tiny_model(folder / "model")
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main([*FLAGS, "--name", "whole"]) == 0
    return folder


@pytest.fixture()
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    for name in ("here", "go"):
        Path(name).unlink(missing_ok=True)


def environment(happens=""):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TOP),
        "TERM": "xterm",
        "PYTHONUNBUFFERED": "",  # as most users have it: what is printed into a pipe is buffered
        "HAPPENS": happens,
    }


def shell(line, *, happens=""):
    """Run a line of bash, in which $TRAIN and $EVAL start a program; return it when it
    has ended.
    """
    programs = {name.upper(): f"{sys.executable} {TOP / name}.py" for name in ("train", "eval")}
    return subprocess.run(
        ["bash", "-c", line],
        env=environment(happens) | programs | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=180,
    )


def warnings_of(run):
    """Return the warnings of a run, without their times."""
    path = Path("runs") / run / "warnings.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" UTC  ")[2] for line in lines]


def warnings_beyond_whole(run):
    """Return the warnings of a run that the run that nothing happened to does not have."""
    lines = warnings_of(run)
    for line in warnings_of("whole"):
        lines.remove(line)
    return lines


OUTPUT_CLOSED, ERROR_CLOSED = "standard output is lost (closed)", "standard error is lost (closed)"
LOST = {
    "head": ("| head -1; exit ${PIPESTATUS[0]}", ["standard output is lost (Broken pipe)"]),
    "full": ("> /dev/full", ["standard output is lost (No space left on device)"]),
    "no-output": (">&-", [OUTPUT_CLOSED]),
    "no-error": ("2>&-", [ERROR_CLOSED]),
    "nothing": (">&- 2>&-", [OUTPUT_CLOSED, ERROR_CLOSED]),
}


# Where both streams are closed is the harder case than one of them.
CASES = [pytest.param(c, marks=[pytest.mark.slow] * c.startswith("no-")) for c in LOST]


@pytest.mark.parametrize("case", CASES)
def test_a_lost_console_does_not_lose_the_run(here, case):
    how, why = LOST[case]
    done = shell(f"$TRAIN {shlex.join(FLAGS)} --name {case} {how}")
    assert done.returncode == 0, done.stderr
    assert_same_run(Path("runs/whole"), Path("runs") / case)
    lines = warnings_beyond_whole(case)
    assert len(lines) == len(why) and all(map(str.__contains__, lines, why))
    told = (
        []
        if case in ("no-error", "nothing")
        else [f"train.py: {why[0]}; training continues without it"]
    )
    assert done.stderr.splitlines() == told


def start(name, *, happens, files, preexec=None):
    return subprocess.Popen(
        [sys.executable, str(TOP / "train.py"), *FLAGS, "--name", name],
        env=environment(happens),
        stdin=files,
        stdout=files,
        stderr=files,
        start_new_session=True,
        preexec_fn=preexec,
    )


@pytest.mark.parametrize("gentle", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_after_a_gentle_one(monkeypatch, capfd, gentle):
    """A terminal that is closed hangs up more than once, and a scheduler sends SIGTERM after its
    SIGUSR1; a first Ctrl-C or SIGTERM after them is the first one still.
    """
    monkeypatch.setattr("grpo.run.interrupt.SAME", -1.0)
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
    assert capfd.readouterr().err.count("finishing and saving the current step") == 2

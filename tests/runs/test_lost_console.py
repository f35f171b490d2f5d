"""A run without a console is the run that had one: a reader that leaves, a full or closed output,
a terminal that is closed.
"""

import contextlib
import fcntl
import io
import json
import os
import pty
import shlex
import signal
import stat
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from tiny_models import make_tiny_model

from data.errors import UserError, exit_status
from data.files import write_whole
from data.streams import Lasting
from grpo.run.checkpoint import checkpoints
from grpo.run.interrupt import Interrupt
from grpo.tools import train
from grpo.tools.evaluation import program as evaluation

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


@contextlib.contextmanager
def hung_up_by_the_task(handler):
    """In here the task of a run hangs up this process, which answers as `handler` says unless the
    run has its own way.
    """
    was = signal.signal(signal.SIGHUP, handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HAPPENS", "SIGHUP")
            yield
    finally:
        signal.signal(signal.SIGHUP, was)


def test_a_hangup_saves_the_step_and_the_run_goes_on(here, capfd):
    with hung_up_by_the_task(lambda *_: pytest.fail("nobody waited for it")):
        assert train.main([*FLAGS, "--name", "hung-up"]) == 128 + signal.SIGHUP
    text = "".join(capfd.readouterr())
    assert "SIGHUP: finishing and saving the current step\n" in text
    assert (
        "SIGHUP: stopped after step 2, which is saved; continue with --resume runs/hung-up" in text
    )
    (saved,) = checkpoints(Path("runs/hung-up"))[0]
    assert saved.name == "step-000002"
    assert json.loads((saved / "manifest.json").read_text())["note"]["reasons"] == ["SIGHUP"]
    assert train.main(["--resume", "runs/hung-up", "--task", "own.py:Own"]) == 0
    assert_same_run(Path("runs/whole"), Path("runs/hung-up"))


def test_under_nohup_a_hangup_is_nothing(here):
    with hung_up_by_the_task(signal.SIG_IGN):
        assert train.main([*FLAGS, "--name", "nohup"]) == 0
    assert_same_run(Path("runs/whole"), Path("runs/nohup"))


def wait_for(path, run):
    deadline = time.monotonic() + 120
    while not Path(path).exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(path).exists()


@pytest.mark.parametrize("is_controlling", [False, True])
def test_a_terminal_that_is_closed(here, is_controlling):
    """One that controls the process hangs it up; any other leaves it with writes that fail."""
    name = f"terminal-{is_controlling}"
    master, slave = pty.openpty()

    def prepare():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if is_controlling:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    run = start(name, happens="wait", files=slave, preexec=prepare)
    os.close(slave)
    drain(master, run)
    os.close(master)
    Path("go").touch()
    status = run.wait(timeout=120)
    if is_controlling:
        assert status == 128 + signal.SIGHUP
        assert checkpoints(Path("runs") / name)[0][-1].name == "step-000002"
        assert train.main(["--resume", f"runs/{name}", "--task", "own.py:Own"]) == 0
    else:
        assert status == 0
        lines = warnings_beyond_whole(name)
        assert any("standard output is lost (Input/output error)" in line for line in lines), lines
    assert_same_run(Path("runs/whole"), Path("runs") / name)


def drain(master, run):
    """Read what a terminal is told until the task says that it waits."""
    os.set_blocking(master, False)
    said = b""
    deadline = time.monotonic() + 120
    while not Path("here").exists() and run.poll() is None and time.monotonic() < deadline:
        try:
            said += os.read(master, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    assert Path("here").exists() and b"loading model" in said


EVALUATE = "$EVAL --model model --task own.py:Own --problems 2 --device cpu --json"


@pytest.mark.slow  # as any tool's: test_a_tool_without_output
def test_a_reader_that_leaves_ends_an_evaluation_without_a_word(here):
    done = shell(f"{EVALUATE} left.json | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")
    assert json.loads(Path("left.json").read_text())[0]["n"] == 2


def test_a_full_output_of_an_evaluation_is_one_line(here):
    done = shell(f"{EVALUATE} full.json > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "eval.py: standard output: No space left on device\n"
    assert json.loads(Path("full.json").read_text())[0]["n"] == 2


def test_figures_that_cannot_be_written_are_one_line(here, capsys):
    asked = ["--model", "model", "--task", "own.py:Own", "--problems", "2", "--device", "cpu"]
    assert evaluation.main([*asked, "--json", "/dev/full"]) == 2
    said = capsys.readouterr().err
    assert said == "eval.py: /dev/full: cannot be written: No space left on device\n"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)  # and was not replaced by a file


@pytest.mark.parametrize(
    "how, status, said",
    [
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
        ("> /dev/full", 2, "data.corpus: standard output: No space left on device\n"),
        (">&-", 0, ""),
        ("--help | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("merge nowhere 2>&-", 2, ""),
    ],
)
def test_a_tool_without_output(how, status, said):
    done = shell(f"cd {TOP} && $PYTHON -m data.corpus {how}")
    assert (done.returncode, done.stderr) == (status, said)


class Broken:
    """A stream whose writes fail."""

    encoding = "utf-8"

    def __init__(self, error):
        self.error, self.tries = error, 0

    def write(self, text):
        self.tries += 1
        raise self.error

    flush = write


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "EIO"), ValueError("closed file")]
)
def test_a_stream_falls_silent_once(error):
    lost, stream = [], Broken(error)
    lasting = Lasting(stream, "standard output", lambda *what: lost.append(what))
    for _ in range(3):
        print("a line", file=lasting)
    assert lost == [("standard output", error)] and stream.tries == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_cannot_be_encoded_is_a_question_mark(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    lasting = Lasting(stream, "standard output", lambda *_: pytest.fail("lost"))
    text = "0.2 → 0.9 … \ud800"  # a lone surrogate is in no encoding
    assert lasting.write(text) == len(text)
    lasting.flush()
    arrow = "→" if encoding == "utf-8" else "?"
    dots = "?" if encoding == "ascii" else "…"
    assert stream.buffer.getvalue().decode(encoding) == f"0.2 {arrow} 0.9 {dots} ?"


def test_a_terminal_that_cannot_keep_up_is_no_loss():
    stream = Broken(BlockingIOError(11, "again"))
    lasting = Lasting(stream, "standard output", lambda *_: pytest.fail("lost"))
    lasting.write("a")
    lasting.write("b")
    assert stream.tries == 2


def test_an_error_without_a_file_is_one_line(capsys):
    def fails():
        raise OSError(28, "No space left on device")

    assert exit_status("eval.py", fails) == 2
    assert capsys.readouterr().err == "eval.py: No space left on device\n"


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


def test_a_program_keeps_its_own_handler_of_sigusr1():
    received = []
    was = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with Interrupt() as interrupt:
            interrupt.renew()
            signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1] and interrupt.wanted is None
    finally:
        signal.signal(signal.SIGUSR1, was)


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    write_whole(tmp_path / "pipe", b"all of it")
    assert reader.communicate(timeout=30)[0] == b"all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        write_whole(tmp_path, b"x")

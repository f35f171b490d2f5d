"""A run that is killed, stopped by a signal, out of disk space, without a console, or started twice
loses nothing.
"""

import ctypes
import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from small_runs import BY_PLACE, check_often, whole_run
from small_train import SMALL, fails, killed_in

from grpo.distributed import Interrupt
from grpo.run.logs import read_metrics
from grpo.run.resume import locked
from grpo.tools import train
from grpo.trainer import Trainer

KILL = Path(__file__).parents[1] / "tools" / "kill.py"


def killed(*flags):
    result = subprocess.run(
        [sys.executable, str(KILL), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_kills_at_any_instant():
    done = killed("--kills", "10", "--cases", "1")
    assert done["kills"] >= 10


@pytest.fixture(scope="module")
def flags(quick_flags):
    """Flags of a small run in which texts and scores do not matter."""
    return [*SMALL, *quick_flags, "--save-every", "9"]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The run that no signal ends."""
    return whole_run(flags, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 0), (signal.SIGUSR1, 2)])
def test_a_signal_ends_the_run_after_its_step_and_loses_nothing(
    monkeypatch, capfd, flags, whole, number, at
):
    step, before = Trainer.step, signal.getsignal(number)

    def interrupted(self):
        if self.done == at:
            signal.raise_signal(number)
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert train.main([*flags, "--name", "cut"]) == 128 + number
    monkeypatch.setattr(Trainer, "step", step)
    said = capfd.readouterr()
    name = signal.Signals(number).name
    assert f"{name}: finishing and saving what is under way" in said.err
    assert (
        f"{name}: stopped after step {at + 1}, which is saved; continue with --resume runs/cut"
        in said.out
    )
    assert [path.name for path in Path("runs/cut/checkpoints").iterdir()] == [f"step-{at + 1:06d}"]
    assert signal.getsignal(number) is before
    assert train.main(["--resume", "runs/cut", *BY_PLACE]) == 0
    assert_same_run(whole, Path("runs/cut"))


def test_a_library_that_takes_the_signals_over_does_not_keep_them():
    """The compiler of the GPU's kernels does so, and then a second signal can kill the run."""
    with Interrupt() as interrupt:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # it is ignored
        interrupt.renew()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.wanted == signal.SIGTERM


def test_a_second_signal_ends_the_run_at_once(monkeypatch, capsys, flags):
    monkeypatch.setattr("grpo.distributed.SAME", -1.0)

    def twice(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", twice)
    assert train.main([*flags, "--name", "a"]) == 130
    assert (
        capsys.readouterr().err
        == "train.py: stopped immediately; start it again after rm -r runs/a, because it has no "
        "checkpoint yet\n"
    )
    assert not Path("runs/a/checkpoints").exists()


def test_a_run_has_one_writer(capsys, flags):
    resume = ["--resume", "runs/a", *BY_PLACE, "--steps", "2"]
    assert train.main([*flags, "--steps", "1", "--name", "a"]) == 0
    files = [path for path in Path("runs/a").rglob("*") if path.is_file() and path.name != ".lock"]
    before = [path.read_bytes() for path in files]
    with locked(Path("runs/a")):
        capsys.readouterr()
        assert train.main(resume) == 2
        said = "runs/a: another process is training this run; wait, or give another --name"
        assert capsys.readouterr().err == f"train.py: {said}\n"
        assert [path.read_bytes() for path in files] == before
    assert train.main(resume) == 0


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path), locked(tmp_path):
        pass


FORKS = """
import os, sys, time
from pathlib import Path
from grpo.distributed import Interrupt
from grpo.run.resume import locked

with locked(Path(sys.argv[1])), Interrupt():
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_process_that_a_reward_has_forked_is_no_run(tmp_path):
    """It does not hold the lock of a run that was killed, and a SIGTERM ends it at once."""
    house = Path(__file__).resolve().parents[2]
    run = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house)},
    )
    with run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        run.kill()
        run.wait()
        with locked(tmp_path):
            pass

        start = time.monotonic()
        os.kill(child, signal.SIGTERM)
        run.stdout.read()  # until the child has closed its end
        assert time.monotonic() - start < 30


LADDER = "--curriculum 3,4,5,6".split()
ADAPTER = ["--lora-rank", "4", "--beta", "0.1", "--config", "{dynamic_sampling: 2}"]
FLOAT16 = ["--dtype", "float16"]


@pytest.mark.parametrize(
    "tuning",
    [LADDER, *(pytest.param(tuning, marks=pytest.mark.slow) for tuning in (ADAPTER, FLOAT16))],
)
def test_a_run_killed_and_resumed_is_the_run_that_was_not(monkeypatch, flags, tuning):
    """The kill comes after the third step, one after its checkpoint."""
    check_often(monkeypatch)
    flags = [*flags, *tuning, "--save-every", "2"]
    assert train.main([*flags, "--name", "whole"]) == 0

    with killed_in(3, is_saved=True):
        train.main([*flags, "--name", "cut"])
    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # as if the process had died while writing
    assert train.main(["--resume", "runs/cut", *BY_PLACE]) == 0
    assert_same_run(Path("runs/whole"), Path("runs/cut"))
    # By what it saw before the checkpoint of step 2.
    decisions = read_metrics(Path("runs/cut/curriculum.jsonl"))
    assert any(decision["step"] > 2 for decision in decisions) == (tuning is LADDER)


def test_a_disk_without_room_at_the_start_names_the_file_and_keeps_no_folder(capsys, flags):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))  # the bytes of a file
    try:
        line = fails(capsys, *flags, "--name", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == "train.py: runs/a/config.yaml: cannot be written: File too large"
    assert not Path("runs").exists()


def test_a_disk_that_is_full_before_the_first_checkpoint_names_a_way_on(monkeypatch, capsys, flags):
    """`--resume` would be refused."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("grpo.run.logs.open_own", full)
    assert fails(capsys, *flags, "--name", "a").endswith(
        "No space left on device; free some space and start it again after rm -r runs/a, because "
        "it has no checkpoint yet"
    )


# Runs without a console.


@pytest.mark.slow
def test_a_lost_console_does_not_lose_the_run(flags, whole):
    """Its reader leaves after a line."""
    train_py = Path(__file__).resolve().parents[2] / "train.py"
    command = shlex.join([sys.executable, str(train_py), *flags, "--name", "lost"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        # What is printed into a pipe is buffered, as for most users.
        env={**os.environ, "PYTHONPATH": str(train_py.parent), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_run(whole, Path("runs/lost"))


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

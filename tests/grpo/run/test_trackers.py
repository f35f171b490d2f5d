"""Figures go to the trackers asked for; one that fails is left out, and nothing else changes."""

import sys
import time
from pathlib import Path

import pytest
from small_runs import BY_PLACE
from small_train import fails

from grpo.data.errors import UserError
from grpo.run import trackers
from grpo.run.logs import read_metrics
from grpo.run.trackers import Tracker, check_installed, scalars
from grpo.tools import train

FLAGS = (
    "--words 10 --steps 2 --prompts 2 --group-size 2 --preflight off --device cpu "
    "--config {'eval_problems':2}"
).split()


class Spy:
    """A tracker that notes what it gets, and fails at the call named `at`."""

    made: list = []
    at = ""

    def __init__(self, folder, config, done):
        Spy.made.append(self)
        self.got, self.about, self.finished = [], (folder.name, config["level"], done), False
        self._fail("begin")

    def log(self, step, numbers):
        self._fail("log")
        self.got.append((step, numbers))

    def finish(self):
        self._fail("finish")
        self.finished = True

    def _fail(self, name):
        if Spy.at == name:
            raise RuntimeError("no\x1b network\nat all")


@pytest.fixture
def spied(monkeypatch):
    monkeypatch.setattr(trackers, "CLASSES", {"spy": Spy, "other": Spy})
    for name in ("spy", "other"):
        monkeypatch.setitem(sys.modules, name, sys)
    monkeypatch.setattr("grpo.config.TRACKERS", ("spy", "other"))
    monkeypatch.setattr(Spy, "made", [])
    return monkeypatch


def test_scalars_are_the_numbers_of_a_line():
    line = {"step": 3, "time": "now", "level": 10, "reward": 0.5, "kl": None, "odd": True}
    assert scalars(line | {"groups/hist": {"0": 1}}) == {"level": 10, "reward": 0.5}
    line = {"step": 3, "purpose": "report", "level": 25, "mean": 0.9, "split": "x"}
    assert scalars(line) == {"report/25/mean": 0.9}


def test_a_run_sends_what_it_writes(tmp_path, monkeypatch, spied, quick_flags):
    monkeypatch.chdir(tmp_path)
    assert train.main([*FLAGS, *quick_flags, "--name", "r", "--track", "spy,other"]) == 0
    one, two = Spy.made
    assert one.about == ("r", 10, 0) and one.finished and one.got == two.got
    lines = read_metrics(tmp_path / "runs/r/metrics.jsonl")
    sent = [(step, numbers) for step, numbers in one.got if "reward" in numbers]
    assert sent == [(line["step"], scalars(line)) for line in lines]
    assert [step for step, numbers in one.got if "report/10/mean" in numbers] == [0, 2]

    resume = ["--resume", "runs/r", *BY_PLACE, "--steps", "3", "--track", "spy"]
    assert train.main(resume) == 0
    again = Spy.made[2]
    assert again.about == ("r", 10, 2)
    assert [step for step, numbers in again.got if "reward" in numbers] == [3]


@pytest.mark.parametrize("at", ["begin", "log"])
def test_a_failing_tracker_is_named_once_and_is_not_used_again(tmp_path, monkeypatch, spied, at):
    monkeypatch.setattr(Spy, "at", at)
    told = []
    tracker = Tracker("spy", tmp_path, {"level": 1}, 0, told.append)
    for step in (1, 2):
        tracker.send({"step": step, "reward": 0.5})
    tracker.finish()
    assert told == ["--track spy failed and is no longer used: RuntimeError: no\x1b network"]
    assert not Spy.made[0].finished


def test_the_warning_of_a_tracker_that_cannot_begin_is_stored(
    tmp_path, monkeypatch, spied, quick_flags
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Spy, "at", "begin")
    assert train.main([*FLAGS, *quick_flags, "--name", "r", "--track", "spy"]) == 0
    assert "--track spy failed and is no" in (tmp_path / "runs/r/warnings.log").read_text()


def test_a_missing_package_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--track wandb: wandb is not installed; pip install"):
        check_installed("wandb")
    monkeypatch.chdir(tmp_path)
    assert "wandb" in fails(capsys, *FLAGS, "--track", "wandb") and not Path("runs").exists()


def send(name, folder, config):
    """Send two steps and an evaluation to a real tracker; nothing may fail."""
    told = []
    tracker = Tracker(name, folder, config, 0, told.append)
    for step in (1, 2):
        tracker.send({"step": step, "reward": step / 4})
    tracker.send({"step": 2, "purpose": "report", "level": 3, "mean": 0.9})
    tracker.finish()
    assert not told


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_it_all(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send("tensorboard", tmp_path, {"level": 3, "seed": 7, "curriculum": None})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    (mean,) = events.Scalars("report/3/mean")
    assert mean.step == 2 and mean.value == pytest.approx(0.9)
    (told,) = events.Tensors("settings/text_summary")
    assert b"seed: 7" in told.tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    send("wandb", tmp_path, {"level": 3})
    (stored,) = (tmp_path / "wandb").rglob("*.wandb")
    patience = time.monotonic() + 20  # another process writes the file
    while b"report/3/mean" not in stored.read_bytes():
        assert time.monotonic() < patience
        time.sleep(0.1)

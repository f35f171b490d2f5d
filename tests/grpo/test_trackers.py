"""Figures go to the trackers asked for; one that fails is left out, and nothing else changes."""

import sys

import pytest
from small_runs import BY_PLACE

from grpo.choices import TRACKERS
from grpo.config import Config
from grpo.run import trackers
from grpo.run.logs import read_metrics
from grpo.run.trackers import CLASSES, Trackers, check_installed, scalars
from grpo.tools import train
from tasks.base import UserError

FLAGS = [
    "--words",
    "10",
    "--steps",
    "2",
    "--prompts",
    "2",
    "--group-size",
    "2",
    "--preflight",
    "off",
    "--eval-problems",
    "2",
    "--device",
    "cpu",
]


class Spy:
    """A tracker that notes what it gets, and fails at the call named `at`."""

    made: list = []
    at = ""

    def __init__(self, folder, config, done):
        Spy.made.append(self)
        self.got, self.about, self.finished = [], (folder.name, config["level"], done), False
        self._fail("begin")

    def log(self, figures, step):
        self._fail("log")
        self.got.append((step, figures))

    def finish(self):
        self._fail("finish")
        self.finished = True

    def _fail(self, name):
        if Spy.at == name:
            raise RuntimeError("no\x1b network\nat all")


@pytest.fixture
def spied(monkeypatch):
    monkeypatch.setattr(trackers, "CLASSES", {"spy": ("json", Spy), "other": ("json", Spy)})
    monkeypatch.setattr("grpo.config.TRACKERS", ("spy", "other"))
    monkeypatch.setattr(Spy, "made", [])
    return monkeypatch


def test_scalars_are_the_numbers_of_a_line():
    assert scalars(
        {
            "step": 3,
            "time": "now",
            "level": 10,
            "reward": 0.5,
            "groups/hist": {"0": 1},
            "kl": None,
            "odd": True,
        }
    ) == {"level": 10, "reward": 0.5}
    assert scalars({"step": 3, "purpose": "report", "level": 25, "mean": 0.9, "split": "x"}) == {
        "report/25/mean": 0.9
    }


def test_a_run_sends_what_it_writes(tmp_path, monkeypatch, spied, quick_flags):
    monkeypatch.chdir(tmp_path)
    assert train.main([*FLAGS, *quick_flags, "--name", "r", "--track", "spy,other"]) == 0
    one, two = Spy.made
    assert one.about == ("r", 10, 0) and one.finished and one.got == two.got
    lines = read_metrics(tmp_path / "runs/r/metrics.jsonl")
    assert [(step, figures) for step, figures in one.got if "reward" in figures] == [
        (line["step"], scalars(line)) for line in lines
    ]
    assert [step for step, figures in one.got if "report/10/mean" in figures] == [0, 2]
    resume = ["--resume", "runs/r", *BY_PLACE]
    assert train.main([*resume, "--steps", "3", "--track", "spy"]) == 0
    assert Spy.made[2].about == ("r", 10, 2) and [
        step for step, figures in Spy.made[2].got if "reward" in figures
    ] == [3]


@pytest.mark.parametrize("at", ["begin", "log", "finish"])
def test_a_failing_tracker_is_named_once_and_stops_nothing(
    tmp_path, monkeypatch, spied, at, capsys, quick_flags
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Spy, "at", at)
    assert train.main([*FLAGS, *quick_flags, "--name", "r", "--track", "spy"]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count(
        "--track spy failed and is no longer used: RuntimeError: no"
    ) == 1 and "\x1b" not in said.out + said.err
    assert len(read_metrics(tmp_path / "runs/r/metrics.jsonl")) == 2 and not Spy.made[0].finished


def test_one_that_fails_does_not_take_the_other_along(tmp_path, spied):
    told = []
    both = Trackers("spy,other", tmp_path, {"level": 1}, 0, told.append)
    Spy.made[0].log = lambda *_: 1 / 0
    for step in (1, 2):
        both.log({"step": step, "reward": 0.5})
    assert (
        len(told) == 1
        and "ZeroDivisionError" in told[0]
        and [step for step, _ in Spy.made[1].got] == [1, 2]
    )


def test_wrong_names_and_missing_packages_are_said(tmp_path, monkeypatch, capsys):
    with pytest.raises(
        UserError, match="--track wandb,excel: give one of tensorboard, wandb, trackio"
    ):
        Config(track="wandb,excel")
    assert set(CLASSES) == set(TRACKERS)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed: pip install wandb"):
        check_installed("wandb")
    monkeypatch.chdir(tmp_path)
    assert train.main([*FLAGS, "--track", "wandb"]) == 2 and not (tmp_path / "runs").exists()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = []
    tracker = Trackers("tensorboard", tmp_path, {}, 0, told.append)
    for step in (1, 2):
        tracker.log({"step": step, "reward": step / 4})
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, 0.25),
        (2, 0.5),
    ] and not told


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = []
    tracker = Trackers("wandb", tmp_path, {"level": 3}, 0, told.append)
    tracker.log({"step": 1, "reward": 0.25})
    tracker.finish()
    (stored,) = (tmp_path / "wandb").rglob("*.wandb")
    assert not told and b"reward" in stored.read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    told = []
    tracker = Trackers("trackio", tmp_path / "r", {"level": 3}, 0, told.append)
    tracker.log({"step": 1, "reward": 0.25})
    tracker.finish()
    assert not told

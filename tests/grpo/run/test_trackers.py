"""Figures go to the trackers asked for; one that fails is left out, and nothing else changes."""

import html
import re
import sys
import time

import pytest
from small_runs import BY_PLACE

from data.errors import UserError
from grpo.config import TRACKERS, Config
from grpo.records import Completion, Group, StepReport
from grpo.run import trackers
from grpo.run.logs import load_run, read_metrics
from grpo.run.trackers import (
    CLASSES,
    COLUMNS,
    SAMPLES,
    Trackers,
    check_installed,
    histograms,
    markdown,
    samples,
    scalars,
)
from grpo.tools import train
from tasks.base import Problem, Score

FLAGS = (
    "--words 10 --steps 2 --prompts 2 --group-size 2 --preflight off --eval-problems 2 --device cpu"
).split()


class Spy:
    """A tracker that notes what it gets, and fails at the call named `at`."""

    made: list = []
    at = ""

    def __init__(self, folder, config, done):
        Spy.made.append(self)
        self.got, self.about, self.finished = [], (folder.name, config["level"], done), False
        self._fail("begin")

    def log(self, step, scalars, histograms, rows):
        self._fail("log")
        self.got.append((step, scalars, histograms, rows))

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
    steps = [sent for sent in one.got if "reward" in sent[1]]
    lines = read_metrics(tmp_path / "runs/r/metrics.jsonl")
    assert [(step, numbers) for step, numbers, *_ in steps] == [
        (line["step"], scalars(line)) for line in lines
    ]
    assert [sent[0] for sent in one.got if "report/10/mean" in sent[1]] == [0, 2]

    run = load_run("runs/r")
    for step, _, values, rows in steps:
        stored = run.rollouts(step)
        assert values["histograms/rewards"] == [row["reward"] for row in stored]
        assert values["histograms/lengths"] == [row["num_tokens"] for row in stored]
        assert bool(rows) == (step == 1)  # as in samples.log
    assert [row[2] for row in steps[0][3]] == [
        row["text"] for row in sorted(run.rollouts(1), key=lambda row: row["reward"])
    ]
    resume = ["--resume", "runs/r", *BY_PLACE]
    assert train.main([*resume, "--steps", "3", "--track", "spy"]) == 0
    again = Spy.made[2]
    assert again.about == ("r", 10, 2) and [s for s, sent, *_ in again.got if "reward" in sent] == [
        3
    ]


@pytest.mark.parametrize("at", ["begin", "log", "finish"])
def test_a_failing_tracker_is_named_once_and_is_not_used_again(tmp_path, monkeypatch, spied, at):
    monkeypatch.setattr(Spy, "at", at)
    told = []
    tracker = Trackers("spy", tmp_path, {"level": 1}, 0, told.append)
    for step in (1, 2):
        tracker.evaluated({"step": step, "reward": 0.5})
    tracker.finish()
    assert told == ["--track spy failed and is no longer used: RuntimeError: no\x1b network"]
    assert not Spy.made[0].finished


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


def group(rewards, advantages, texts=None):
    texts = texts or [f"answer {number}" for number in range(len(rewards))]
    return Group(
        index=0,
        problem=Problem("t", 3, "say <b>it</b>", "it", "k", {}),
        prompt=(1,),
        temperature=1.0,
        completions=[
            Completion((1,) * (number + 1), (-0.1,) * (number + 1), text, "stop")
            for number, text in enumerate(texts)
        ],
        scores=[Score(reward, {}) for reward in rewards],
        advantages=advantages,
    )


def report(step, *groups):
    return StepReport(step, {"step": step, "reward": step / 4}, list(groups))


def test_histograms_are_of_all_completions():
    groups = [group([0.5, 1.0], [-1.0, 1.0]), group([0.2], [[0.5, -0.5]]), group([0.0], [])]
    assert histograms(groups) == {
        "histograms/rewards": [0.5, 1.0, 0.2, 0.0],
        "histograms/advantages": [-1.0, 1.0, 0.5, -0.5],
        "histograms/lengths": [1, 2, 1, 1],
    }
    assert "histograms/advantages" not in histograms([group([0.0], [])])
    assert histograms([group([0.5, float("nan")], [])])["histograms/rewards"] == [0.5]


@pytest.mark.parametrize("count", [1, 2, SAMPLES, SAMPLES + 1, 100])
def test_samples_reach_from_the_lowest_to_the_highest_reward(count):
    rewards = [(number * 7 % count) / count for number in range(count)]
    table = samples([group(rewards, list(rewards))])
    shown = [row[COLUMNS.index("reward")] for row in table]
    assert len(shown) == min(count, SAMPLES) and shown == sorted(shown)
    assert (shown[0], shown[-1]) == (min(rewards), max(rewards)) or count == 1
    for row in table:
        number = rewards.index(row[COLUMNS.index("reward")])
        assert row[COLUMNS.index("completion")] == f"answer {number}"
        assert row[COLUMNS.index("advantage")] == rewards[number]


def test_the_advantage_of_a_sample_with_one_for_each_token_is_their_mean():
    (row,) = samples([group([1.0], [[1.0, 0.0]])])
    assert row == (3, "say <b>it</b>", "answer 0", "it", 1.0, 0.5, "stop")
    (row,) = samples([group([1.0], [])])
    assert row[COLUMNS.index("advantage")] is None


def test_no_text_of_a_model_is_markdown():
    text = "| a | <script> [x](http://y) **b** \x1b[31m\n# title"
    shown = markdown(samples([group([1.0], [0.0], [text])]))
    assert shown.count("\n") == 2 and not set("<>[]()*#\x1b") & set(re.sub(r"&#\d+;", "", shown))
    assert all(line.count("|") == len(COLUMNS) + 1 for line in shown.splitlines())
    assert html.unescape(shown.splitlines()[2]).count("<script>") == 1


def send(name, folder, config):
    """Send two steps and an evaluation to a real tracker; nothing may fail."""
    told = []
    tracker = Trackers(name, folder, config, 0, told.append)
    for step in (1, 2):
        tracker.step(report(step, group([0.0, 1.0], [-1.0, 1.0])), with_samples=True)
    tracker.evaluated({"step": 2, "purpose": "report", "level": 3, "mean": 0.9})
    tracker.finish()
    assert not told


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_it_all(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        DEFAULT_SIZE_GUIDANCE,
        EventAccumulator,
    )

    settings = {"level": 3, "seed": 7, "curriculum": None}
    send("tensorboard", tmp_path, settings)
    everything = dict.fromkeys(DEFAULT_SIZE_GUIDANCE, 0)
    events = EventAccumulator(str(tmp_path / "tensorboard"), everything)
    events.Reload()

    def scalars_of(name):
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert scalars_of("reward") == [(1, 0.25), (2, 0.5)]
    assert scalars_of("report/3/mean") == [(2, pytest.approx(0.9))]
    for step, histogram in enumerate(events.Histograms("histograms/rewards"), start=1):
        value = histogram.histogram_value
        assert (histogram.step, value.num, value.min, value.max) == (step, 2, 0, 1)

    texts = events.Tensors("samples/text_summary")
    assert [event.step for event in texts] == [1, 2]
    assert b"answer 1" in texts[0].tensor_proto.string_val[0]

    (told,) = events.Tensors("settings/text_summary")
    assert b"seed: 7" in told.tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    send("wandb", tmp_path, {"level": 3})
    (stored,) = (tmp_path / "wandb").rglob("*.wandb")
    wanted = (b"reward", b"histograms/lengths", b"table-file")
    patience = time.monotonic() + 20  # another process writes the file
    while not all(name in stored.read_bytes() for name in wanted):
        assert time.monotonic() < patience
        time.sleep(0.1)
    (table, *_) = (tmp_path / "wandb").rglob("*.table.json")
    assert "answer 1" in table.read_text()


@pytest.mark.filterwarnings("ignore")
def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    send("trackio", tmp_path / "r", {"level": 3})

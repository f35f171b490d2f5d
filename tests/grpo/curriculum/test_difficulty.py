"""Training on problems of middling difficulty: what is measured, kept, stored and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from compare_runs import assert_same_run
from hypothesis import given
from hypothesis import strategies as st

from data.errors import UserError
from grpo import load_run, make_trainer, train
from grpo.config import Config
from grpo.curriculum import difficulty
from grpo.curriculum.difficulty import measure_difficulty, outcome_of
from grpo.curriculum.survey import SurveySettings, SurveySubject
from grpo.evaluate import Sampling
from grpo.tools.train import main
from grpo.variance import ClassRule
from tasks.base import Problem, Score
from tasks.supply import Supply

# The kind of a row decides what its completions earn.
OWN = """
def reward(prompt, completion, kind, **row):
    if kind == "middling":
        return sum(map(ord, completion)) % 2
    return float(kind == "easy")
"""
KINDS = ("easy", "middling", "hard", "middling")
WORDS = "owl tide salt moss bell rope loom kiln".split()
ROWS = [
    {"prompt": f"Copy text A.\nA: {a} {b}", "kind": KINDS[(i + j) % 4], "split": "train"}
    for i, a in enumerate(WORDS)
    for j, b in enumerate(WORDS)
] + [
    {"prompt": f"Copy text A.\nA: {word}", "kind": "middling", "split": "validation"}
    for word in WORDS
]
SMALL = dict(steps=4, prompts=3, group_size=4, max_new_tokens=8, eval_problems=4, warmup=0)
MORE = dict(save_every=1, keep_difficulty=[0.2, 0.8])


@pytest.fixture
def quick(tiny_model):
    """Settings of a short run of the tiny model, whose completions are all different."""
    return SMALL | {"model": str(tiny_model), "lora_rank": 0}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("own.py").write_text(OWN)
    return tmp_path


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_every_score_has_one_outcome_and_the_limits_are_kept(score, one, other):
    low, high = sorted((one, other))
    outcome = outcome_of(score, [low, high])
    assert (outcome == "kept") == (low <= score <= high)
    assert (outcome == "too hard") == (score < low) and (outcome == "too easy") == (score > high)
    assert outcome_of(low, [low, high]) == outcome_of(high, [low, high]) == "kept"


class ByKey:
    """Scores by the problem alone; "long" does not fit the model."""

    name, rewards, default_level = "by key", (), 1

    def __init__(self):
        self.scored = []

    def score(self, problem, completions):
        self.scored.append(problem.key)
        return [Score(int(problem.key) / 8) for _ in completions]


def test_every_problem_is_measured_once_in_its_order(tiny_policy, monkeypatch):
    monkeypatch.setattr(difficulty, "BATCH", 3)
    problems = [Problem("by key", 1, f"p {key}", "x", str(key)) for key in (8, 5, 0, 5, 2)]
    problems.append(Problem("by key", 1, "long", "x " * 2000, "7"))
    task, told = ByKey(), []
    found = measure_difficulty(
        SurveySubject(
            tiny_policy,
            Supply(task, seed=0, dataset=problems),
            SurveySettings(Sampling(), 3, ClassRule()),
        ),
        [0.25, 0.75],
        lambda done, total: told.append((done, total)),
    )
    assert [(each.key, each.score, each.outcome) for each in found] == [
        ("8", 1.0, "too easy"),
        ("5", 0.625, "kept"),
        ("0", 0.0, "too hard"),
        ("2", 0.25, "kept"),
        ("7", None, "too long"),
    ]
    assert told == [(3, 4), (4, 4)] and task.scored == ["8", "5", "0", "2"]


def test_a_supply_keeps_some_of_its_problems():
    problems = [Problem("t", level, "p", "x", f"{level}{i}") for level in (1, 2) for i in range(5)]
    supply = Supply(ByKey(), seed=0, dataset=problems)
    supply.keep({"11", "13"})
    assert {supply.at(index, 1).key for index in range(2)} == {"11", "13"}
    assert supply.levels == [1] and len(supply.problems) == 2
    assert {problem.key for problem in supply.sample(1, 0)} == {"11", "13"}


def test_a_run_trains_on_what_lies_in_the_range_and_stores_why(home, quick, capsys):
    run = train("rows.jsonl", "own.py:reward", name="a", **quick, **MORE)
    assert len(run.difficulty) == 64 == len(ROWS) - 8
    outcomes = {line["key"]: line["outcome"] for line in run.difficulty}
    assert {line["score"] for line in run.difficulty} <= {0, 0.25, 0.5, 0.75, 1}
    for line in run.difficulty:
        assert (line["outcome"] == "kept") == (0.2 <= line["score"] <= 0.8)

    trained = {row["key"]: row["prompt"] for row in run.rollouts()}
    assert len(trained) > 3 and {outcomes[key] for key in trained} == {"kept"}
    surveyed = {row["key"] for row in run.rollouts(kind="preflight")}
    assert {outcomes[key] for key in surveyed} == {"kept"}
    first = run.rollouts(1)[0]["prompt"]
    assert first.splitlines()[-1] in Path("runs/a/prompt.txt").read_text()  # of a kept problem

    said = capsys.readouterr().out
    kept, hard, easy = (
        list(outcomes.values()).count(name) for name in ("kept", "too hard", "too easy")
    )
    assert kept > 10 and hard >= 16 and easy >= 16
    assert "difficulty: 64 problems, 4 completions each" in said
    assert (
        f"kept {kept} of 64 problems, with a mean score from 0.2 to 0.8; left out: {hard} too "
        f"hard, {easy} too easy (runs/a/difficulty.jsonl)"
    ) in said


def test_the_measured_completions_are_no_others(home, quick):
    """Neither the pre-flight nor a step sees the samples by which its problems were selected."""
    scored = []

    def reward(completion, **row):
        scored.append(completion)
        return len(completion) % 2

    options = quick | MORE | {"keep_difficulty": [0, 1]}
    run = train(ROWS, reward, name="a", reward_workers=1, **options)
    measured = set(scored[: 64 * 4])
    assert len(measured) > 250
    for kind in ("preflight", "step"):
        assert not measured & {row["text"] for row in run.rollouts(kind=kind)}


def test_a_killed_run_resumes_with_the_stored_decision(home, quick):
    """SIGKILL after the third step; nothing is measured again."""
    script = """
import os, signal
from grpo import train
def kill(report):
    if report.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
train("rows.jsonl", "own.py:reward", name="cut", callbacks=[kill], **{options!r})
"""
    options = {**quick, **MORE}
    path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script.replace("{options!r}", repr(options))],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    stored = Path("runs/cut/difficulty.jsonl").read_bytes()
    train("rows.jsonl", "own.py:reward", name="whole", **options)
    train("rows.jsonl", "own.py:reward", resume="runs/cut")
    assert Path("runs/cut/difficulty.jsonl").read_bytes() == stored
    assert Path("runs/whole/difficulty.jsonl").read_bytes() == stored
    assert_same_run(Path("runs/whole"), Path("runs/cut"))


def test_a_resumed_run_needs_what_it_has_stored(home, quick):
    train("rows.jsonl", "own.py:reward", name="a", **quick | {"steps": 1}, **MORE)
    path = Path("runs/a/difficulty.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    for damaged, message in (
        (lines[1:], "does not have the problems of the run"),
        ([lines[0].replace("kept", "k").replace("too", "t"), *lines[1:]], "difficulty.jsonl, line"),
        (None, "does not have the problems of the run"),
    ):
        path.write_text("".join(damaged)) if damaged else path.unlink()
        with pytest.raises(UserError, match=message) as caught:
            train("rows.jsonl", "own.py:reward", resume="runs/a", steps=2)
        assert "\n" not in str(caught.value)
    path.write_text("".join(lines))
    assert len(train("rows.jsonl", "own.py:reward", resume="runs/a", steps=2).metrics) == 2


def test_a_range_in_which_nothing_lies(home, quick):
    with pytest.raises(UserError) as caught:
        train(
            [row for row in ROWS if row["kind"] != "middling" or row["split"] != "train"],
            lambda completion, kind, **row: float(kind == "easy"),
            name="a",
            **quick,
            **MORE,
        )
    assert str(caught.value) == (
        "--config: keep_difficulty [0.2, 0.8]: no problem of level 1 is left (16 too hard, 16 too "
        "easy); give a wider range"
    )
    assert len(load_run("runs/a").difficulty) == 32  # to see why


def test_what_may_be_asked_for(home, quick, capsys):
    for bad in ([0.8, 0.2], [0.2], [0.2, 2], ["a", "b"], []):
        with pytest.raises(UserError, match="^--config: keep_difficulty .*: give the lowest and"):
            Config(keep_difficulty=bad)
    assert Config(keep_difficulty=[0, 1]).keep_difficulty == [0, 1]
    with pytest.raises(UserError, match="task interleave makes new problems without end"):
        train(task="interleave", level=2, keep_difficulty=True, **quick)
    with pytest.raises(UserError, match="keep_difficulty is 3, and should be list"):
        train(task="interleave", level=2, keep_difficulty=3, **quick)
    with pytest.raises(UserError, match="keep_difficulty applies only to runs"):
        make_trainer(ROWS, lambda completion: 1.0, keep_difficulty=True)

    flags = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--steps", "1"]
    config = ["--config", "{keep_difficulty: true, group_size: 4, prompts: 2, max_new_tokens: 8}"]
    model = ["--model", quick["model"], "--lora-rank", "0", "--eval-problems", "4"]
    assert main([*flags, *model, *config, "--name", "a"]) in (0, 3)
    assert load_run("runs/a").config["keep_difficulty"] == [0.2, 0.8]
    assert fmean(line["outcome"] == "kept" for line in load_run("runs/a").difficulty) > 0.3
    assert "problems  the 64 training problems of the data, of which" in capsys.readouterr().out

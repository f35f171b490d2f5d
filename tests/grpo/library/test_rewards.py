"""Rewards and losses of one's own: slow, failing, and from files."""

import json
import re
import time
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from small_library import FLAGS, OWN, QUICK, ROWS, reward

from data.errors import UserError
from grpo import load_run, train
from grpo.show.console import Console
from grpo.tools import inspect
from grpo.tools.evaluation import program as evaluation
from grpo.tools.train import main
from tasks import audit

SMALL_TASK = ["--task", "interleave", "--words", "3", "--max-new-tokens", "64"]


def test_the_number_of_threads_is_checked():
    for wrong in ("0", "x", "processes:4", "1.5"):
        with pytest.raises(UserError, match=f"--reward-workers {wrong}: give a number of threads"):
            train(ROWS, reward, reward_workers=wrong, **QUICK)


def test_slow_rewards_say_how_far_they_are(home, monkeypatch, capsys):
    # Nothing here depends on how fast the machine is: each look is told and printed, the console's
    # clock stands still, and the rewards of step 1 wait until one of them has been told as done.
    monkeypatch.setattr("tasks.rewards.LOOK", 0.0)
    monkeypatch.setattr("grpo.show.console.FIRST", 0.0)
    monkeypatch.setattr("grpo.show.console.EVERY", 0.0)
    clock = SimpleNamespace(monotonic=lambda: 0.0, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr("grpo.show.console.time", clock)
    scoring, is_told, number = Console.scoring, Event(), count()

    def watched(self, done, total, seconds):
        scoring(self, done, total, seconds)
        if total == 8 and done:
            is_told.set()

    def slow(completion):
        before_and_first = QUICK["eval_problems"] + 1
        assert next(number) < before_and_first or is_told.wait(60)
        return len(completion) % 2

    monkeypatch.setattr(Console, "scoring", watched)
    train(ROWS, slow, reward_workers=2, name="a", **QUICK)
    assert re.search(r"step 1.*: scoring [1-7]/8, 0 s", capsys.readouterr().out)


RANKS = """
def guarded(completions, **row):
    return [(place + 1) / len(completions) for place in places(completions)]


def places(completions):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [order.index(i) for i in range(len(completions))]
"""


@pytest.mark.slow
def test_rewards_that_compare_completions_see_whole_groups_in_evaluations(home, capsys):
    Path("ranks.py").write_text(RANKS)
    run = train("rows.jsonl", "ranks.py:guarded", name="a", **QUICK | {"steps": 1})
    assert [(line["n"], line["mean"]) for line in run.evals] == [(4, 0.625)] * 2
    assert "every group of the evaluation has the mean score 0.625, so the reward only ranks" in (
        capsys.readouterr().out
    )

    command = ["--model", "runs/a", "--reward-file", "ranks.py:guarded", "--problems", "2"]
    assert evaluation.main([*command, "--json", "a.json"]) == 0
    (result,) = json.loads(Path("a.json").read_text())
    assert (result["n"], result["samples"], result["mean"]) == (2, 4, 0.625)

    capsys.readouterr()
    assert evaluation.main([*command, "--samples", "1"]) == 2
    assert "--samples 1: the reward may compare the completions of a group; give" in one_line(
        capsys
    )


@pytest.mark.slow
def test_the_reward_file_of_a_run_is_not_executed_unless_it_is_named(home, capsys):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    assert main([*command, *FLAGS, "--steps", "1", "--name", "a"]) in (0, 3)
    Path("own.py").write_text("raise SystemExit('executed')")
    capsys.readouterr()
    for program, arguments in (
        (main, ["--resume", "runs/a"]),
        (evaluation.main, ["--model", "runs/a"]),
        (audit.main, ["runs/a"]),
        (inspect.main, ["runs/a", "replay", "1"]),
    ):
        assert program(arguments) == 2
        error = capsys.readouterr().err
        assert "if you trust it, give --reward-file own.py:reward" in error, error
        assert error.count("\n") == 1

    Path("own.py").write_text(OWN)
    named = ["--reward-file", "own.py:reward"]
    assert evaluation.main(["--model", "runs/a", *named, "--problems", "2"]) == 0
    assert audit.main(["runs/a", *named]) == 0
    assert inspect.main(["runs/a", "replay", "1", *named]) == 0
    assert main(["--resume", "runs/a", *named, "--steps", "2"]) in (0, 3)

    # The file by another name, and an option that decides no result.
    slower = ["--reward-file", "./own.py:reward", "--reward-timeout", "99", "--steps", "3"]
    assert main(["--resume", "runs/a", *slower]) in (0, 3)
    assert main(["--resume", "runs/a", *named, "--reward-range", "0,2"]) == 2
    assert "--reward-range 0,2: the run in runs/a has 0,1.2" in capsys.readouterr().err

    Path("own.py").write_text(OWN + "# changed\n")
    capsys.readouterr()
    assert main(["--resume", "runs/a", *named, "--steps", "4"]) == 2
    assert "task: own.py" in capsys.readouterr().err


OWN_LOSS = """
def loss(inputs, settings):
    ratio_RT = (inputs.logp_RT - inputs.old_RT).exp()
    clipped_RT = ratio_RT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantages_RT = inputs.advantages
    return -(ratio_RT * advantages_RT).minimum(clipped_RT * advantages_RT)
"""


@pytest.mark.slow
def test_a_loss_of_ones_own_trains_and_its_file_is_executed_only_if_it_is_named(home, capsys):
    Path("mine.py").write_text(OWN_LOSS)
    own = ["--loss", "mine.py:loss"]
    assert main([*FLAGS, *SMALL_TASK, *own, "--steps", "1", "--name", "own"]) in (0, 3)
    assert "loss" in load_run("runs/own").metrics[0]

    Path("mine.py").write_text("raise SystemExit('executed')")
    capsys.readouterr()
    for program, arguments in (
        (main, ["--resume", "runs/own"]),
        (inspect.main, ["runs/own", "replay", "1"]),
    ):
        assert program(arguments) == 2
        assert one_line(capsys).endswith("if you trust it, give --loss mine.py:loss as well\n")
    assert evaluation.main(["--model", "runs/own", "--problems", "2"]) == 0  # needs no loss

    capsys.readouterr()
    assert main(["--resume", "runs/own", *own, "--steps", "2"]) == 2
    assert "executed" in one_line(capsys)
    Path("mine.py").write_text(OWN_LOSS + "# changed\n")
    assert main(["--resume", "runs/own", *own, "--steps", "2"]) == 2
    assert "changed since it was saved: loss: mine.py" in one_line(capsys)
    Path("mine.py").write_text(OWN_LOSS)
    assert inspect.main(["runs/own", "replay", "1", *own]) == 0
    assert main(["--resume", "runs/own", *own, "--steps", "2"]) in (0, 3)


def test_a_wrong_loss_is_one_line(home, capsys):
    Path("mine.py").write_text("def loss(inputs, settings):\n    raise ValueError('no')\n")
    assert main([*FLAGS, *SMALL_TASK, "--loss", "mine.py:loss", "--steps", "2"]) == 2
    assert "--loss mine.py:loss raised ValueError: no" in one_line(capsys)


def test_a_loss_may_be_a_function_in_python(home, capsys):
    def loss(inputs, settings):
        return -(inputs.logp_RT - inputs.old_RT).exp() * inputs.advantages

    options = dict(task="interleave", level=3, **QUICK | {"max_new_tokens": 64})
    run = train(**options, loss=loss, name="a")
    assert run.config["loss"] == "python:loss" and len(run.metrics) == 2
    assert len(train(resume="runs/a", loss=loss, steps=3).metrics) == 3
    capsys.readouterr()
    assert main(["--resume", "runs/a", "--steps", "4"]) == 2
    assert "give it again, as grpo.train(loss=FUNCTION)" in one_line(capsys)
    with pytest.raises(UserError, match="^--loss mse: give one of grpo, .* or path/to/file.py:"):
        train(**options, loss="mse")


@pytest.mark.slow
def test_functions_in_python_are_compared_on_resume(home):
    def loss(inputs, settings):
        return -(inputs.logp_RT - inputs.old_RT).exp() * inputs.advantages

    other_loss = lambda inputs, settings: 2 * loss(inputs, settings)  # noqa: E731
    other_loss.__name__ = "loss"
    options = dict(reward_range=(0, 1.2))
    train(ROWS, reward, loss=loss, name="a", **options, **QUICK | {"steps": 1})
    again = dict(resume="runs/a", steps=2, **options)
    changed = lambda completion, **row: 0.5  # noqa: E731
    for given, own_loss, kind, names in (
        (changed, loss, "task", "python:<lambda> absent → .*, python:reward .* → absent"),
        (reward, other_loss, "loss", "python:loss .* → .*"),
    ):
        line = f"changed since it was saved: {kind}: {names}; undo"
        with pytest.raises(UserError, match=line):
            train(ROWS, given, loss=own_loss, **again)
    assert len(train(ROWS, reward, loss=loss, **again).metrics) == 2


def one_line(capsys):
    """Return the standard error of a program, which is one line."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_reward_that_fails_ends_the_run_with_one_line_and_loses_nothing(home):
    calls = []

    def fails(completion, answer, **row):
        calls.append(completion)
        if len(calls) > 40:
            raise ValueError("the judge is gone")
        return len(calls) % 2

    with pytest.raises(UserError) as caught:
        train(ROWS, fails, name="a", **QUICK | {"steps": 20, "save_every": 1})
    place, _, said = str(caught.value).partition(" raised ")
    assert re.fullmatch(r"reward fails, data \(list\), row \d+, completion \d", place)
    assert said.startswith("ValueError: the judge is gone")
    done = len(load_run("runs/a").metrics)
    assert done > 0
    assert list(Path("runs/a/checkpoints").iterdir())

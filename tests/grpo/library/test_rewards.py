"""Rewards and losses of one's own in whole runs; their parts are tested beside them."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from small_library import FLAGS, OWN, QUICK
from small_train import fails

from grpo import inspect, load_run, train
from grpo.data.errors import UserError
from grpo.tasks import audit
from grpo.tools import evaluation
from grpo.tools.train import main

pytestmark = pytest.mark.slow

SMALL_TASK = ["--task", "interleave", "--words", "3", "--max-new-tokens", "64"]


RANKS = """
def guarded(completions, **row):
    return [(place + 1) / len(completions) for place in places(completions)]


def places(completions):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [order.index(i) for i in range(len(completions))]
"""


def test_rewards_that_compare_completions_see_whole_groups_in_evaluations(home, capsys):
    Path("ranks.py").write_text(RANKS)
    run = train("rows.jsonl", "ranks.py:guarded", name="a", **QUICK | {"steps": 1})
    assert [(line["n"], line["mean"]) for line in run.evals] == [(4, 0.625)] * 2

    command = ["--model", "runs/a", "--reward-file", "ranks.py:guarded", "--problems", "2"]
    assert evaluation.main([*command, "--json", "a.json"]) == 0
    (result,) = json.loads(Path("a.json").read_text())
    assert (result["n"], result["samples"], result["mean"]) == (2, 4, 0.625)

    said = "--samples 1: the reward may compare the completions of a group; leave it out"
    assert said in fails(capsys, *command, "--samples", "1", main=evaluation.main)


def test_a_reward_that_fails_costs_no_step_that_was_made(home, capsys):
    Path("late.py").write_text(
        "calls = []\ndef reward(completion, **row):\n"
        "    calls.append(1)\n    return len(completion) % 7 / 7 if len(calls) < 60 else 1 / 0\n"
    )
    command = ["--data", "rows.jsonl", "--reward-file", "late.py:reward", *FLAGS, "--name", "a"]
    line = fails(capsys, *command, "--steps", "40")
    made = load_run("runs/a").metrics[-1]["step"]
    assert "ZeroDivisionError" in line and made < 40
    assert f"step {made} is saved, continue with --resume runs/a" in line


def test_the_reward_file_of_a_run_is_not_executed_unless_it_is_named(home, capsys):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    assert main([*command, *FLAGS, "--steps", "1", "--name", "a"]) in (0, 3)
    Path("own.py").write_text("raise SystemExit('executed')")
    for program, arguments in (
        (main, ["--resume", "runs/a"]),
        (evaluation.main, ["--model", "runs/a"]),
        (audit.main, ["runs/a"]),
        (inspect.main, ["runs/a", "replay", "1"]),
    ):
        line = fails(capsys, *arguments, main=program)
        assert "if you trust it, give --reward-file own.py:reward" in line, line

    Path("own.py").write_text(OWN)
    named = ["--reward-file", "own.py:reward"]
    assert evaluation.main(["--model", "runs/a", *named, "--problems", "2"]) == 0
    assert audit.main(["runs/a", *named]) == 0
    assert inspect.main(["runs/a", "replay", "1", *named]) == 0
    assert main(["--resume", "runs/a", *named, "--steps", "2"]) in (0, 3)

    # An option that decides no result may change.
    slower = [*named, "--reward-timeout", "99", "--steps", "3"]
    assert main(["--resume", "runs/a", *slower]) in (0, 3)
    line = fails(capsys, "--resume", "runs/a", *named, "--reward-range", "0,2")
    assert "0,2" in line and "0,1.2" in line

    Path("own.py").write_text(OWN + "# changed\n")
    assert "files: own.py" in fails(capsys, "--resume", "runs/a", *named, "--steps", "4")


OWN_LOSS = """
def loss(inputs, settings):
    ratio_RT = (inputs.logp_RT - inputs.old_RT).exp()
    clipped_RT = ratio_RT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantages_RT = inputs.advantages
    return -(ratio_RT * advantages_RT).minimum(clipped_RT * advantages_RT)
"""


def test_a_loss_of_ones_own_trains_and_its_file_is_executed_only_if_it_is_named(home, capsys):
    Path("mine.py").write_text(OWN_LOSS)
    own = ["--loss", "mine.py:loss"]
    assert main([*FLAGS, *SMALL_TASK, *own, "--steps", "1", "--name", "own"]) in (0, 3)
    assert "loss" in load_run("runs/own").metrics[0]

    Path("mine.py").write_text("raise SystemExit('executed')")
    for program, arguments in (
        (main, ["--resume", "runs/own"]),
        (inspect.main, ["runs/own", "replay", "1"]),
    ):
        line = fails(capsys, *arguments, main=program)
        assert line.endswith("if you trust it, give --loss mine.py:loss as well")
    assert evaluation.main(["--model", "runs/own", "--problems", "2"]) == 0  # needs no loss

    again = ["--resume", "runs/own", *own, "--steps", "2"]
    assert "executed" in fails(capsys, *again)
    Path("mine.py").write_text(OWN_LOSS + "# changed\n")
    assert "changed since it was saved: files: mine.py" in fails(capsys, *again)
    Path("mine.py").write_text(OWN_LOSS)
    assert inspect.main(["runs/own", "replay", "1", *own]) == 0
    assert main(again) in (0, 3)


def clipless(inputs, settings):
    return -(inputs.logp_RT - inputs.old_RT).exp() * inputs.advantages


def longer(groups):
    return [[len(text) - fmean(map(len, group.texts)) for text in group.texts] for group in groups]


@pytest.mark.parametrize(
    "name, setting, function", [("loss", "loss", clipless), ("advantages", "scale", longer)]
)
def test_loss_and_advantages_may_be_functions_in_python(home, capsys, name, setting, function):
    options = dict(task="interleave", level=3, **QUICK | {"max_new_tokens": 64})
    given = {name: function}
    run = train(**options, **given, name="a")
    assert run.config[setting] == f"python:{function.__name__}" and len(run.metrics) == 2
    assert len(train(resume="runs/a", **given, steps=3).metrics) == 3
    changed = lambda *given: function(*given)  # noqa: E731
    changed.__name__ = function.__name__
    with pytest.raises(UserError, match=f"functions: .*python:{function.__name__} .* → "):
        train(resume="runs/a", **{name: changed}, steps=4)

    place = next(row for row in run.rollouts() if row["advantage"])
    assert (4 * place["advantage"]).is_integer() == (name == "advantages")
    capsys.readouterr()
    where = [str(place[key]) for key in ("step", "group", "sample")]
    assert inspect.main(["runs/a", "why", *where]) == 0
    assert (name == "loss") == ("standard" in capsys.readouterr().out)
    line = fails(capsys, "--resume", "runs/a", "--steps", "4")
    assert f"again, as grpo.train({name}=FUNCTION)" in line
    with pytest.raises(UserError, match=f"^(--loss|train).* mse: give one of grpo|{name} must be"):
        train(**options, **{name: "mse"})

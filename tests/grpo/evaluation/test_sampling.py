"""How an evaluation samples: with the budget and the settings of the run."""

import json
import shlex
from pathlib import Path

from small_evaluations import CLIMB, evaluated

from grpo.evaluate import (
    EvaluationSettings,
    evaluate,
    held_out_stream,
    select,
)
from grpo.run.logs import groups_of, load_run
from grpo.tools import evaluation
from tasks.registry import load_task


def longest(name):
    """Return the length of the longest completion of level 1 in a file of rollouts, in tokens."""
    groups = groups_of(Path("runs/a/rollouts") / f"{name}.jsonl.zst")
    return max(
        len(completion.tokens)
        for group in groups
        for completion in group.completions
        if group.problem.level == 1
    )


def test_training_evaluation_and_promotion_have_one_budget(run, capsys):
    task, budget = "ponder.py:Declaring", 40
    assert run("--task", task, *CLIMB) == 0
    assert {longest(name) for name in ("step-000001", "eval-000000")} == {budget}
    lines = load_run("runs/a").evals
    assert {line["budget"] for line in lines if line["level"] == 1} == {budget}
    said = capsys.readouterr().out
    assert "up to 41 new tokens" in said  # declared for level 2

    (line,) = evaluated("--model", "runs/a", "--task", task, "--words", "1", "--problems", "3")
    assert line["budget"] == budget and line["truncated"] == 1
    assert "100% of the completions were truncated" in capsys.readouterr().out


def test_an_evaluation_is_sampled_as_the_run_was(run, capsys):
    """The run's own settings hold in its evaluations and in eval.py, by the command that the run
    prints as well.
    """
    settings = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 9}
    flags = ["--config", json.dumps(settings)]
    options = ["--task", "arithmetic", "--family", "product", "--level", "12"]
    assert run(*options, *flags) == 0
    said = capsys.readouterr().out
    assert "temperature 0.7" in said and "top_p 0.9" in said
    assert "up to 9 new tokens" in said

    (command,) = [line for line in said.splitlines() if "python eval.py" in line]
    (printed,) = evaluated(*shlex.split(command)[2:], "--problems", "5")
    (short,) = evaluated("--model", "runs/a", "--problems", "5")
    assert short == printed
    assert {name: short[name] for name in settings} == settings
    assert (short["task"], short["family"], short["level"], short["budget"]) == (
        "arithmetic",
        "product",
        12,
        9,
    )

    lines = load_run("runs/a").evals
    for name in ("temperature", "top_p"):
        assert {line[name] for line in lines} == {settings[name]}

    (changed,) = evaluated("--model", "runs/a", "--problems", "5", "--top-p", "1")
    assert (changed["top_p"], changed["temperature"]) == (1, 0.7)
    (greedy,) = evaluated("--model", "runs/a", "--problems", "5", "--greedy")
    assert greedy["temperature"] == 0


def test_another_task_does_not_inherit_the_runs_options_and_level(run):
    assert run("--task", "arithmetic", "--family", "product", "--level", "12") == 0
    (other,) = evaluated("--model", "runs/a", "--task", "interleave", "--problems", "2")
    assert other["level"] == 25 and "family" not in other
    (chain,) = evaluated("--model", "runs/a", "--family", "chain", "--problems", "2")
    assert (chain["task"], chain["family"], chain["level"]) == ("arithmetic", "chain", 2)


def test_a_runs_task_file_is_not_executed_unless_it_is_named(run, capsys):
    assert run("--task", "ponder.py:Ponder") == 0
    capsys.readouterr()
    Path("ponder.py").write_text("raise SystemExit('executed')")
    assert evaluation.main(["--model", "runs/a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "if you trust it, give --task ponder.py:Ponder" in error


def test_samples_of_a_problem_are_independent_draws(tiny_policy):
    task = load_task("ponder.py:Ponder")
    stream, limits = held_out_stream(task, 1, "test", seed=0, size=5)
    found = select(tiny_policy, stream, 5, **limits)
    one = evaluate(tiny_policy, task, found.problems)
    many = evaluate(tiny_policy, task, found.problems, EvaluationSettings(samples=8))
    assert [group.texts[0] for group in many] == [group.texts[0] for group in one]
    assert all(len(group.completions) == 8 == len(set(group.texts)) for group in many)
    other = evaluate(tiny_policy, task, found.problems, EvaluationSettings(seed=1, samples=8))
    assert all(not set(a.texts) & set(b.texts) for a, b in zip(many, other))

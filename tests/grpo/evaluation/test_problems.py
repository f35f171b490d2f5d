"""Which problems an evaluation uses, and its messages when there are too few."""

from pathlib import Path

from small_evaluations import CLIMB, evaluated

from grpo.run.logs import groups_of, load_run, read_metrics
from grpo.tools import evaluation
from tasks.audit import audit
from tasks.base import Problem
from tasks.supply import write_problems


def test_few_problems_are_evaluated_once_each(run, capsys):
    options = ["--task", "arithmetic", "--family", "product", "--level", "11"]
    assert run(*options, "--eval-problems", "200") == 0
    for line in load_run("runs/a").evals:
        groups = groups_of(Path(f"runs/a/rollouts/eval-{line['step']:06}.jsonl.zst"))
        keys = [group.problem.key for group in groups]
        assert len(set(keys)) == len(keys) == line["n"] < line["asked"] == 200
    n = line["n"]
    assert f"n = {n} distinct problems, 200 asked for" in capsys.readouterr().out
    assert audit(Path("runs/a"))[0] == []

    (line,) = evaluated("--model", "runs/a")
    assert (line["n"], line["asked"]) == (3, 200)
    assert "3 distinct problems at level 11; 200 asked for" in capsys.readouterr().out


def test_duplicate_lines_of_a_dataset_count_once(tiny_model, capsys):
    problems = [Problem("any", 2, f"What is {i % 3}?", str(i), f"key {i % 3}") for i in range(12)]
    write_problems("set.jsonl", problems)
    flags = ["--model", str(tiny_model), "--task", "arithmetic", "--dataset", "set.jsonl"]
    (line,) = evaluated(*flags)
    assert (line["n"], line["asked"]) == (3, 200)
    assert "3 distinct problems at level 2; 200 asked for" in capsys.readouterr().out
    assert evaluation.main([*flags, "--words", "9"]) == 2
    assert "set.jsonl, level 9: there is no problem" in capsys.readouterr().err


def test_an_evaluation_without_problems_is_skipped_and_the_run_goes_on(run, capsys):
    assert run("--task", "few.py:Few", "--steps", "4", *CLIMB) == 0
    said = capsys.readouterr().out
    assert "n = 2 distinct problems, 3 asked for" in said
    nothing_left = "at level 1: no problem is left: all 2 that were found were trained on"
    assert said.count(f"warning: no report evaluation {nothing_left}") == 1
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 4
    steps = [line["step"] for line in load_run("runs/a").evals]
    stored = [path.name for path in sorted(Path("runs/a/rollouts").glob("eval-*"))]
    assert set(steps) == {0} and stored == ["eval-000000.jsonl.zst"]

    assert evaluation.main(["--model", "runs/a", "--task", "few.py:Few", "--words", "1"]) == 2
    assert "no problem is left: all 2 that were found" in capsys.readouterr().err

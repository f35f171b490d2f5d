"""Which problems an evaluation uses, and its messages when there are too few."""

from pathlib import Path

from small_evaluations import CLIMB, PONDER, evaluated

from grpo.run.logs import groups_of, read_metrics
from grpo.run.reader import load_run
from grpo.tools.evaluation import program as evaluation
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
    assert run("--task", "few.py:Few", "--steps", "4", *CLIMB, "--promote-at", "0.01") == 0
    said = capsys.readouterr().out
    assert "n = 2 distinct problems, 3 asked for" in said
    nothing_left = "at level 1: no problem is left: all 2 that were found were trained on"
    assert said.count(f"warning: no report evaluation {nothing_left}") == 1
    assert said.count(f"warning: no promotion evaluation {nothing_left}") == 1
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 4
    steps = [line["step"] for line in load_run("runs/a").evals]
    stored = [path.name for path in sorted(Path("runs/a/rollouts").glob("eval-*"))]
    assert set(steps) == {0} and stored == ["eval-000000.jsonl.zst"]

    assert evaluation.main(["--model", "runs/a", "--task", "few.py:Few", "--words", "1"]) == 2
    assert "no problem is left: all 2 that were found" in capsys.readouterr().err


def test_a_problem_beyond_the_budget_ends_no_run(run):
    """Where one target takes more than --max-new-tokens it is passed over, in training and in
    evaluations.
    """
    fits, too_long = "52", "'five ' * 60"
    source = PONDER.replace('"52"', f"'52' if split == 'train' or rng.randrange(2) else {too_long}")
    Path("ponder.py").write_text(source)
    problems = [
        Problem("ponder", 1, f"What is {i}?", fits if i % 2 else "five " * 60, f"key {i}")
        for i in range(8)
    ]
    write_problems("set.jsonl", problems)

    flags = ["--task", "ponder.py:Ponder", "--max-new-tokens", "40", "--dataset", "set.jsonl"]
    assert run(*flags, "--eval-problems", "20") == 0
    for line in load_run("runs/a").evals:
        assert line["n"] == 20 and 5 < line["too_long"] < 50
    steps = [groups_of(Path(f"runs/a/rollouts/step-00000{i}.jsonl.zst")) for i in (1, 2)]
    assert {group.problem.target for groups in steps for group in groups} == {fits}


def test_a_prompt_that_leaves_little_room_is_named(run, capsys):
    """In training, in its evaluations and in eval.py, once each."""
    long = PONDER.replace('f"What is {number}?"', """f"What is {number}? {'five ' * 980}\"""")
    Path("ponder.py").write_text(long)
    flags = ["--task", "ponder.py:Ponder", "--max-new-tokens"]
    warning = "of the model's 1,024 tokens, which leaves a completion 3"

    assert run(*flags, "80") == 0
    assert capsys.readouterr().out.count(warning) == 2
    assert Path("runs/a/warnings.log").read_text().count(warning) == 2

    more = ["--model", "runs/a", "--words", "1,2", "--problems", "3"]
    assert evaluation.main([*more, *flags, "80"]) == 0
    assert capsys.readouterr().err.count(warning) == 1
    assert evaluation.main([*more, *flags, "40"]) == 0
    assert warning not in capsys.readouterr().err

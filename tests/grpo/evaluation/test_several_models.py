"""Several models beside each other: the same problems for all, and each answer under its model."""

import json
import re
import shutil
from pathlib import Path

from small_evaluations import evaluated

from grpo.tools.evaluation import evaluate
from grpo.tools.evaluation import program as evaluation
from tasks.base import SPLITS


def test_runs_of_different_problems_are_refused_before_one_is_loaded(run, capsys, monkeypatch):
    assert run("--words", "1", "--no-ramp") == 0
    assert run("--words", "2", "--no-ramp", "--name", "b") == 0
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "load_run_policy", None)
    assert evaluation.main(["--model", "runs/a", "--model", "runs/b"]) == 2
    assert capsys.readouterr().err == (
        "eval.py: --model runs/b: would answer other problems (--task interleave --levels 2) than "
        "runs/a (--task interleave --levels 1); add the flags of one of them\n"
    )
    assert evaluation.main(["--model", "builtin", "--model", "runs/b"]) == 2
    assert "other problems (--task interleave --levels 2) than builtin" in capsys.readouterr().err


def test_remarks_and_the_worst_answers_name_their_model(tiny_model, run, capsys):
    assert run("--words", "2", "--no-ramp") == 0
    models = ["--model", str(tiny_model), "--model", "runs/a"]
    flags = ["--words", "2", "--problems", "3"]
    capsys.readouterr()
    evaluated(*models, *flags)
    said = capsys.readouterr().out
    for model in (str(tiny_model), "runs/a"):
        assert re.search(rf"^{model}, level 2, score 0\.\d+$", said, re.MULTILINE)
        assert f"warning: {model}, level 2: 100% of the completions were truncated" in said

    evaluated(*models[:2], *flags)
    assert "\nlevel 2, score 0." in capsys.readouterr().out


def test_the_answer_of_a_problem_without_a_target_stands_alone(tiny_model, capsys):
    Path("rows.jsonl").write_text(
        '{"prompt": "a", "split": "test"}\n{"prompt": "b", "split": "train"}'
    )
    Path("never.py").write_text("def reward(completion):\n    return 0\n")
    rows = ["--task", "data", "--data", "rows.jsonl", "--reward-file", "never.py:reward"]
    evaluated("--model", str(tiny_model), *rows, "--max-new-tokens", "3")
    said = capsys.readouterr().out
    assert "\nlevel 1, score 0.0000\n  wrote:  " in said


def test_the_order_of_the_flags_makes_no_other_problems(run, tmp_path):
    problems = [
        {"prompt": f"{i}", "answer": f"{i}", "level": 1 + i % 2, "split": SPLITS[i // 2 % 3]}
        for i in range(60)
    ]
    text = "".join(json.dumps(row) + "\n" for row in problems)
    Path("rows.jsonl").write_text(text)
    Path("own.py").write_text("def reward(completion):\n    return 0.5\n")
    rows = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1"]
    assert run(*rows, "--max-new-tokens", "3") == 0
    other = ["--reward-range", "0,1", "--data", "rows.jsonl", "--reward-file", "own.py:reward"]
    models = ["--model", "builtin", "--model", "runs/a", "--max-new-tokens", "3"]
    for flags in ([*rows, "--levels", "2"], [*other, "--levels", "2"]):
        _, of_run = evaluated(*models, *flags, "--problems", "3")
        assert of_run["difference"]["n"] == of_run["n"] > 0
    # Without --levels it is the highest level of the rows, as in training.
    assert evaluated(*models[:2], *models[4:], *rows, "--problems", "3")[0]["level"] == 2


def test_all_models_answer_on_the_texts_that_none_of_them_knows(run, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for i in range(40):
        (notes / f"{i}.txt").write_text(" ".join(f"w{i}.{j}" for j in range(12)))
    assert run("--texts", str(notes), "--words", "3") == 0
    models = ["--model", "builtin", "--model", "runs/a"]
    own, of_run = evaluated(*models, "--texts", str(notes), "--words", "3", "--problems", "6")
    assert own["n"] == of_run["n"] == of_run["difference"]["n"] == 6


def test_the_name_of_a_model_is_no_markup(tiny_model, capsys):
    shutil.copytree(tiny_model, "q[x]")
    shutil.copytree(tiny_model, "q[/b]")
    evaluated("--model", "q[x]", "--model", "q[/b]", "--words", "2", "--problems", "2")
    said = capsys.readouterr().out
    assert "difference to q[x]" in said and "q[/b]" in said

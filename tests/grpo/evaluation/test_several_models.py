"""Several models beside each other: the same problems for all, and each answer under its model."""

import re

from small_evaluations import evaluated

from grpo.tools.evaluation import evaluate
from grpo.tools.evaluation import program as evaluation


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

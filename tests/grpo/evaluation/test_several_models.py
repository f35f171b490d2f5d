"""Several models beside each other: the same problems for all, and each answer under its model."""

import re

from small_evaluations import evaluated


def test_remarks_and_the_worst_answers_name_their_model(tiny_model, run, capsys):
    assert run("--words", "2") == 0
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

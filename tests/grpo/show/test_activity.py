"""What eval.py says while it samples and scores, and how its tables fit a screen."""

import io

import pytest
from rich.console import Console

from grpo.evaluate import EvaluationSettings, evaluate
from grpo.show.activity import StatusLine
from grpo.tools.evaluation.table import _show_table
from tasks.interleave import Interleave
from tasks.supply import problem_at

RESULT = {
    "model": "runs/a",
    "level": 250,
    "n": 200,
    "samples": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "budget": 1062,
    "mean": 0.98765,
    "ci_low": 0.96,
    "ci_high": 1.0,
    "exact": 0.985,
    "truncated": 0.0,
    "dropped": 0,
}


def test_eval_says_now_and_then_how_far_it_is_on_standard_error(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("grpo.show.activity.time.monotonic", lambda: now[0])
    status = StatusLine("eval.py")
    with status.working("runs/a, level 10") as progress:
        for done in range(50):
            progress("sampling", done, 64)
            now[0] += 1
        status.scoring(3, 8, 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "eval.py: runs/a, level 10: sampling 10/64, 10 s",
        "eval.py: runs/a, level 10: sampling 40/64, 40 s",
    ]


def test_a_terminal_shows_it_on_one_line_that_disappears(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    status = StatusLine("eval.py")
    assert status.is_terminal
    with status.working("runs/a") as progress:
        progress("scoring", 3, 8)
    shown = capsys.readouterr()
    assert "runs/a: scoring 3/8" in shown.err and shown.out == ""
    assert shown.err.rindex("\x1b[2K") > shown.err.rindex("runs/a")


def test_an_evaluation_says_how_far_sampling_and_scoring_are(tiny_policy):
    calls = []
    task = Interleave()
    problems = [problem_at(task, seed=0, split="validation", level=2, index=i) for i in range(3)]
    settings = EvaluationSettings(batch=2)
    evaluate(tiny_policy, task, problems, settings, lambda *call: calls.append(call))
    assert calls == [
        ("sampling", 0, 3),
        ("scoring", 0, 3),
        ("sampling", 2, 3),
        ("scoring", 2, 3),
    ]


@pytest.mark.parametrize("width, left_out", [(100, ""), (80, "budget, sampling")])
def test_the_numbers_of_an_evaluation_are_never_cut(width, left_out):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    _show_table(console, [RESULT], "similarity")
    text = console.file.getvalue()
    assert "…" not in text.replace("0.9600 … 1.0000", "") and "0.9600 … 1.0000" in text
    assert (f"left out at {width} columns: {left_out} (" in text) == bool(left_out)

"""Steps and evaluations as lines, and tables that fit the screen."""

import io

import pytest
from rich.console import Console
from screens import evaluation, report

from grpo.show.lines import (
    clock_time,
    evaluation_line,
    show_table,
    step_line,
    summary_table,
)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (572, "9:32"),
        (3600, "1:00:00"),
        (3599.7, "1:00:00"),
        (93784, "26:03:04"),
    ],
)
def test_clock_time(seconds, text):  # 93784 = 26 * 3600 + 3 * 60 + 4
    assert clock_time(seconds) == text


def test_step_line_shows_every_figure():
    assert step_line(report(), 300, seconds_left=572, metric="similarity") == (
        "step  12/300  level  25  reward 0.412 ± 0.083  similarity 0.531  trained on  6 of 8 "
        "groups  resampled  2  "
        "T 1.00   92.3 tokens    5,321 tok/s    2.0 s    3.2 GB  ETA     9:32"
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"metric": "similarity"},
            "held-out similarity at 25 words: 0.412 [0.402, 0.422] (n = 200, temperature 1, exact "
            "0.01)",
        ),
        ({"purpose": "warm start"}, "imitating: held-out score at 25 words:"),
        ({"purpose": "imitation"}, "after imitation: held-out score at 25 words:"),
        ({"purpose": "promotion", "control": "constant-reward"}, "  validation check: held-out"),
        ({"temperature": 0}, "greedy, exact"),
        ({"unit": "digits"}, "held-out score at 25 digits:"),
        ({"unit": ""}, "held-out score at level 25:"),
        ({"split": "train"}, "training score at 25"),
        ({"exact": 0.995}, "exact 0.995)"),
        ({"exact": 1.0, "exact_low": 0.9441, "exact_high": 1.0}, "exact 1 [0.944, 1.000])"),
    ],
)
def test_evaluation_line_says_what_was_measured(changes, words):
    assert words in evaluation_line(evaluation(**changes))


def test_summary_table():
    before = [evaluation(25, 0.25), evaluation(10, 0.5), evaluation(10, 0.8, temperature=0)]
    after = [
        evaluation(10, 0.9, exact=0.84),
        evaluation(10, 0.95, temperature=0, exact=0.9),
        evaluation(50, 0.4),
    ]
    assert summary_table(before, after, "similarity") == [
        "held-out similarity, mean [95 % interval], n = 200",
        "level  sampling  before                after                 exact",
        "   10  greedy    0.800 [0.790, 0.810]  0.950 [0.940, 0.960]  0.010 → 0.900",
        "   10  T 1       0.500 [0.490, 0.510]  0.900 [0.890, 0.910]  0.010 → 0.840",
        "   25  T 1       0.250 [0.240, 0.260]  -                     0.010 →   -  ",
        "   50  T 1       -                     0.400 [0.390, 0.410]    -   → 0.010",
    ]


def test_a_table_is_cut_at_the_edge_of_the_screen():
    console = Console(width=30, file=io.StringIO(), highlight=False)
    lines = [{"n": 7, "x": 0.12345}, {"n": 10, "x": None}]
    show_table(
        console, lines, {"n": ("n", "d"), "score": ("x", ".3f")}, {"text": lambda _: "w" * 30}
    )
    rows = console.file.getvalue().splitlines()
    assert [row[:11] for row in rows] == [" n  score  ", " 7  0.123  ", "10      -  "]
    assert all(len(row) <= 30 for row in rows) and rows[1].endswith("w…")

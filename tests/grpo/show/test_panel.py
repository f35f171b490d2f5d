"""The live panel on a terminal."""

import re

import pytest
from rich.cells import cell_len
from screens import ESCAPE_CODE, METRICS, evaluation, rendered, report, steps, written

from grpo.show.panel import RunView, panel


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_panel_shows_progress_figures_and_a_completion():
    more = {
        "groups/class/varied": 5,
        "groups/class/solved": 2,
        "groups/class/failed": 0,
        "completions/clipped_ratio": 0.12,
        "num_tokens": 1000,
        "wasted_tokens_total": 800,
    }
    text = rendered(
        panel(
            report(
                step=75,
                metrics=METRICS | more,
                texts=["[b]target[/b]", "target of all"],
                rewards=[0.1, 0.9],
            ),
            RunView(
                300,
                seconds_left=572,
                rewards=[0.0, 0.5, 1.0],
                best=1.25,
                evaluations=[evaluation(25, 0.25)],
                metric="similarity",
                steps=75,
                updated=41,
            ),
        )
    )
    for part in (
        "step 75 of 300",
        "25%",
        "reward 0.412  held out 0.250  groups trained 6/8  truncated 12%  ETA 9:32",
        "± 0.083 within groups  mean 0.500  best 1.250  ▁▅█",
        "weights updated in 41 of 75 steps, 80% of the tokens taught nothing",
        "held out  25: 0.250",
        "clipped 1.2% below, 20.0% above  parity 3e-05",
        "similarity 0.531",
        "5,321 tok/s",
        "KL 0.0012",
        "groups 5 varied, 2 solved",
        "reward 0.900  target {+of+} {+all+}",
    ):
        assert part in text


def test_the_panel_of_a_run_knows_its_history():
    def run(console):
        console.evaluation(evaluation(25, 0.25))
        for step, reward in enumerate(
            [0.9] + [0.1] * 30, 1
        ):  # the mean is of the last 30, the best of all
            console.step(report(step, METRICS | {"reward": reward}))

    shown = ESCAPE_CODE.sub("", written(run, force_terminal=True)).split("step 31 of")[-1]
    assert "held out  25: 0.250" in shown and "mean 0.100  best 0.900" in shown


def test_panel_shows_one_completion_after_the_other():
    texts = [f"word{i}" for i in range(4)]
    shown = [
        re.search(
            r"reward (\d\.\d+) +\[-target-\]\{\+(word\d)",
            rendered(panel(report(step, texts=texts, rewards=[0.0, 0.1, 0.2, 0.3]), RunView(9))),
        ).groups()
        for step in range(1, 5)
    ]
    assert sorted(shown) == [(f"0.{i}00", f"word{i}") for i in range(4)]


@pytest.mark.parametrize("width", [200, 80, 40, 12])
def test_panel_never_leaves_the_screen(width):
    text = rendered(
        panel(
            report(texts=["語" * 500], rewards=[0.5]),
            RunView(300, seconds_left=1e6, rewards=[0.5] * 40),
        ),
        width,
    )
    assert all(cell_len(line) == width for line in text.splitlines())


def test_panel_cuts_the_completion_to_three_lines():
    short = rendered(panel(report(texts=["word"], rewards=[0.5]), RunView(300)))
    long = rendered(panel(report(texts=["word " * 5000], rewards=[0.5]), RunView(300)))
    assert len(long.splitlines()) == len(short.splitlines()) + 2
    assert "{+word+} …" in long and "…" not in short


def test_sparkline_of_the_panel_spans_the_last_30_steps():
    reports = [report(step, {"reward": float(step > 21)}) for step in range(1, 51)]
    output = written(steps(*reports), force_terminal=True)
    last = ESCAPE_CODE.sub("", output).rsplit("step 50 of 300", 1)[1]
    assert "▁" + "█" * 29 + " " in last and "▁▁" not in last  # steps 21 to 50


def styles_of(metrics):
    """Return the colours of the first row of the panel, by the text that has them."""
    drawn = panel(report(metrics=METRICS | metrics), RunView(300)).renderable.renderables[0]
    return {
        drawn.plain[span.start : span.end]: span.style
        for span in drawn.spans
        if span.style in ("yellow", "bold red")
    }


@pytest.mark.parametrize(
    "metrics, colours",
    [
        ({"groups/kept": 8, "completions/clipped_ratio": 0.05}, {}),
        ({"groups/kept": 4, "completions/clipped_ratio": 0.1}, {"4/8": "yellow", "10%": "yellow"}),
        (
            {"groups/kept": 0, "completions/clipped_ratio": 0.5},
            {"0/8": "bold red", "50%": "bold red"},
        ),
    ],
)
def test_only_what_is_abnormal_is_in_colour(metrics, colours):
    assert styles_of(metrics) == colours


def test_the_panel_is_as_wide_as_the_terminal():
    for width in (80, 160):
        first, *_ = rendered(panel(report(), RunView(300)), width).splitlines()
        assert cell_len(first) == width

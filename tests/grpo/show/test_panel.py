"""The live panel on a terminal."""

import pytest
from screens import METRICS, rendered, report

from grpo.show.console import History, panel


def test_panel_shows_progress_figures_and_a_completion():
    more = {
        "groups/class/varied": 5,
        "groups/class/solved": 2,
        "groups/class/failed": 0,
        "completions/clipped_ratio": 0.12,
        "num_tokens": 1000,
        "wasted_tokens_total": 800,
    }
    step = report(75, METRICS | more, ["[b]target[/b]", "target of all"], [0.1, 0.9])
    history = History(300, "similarity", held_out=0.25)
    history.rewards.extend([0.0, 0.5, 1.0])
    history.best, history.steps, history.updated = 1.25, 75, 41
    history.report, history.pace = step, 572 / 225
    text = rendered(panel(step, history))
    for part in (
        "step 75 of 300",
        "reward 0.412  held out 0.250  groups trained 6/8  truncated 12%  ETA 9:32",
        "± 0.083 within groups  mean 0.500  best 1.250  ▁▅█",
        "weights updated in 41 of 75 steps, 80% of the tokens taught nothing",
        "clipped 1.2% below, 20.0% above  parity 3e-05",
        "similarity 0.531",
        "5,321 tok/s",
        "KL 0.0012",
        "groups 5 varied, 2 solved",
        "reward 0.900  target {+of+} {+all+}",
    ):
        assert part in text


def test_history_of_a_run():
    history = History(100)
    for number, reward in enumerate([0.9] + [0.1] * 30, 1):
        history.add(report(number, METRICS | {"reward": reward}))
    text = rendered(panel(history.report, history))
    assert "mean 0.100  best 0.900" in text  # the mean is of the last 30 steps
    assert history.steps == history.updated == 31


def test_time_left_follows_the_exponential_mean_of_the_step_time():
    history, left = History(103), []
    for step, seconds in ((1, 10.0), (2, 20.0), (3, 12.0)):
        history.add(report(step, {"step_time": seconds}))
        left.append(history.seconds_left)
    # means: 10; 10 + 0.2 * 10 = 12; 12 + 0.2 * 0 = 12
    assert left == pytest.approx([102 * 10, 101 * 12, 100 * 12])


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
    first_row = panel(report(metrics=METRICS | metrics), History(300)).renderable.renderables[0]
    styles = {
        first_row.plain[span.start : span.end]: span.style
        for span in first_row.spans
        if span.style in ("yellow", "bold red")
    }
    assert styles == colours

"""The live panel on a terminal."""

import io

import pytest
from screens import METRICS, evaluation, rendered, report

from grpo.show.console import Console


def console_of(steps):
    return Console(steps, "similarity", file=io.StringIO())


def test_panel_shows_progress_figures_and_a_completion():
    more = {"groups/class/varied": 5, "groups/class/solved": 2, "groups/class/failed": 0}
    step = report(75, METRICS | more, ["[b]target[/b]", "target of all"], [0.1, 0.9])
    console = console_of(300)
    console.evaluation(evaluation(25, 0.25))
    for line in (evaluation(temperature=0), evaluation(split="train")):
        console.evaluation(line)
    console.rewards.extend([0.0, 0.5])
    console.step(step)
    console.pace = 572 / 225
    text = " ".join(rendered(console._panel(step), width=400).split())
    for part in (
        "step 75 of 300 ETA 9:32 held out 0.250",
        "reward 0.412 ± 0.083 similarity 0.531 trained on 6 of 8 groups",
        "recent rewards ▁▅▄",
        "clipped 1.2% below, 20.0% above parity 3e-05",
        "KL 0.0012",
        "groups 5 varied, 2 solved",
        "reward 0.900 target {+of+} {+all+}",
    ):
        assert part in text


def test_time_left_follows_the_exponential_mean_of_the_step_time():
    console, left = console_of(103), []
    for step, seconds in ((1, 10.0), (2, 20.0), (3, 12.0)):
        console.step(report(step, {"step_time": seconds}))
        left.append(console.seconds_left)
    # means: 10; 10 + 0.2 * 10 = 12; 12 + 0.2 * 0 = 12
    assert left == pytest.approx([102 * 10, 101 * 12, 100 * 12])

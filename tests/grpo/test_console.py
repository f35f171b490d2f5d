"""What the console prints, as text: the pure lines, then both screens, plain and terminal."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console as RichConsole

from data.text import escape_control
from grpo.records import Completion, Group, StepReport
from grpo.show.console import Console, RunFormat
from grpo.show.lines import (
    clock_time,
    evaluation_line,
    held_out_line,
    sparkline,
    step_line,
    summary_table,
)
from grpo.show.panel import RunView, panel
from tasks.base import Problem, Score

METRICS = {
    "level": 25,
    "reward": 0.4123,
    "group_std": 0.083,
    "value": 0.531,
    "groups/kept": 6,
    "groups/count": 8,
    "groups/resampled": 2,
    "groups/skipped": 1,
    "temperature": 1.0,
    "completions/mean_length": 92.34,
    "tokens_per_second": 5321.4,
    "step_time": 2.0,
    "memory_gb": 3.21,
    "time/rollout": 1.1,
    "time/update": 0.8,
    "loss": -0.0123,
    "kl": 0.0012,
    "entropy": 1.234,
    "grad_norm": 0.512,
    "clip_ratio/low_mean": 0.0123,
    "clip_ratio/high_mean": 0.2,
    "sampling/sampling_logp_difference/max": 3.4e-5,
}
COMMAND = (
    "python eval.py --model runs/interleave-25 --task interleave --words 10,25,50,100 "
    "--problems 200"
)
HOSTILE = "[bold]one[/bold] \x1b[31mred\x1b[2J </script> \r\x07 \u202eback \ud800 :smile:"
HARMLESS = r"[bold]one[/bold] \x1b[31mred\x1b[2J </script> \r\x07 \u202eback \ud800 :smile:"
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def report(step=12, metrics=METRICS, texts=(), rewards=(), events=()):
    problem = Problem("interleave", 25, "prompt", "target", "key")
    completions = [Completion((1,), (-0.1,), text, "stop") for text in texts]
    group = Group(0, problem, (1,), 1.0, completions, scores=[Score(reward) for reward in rewards])
    return StepReport(step, dict(metrics), [group], list(events))


def evaluation(level=25, mean=0.4123, temperature=1.0, **changes):
    return {
        "step": 0,
        "task": "interleave",
        "level": level,
        "split": "test",
        "n": 200,
        "temperature": temperature,
        "mean": mean,
        "ci_low": mean - 0.01,
        "ci_high": mean + 0.01,
        "exact": 0.01,
        **changes,
    }


def written(use, total_steps=300, log_every=1, metric="score", **options):
    """Return all that `use(console)` writes, escape codes included."""
    file = io.StringIO()
    with Console(RunFormat(total_steps, log_every, metric), file=file, **options) as console:
        use(console)
    return file.getvalue()


def plain(use, total_steps=300, **options):
    """Return the lines that `use(console)` prints into a pipe, without their time."""
    return [
        re.sub(r"^\d\d:\d\d:\d\d  ", "", line)
        for line in written(use, total_steps, **options).splitlines()
    ]


def steps(*reports):
    return lambda console: [console.step(report) for report in reports]


def rendered(renderable, width=80):
    """Return what a terminal of `width` columns shows of `renderable`, as text."""
    screen = RichConsole(width=width, force_terminal=True, record=True, file=io.StringIO())
    screen.print(renderable)
    return screen.export_text()


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_is_printable_and_printable_text_is_left_alone(text):
    assert escape_control(text).isprintable()
    assert escape_control(escape_control(text)) == escape_control(text)


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


def test_sparkline_has_eight_heights_over_the_unit_interval():
    # height = floor(8 r): 0.12 -> 0, 0.13 -> 1, 0.5 -> 4, 0.99 -> 7
    assert sparkline([0, 0.12, 0.13, 0.5, 0.99, 1]) == "▁▁▂▅██"
    assert sparkline([-3, 7, float("inf"), float("nan")]) == "▁██▁"


def test_sparkline_over_another_range():
    assert sparkline([-1, -0.5, 0], (-1.0, 0.0)) == sparkline([0, 50, 100], (0, 100)) == "▁▅█"
    assert sparkline([3, 5, 7], None) == "▁▅█" and sparkline([3, 3], None) == "▁▁"
    assert sparkline([], None) == ""


def test_step_line_shows_every_figure():
    assert step_line(report(), 300, seconds_left=572, metric="similarity") == (
        "step  12/300  level  25  reward 0.412 ± 0.083  similarity 0.531  trained on  6 of 8 "
        "groups  resampled  2  "
        "T 1.00   92.3 tokens    5,321 tok/s    2.0 s    3.2 GB  ETA     9:32"
    )


def test_what_a_step_lacks_is_left_out():
    assert step_line(report(metrics={}), 300) == "step  12/300"
    assert (
        step_line(report(metrics={"reward": 0.5, "value": None}), 300)
        == "step  12/300  reward 0.500"
    )
    assert re.findall(r"[a-z]+", rendered(panel(report(metrics={}), RunView(300)))) == [
        "step",
        "of",
    ]


def test_step_lines_stand_in_columns():
    small = {
        **METRICS,
        "level": 6,
        "groups/kept": 8,
        "tokens_per_second": 87,
        "completions/mean_length": 9.2,
    }
    first = step_line(report(1, small), 300, seconds_left=9)
    later = step_line(report(300, {**METRICS, "step_time": 12.3}), 300, seconds_left=36000)
    assert len(first) == len(later)
    assert all(
        first.index(word) == later.index(word) for word in ("reward", "trained", "tok/s", "ETA")
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"metric": "similarity"},
            "held-out similarity at 25 words: 0.412 [0.402, 0.422] (n = 200, temperature 1, exact "
            "0.01)",
        ),
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


def test_panel_shows_progress_figures_and_a_completion():
    classes = {"groups/class/varied": 5, "groups/class/solved": 2, "groups/class/failed": 0}
    text = rendered(
        panel(
            report(
                step=75,
                metrics=METRICS | classes,
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
            ),
        )
    )
    for part in (
        "step 75 of 300",
        "25%",
        "ETA 9:32",
        "reward 0.412 ± 0.083  mean 0.500  best 1.250  ▁▅█",
        "held out  25: 0.250",
        "clipped 1.2% below, 20.0% above  parity 3e-05",
        "similarity 0.531",
        "trained on  6 of 8 groups",
        "5,321 tok/s",
        "KL 0.0012",
        "groups 5 varied, 2 solved",
        "reward 0.900  target {+of+} {+all+}",
    ):
        assert part in text


def test_held_out_line_has_the_first_and_the_last_of_each_level():
    lines = [
        evaluation(25, 0.25),
        evaluation(10, 0.5),
        evaluation(25, 0.3),
        evaluation(25, 0.75),
        evaluation(25, 0.9, temperature=0),
        evaluation(25, 0.9, split="train"),
    ]
    assert held_out_line(lines) == "held out  10: 0.500  25: 0.250 → 0.750"
    assert held_out_line([]) == ""


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
    assert all(cell_len(line) == min(width, 80) for line in text.splitlines())


def test_panel_cuts_the_completion_to_three_lines():
    short = rendered(panel(report(texts=["word"], rewards=[0.5]), RunView(300)))
    long = rendered(panel(report(texts=["word " * 5000], rewards=[0.5]), RunView(300)))
    assert len(long.splitlines()) == len(short.splitlines()) + 2
    assert "{+word+} …" in long and "…" not in short


def everything(console):
    console.settings(
        {"task": "interleave, 25 words, ramp 10 → 25", "reward": "clipped " + "and long " * 30}
    )
    with console.loading("builtin " + HOSTILE):
        pass
    console.evaluation(evaluation())
    console.step(report(texts=[HOSTILE], rewards=[0.5], events=["promoted " + HOSTILE]))
    console.warn("a long warning " * 10 + HOSTILE)
    console.summary(
        [evaluation()], [evaluation(mean=0.97)], {"metrics": "runs/x/metrics.jsonl"}, [COMMAND]
    )


def test_plain_lines_are_whole_and_hold_no_control_character():
    lines = plain(everything)
    assert all(line.isprintable() for line in lines)
    assert f"promoted {HARMLESS}" in lines
    assert f"warning: {'a long warning ' * 10}{HARMLESS}" in lines
    assert re.fullmatch(re.escape(f"loading builtin {HARMLESS} ... ") + r"\d+\.\d s", lines[3])
    assert lines[0:2] == [
        "task    interleave, 25 words, ramp 10 → 25",
        "reward  clipped " + "and long " * 30,
    ]


def test_terminal_shows_hostile_text_harmlessly_within_80_columns():
    output = written(everything, force_terminal=True)
    text = ESCAPE_CODE.sub("", output)
    assert "\x1b[33mwarning" in output  # yellow, our own
    assert not {"\x1b[31m", "\x1b[2J"} & set(ESCAPE_CODE.findall(output))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert f"  {COMMAND}\n" in text  # left to the terminal to wrap, to be copied whole
    assert all(cell_len(line) <= 80 for line in re.split(r"[\r\n]+", text.replace(COMMAND, "")))
    panel_row = next(line for line in text.splitlines() if "reward 0.500" in line)
    assert (
        "{+[bold]one[/bold]+}" in panel_row
        and r"{+\x1b[31mred\x1b[2J+}" in text
        and "{+</script>+}" in text
        and ":smile:" in text
    )


def test_summary_ends_the_panel_and_names_files_and_commands():
    lines = plain(
        lambda console: console.summary(
            [], [], {"run": "runs/x", "metrics": "runs/x/m"}, ["python a.py"]
        )
    )
    assert lines == [
        "",
        "files",
        "  run      runs/x",
        "  metrics  runs/x/m",
        "",
        "next",
        "  python a.py",
    ]
    output = written(everything, force_terminal=True)
    assert output.index("\x1b[?25h", output.index("step 12 of 300")) < output.index("95 % interval")


def test_lines_carry_the_time_of_the_settings_clock(monkeypatch):
    monkeypatch.setattr("time.gmtime", lambda: (2026, 1, 2, 14, 3, 21, 4, 2, 0))
    output = written(lambda console: (console.settings({"batch": "8 × 16"}), console.say("saved")))
    assert output.splitlines() == ["batch  8 × 16", "clock  UTC", "14:03:21  saved"]


def test_time_left_follows_the_exponential_mean_of_the_step_time():
    reports = [
        report(step, {"step_time": seconds}) for step, seconds in ((1, 10.0), (2, 20.0), (3, 12.0))
    ]
    # means: 10; 10 + 0.2 * 10 = 12; 12 + 0.2 * 0 = 12. Left of 103 steps: 102 * 10, 101 * 12, 100
    # * 12 seconds.
    assert [line.split()[-1] for line in plain(steps(*reports), total_steps=103)] == [
        "17:00",
        "20:12",
        "20:00",
    ]


def test_log_every_thins_step_lines_but_not_events_nor_the_last_step():
    reports = [report(step, {}, events=["promoted"] if step == 4 else []) for step in range(1, 8)]
    assert plain(steps(*reports), total_steps=7, log_every=3) == [
        "step 3/7",
        "promoted",
        "step 6/7",
        "step 7/7",
    ]


def test_sparkline_of_the_panel_spans_the_last_30_steps():
    reports = [report(step, {"reward": float(step > 21)}) for step in range(1, 51)]
    output = written(steps(*reports), force_terminal=True)
    last = ESCAPE_CODE.sub("", output).rsplit("step 50 of 300", 1)[1]
    assert "▁" + "█" * 29 + " " in last and "▁▁" not in last  # steps 21 to 50


def test_the_score_goes_by_the_name_that_the_console_was_given():
    lines = plain(
        lambda console: (
            console.step(report()),
            console.evaluation(evaluation()),
            console.summary([evaluation()], [], {"run": "runs/x"}, []),
        ),
        metric="similarity",
    )
    assert (
        "similarity 0.531" in lines[0]
        and "held-out similarity" in lines[1]
        and "held-out similarity" in lines[3]
    )


def test_an_interrupt_gives_the_terminal_back():
    file = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        Console(RunFormat(300), file=file, force_terminal=True) as console,
    ):
        console.step(report())
        with console.loading("builtin"):
            raise KeyboardInterrupt
    shown = file.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex(
        "\x1b[?25l"
    )  # the cursor, hidden by the live, is visible again
    assert "..." not in shown  # an interrupted load is not said to be done


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    "file, term, live",
    [
        (Tty, "xterm", True),
        (Tty, "dumb", False),
        (io.StringIO, "xterm", False),
        (type("Latin", (Tty,), {"encoding": "iso-8859-1"}), "xterm", False),
    ],
)
def test_only_a_capable_terminal_gets_the_panel(monkeypatch, file, term, live):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console(RunFormat(300), file=file()).terminal is live


def test_a_pipe_of_another_encoding_does_not_stop_the_run():
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Console(RunFormat(300), file=pipe) as console:
        console.say("10 → 25")
    assert pipe.buffer.getvalue().endswith(b"  10 \\u2192 25\n")


def wait_for_scores(console):
    """Two waits: of 75 seconds, and of 3."""
    for seconds in range(75):
        console.scoring(seconds * 3, 256, seconds)
    console.scoring(256, 256, 75.5)
    console.scoring(1, 256, 3.0)
    console.scoring(256, 256, 3.5)


def test_slow_scoring_is_a_line_now_and_then():
    assert plain(wait_for_scores) == [
        "scoring 30/256, 10 s",
        "scoring 120/256, 40 s",
        "scoring 210/256, 70 s",
    ]


def test_slow_scoring_is_shown_below_the_panel_until_it_ends():
    def use(console):
        console.step(report())
        console.scoring(12, 256, 3.2)
        assert "scoring 12/256, 3 s" in rendered(console._live.renderable)
        assert "reward" in rendered(console._live.renderable)  # the panel stays
        console.scoring(256, 256, 4.0)
        assert "scoring" not in rendered(console._live.renderable)

    assert "scoring 12/256, 3 s" in ESCAPE_CODE.sub("", written(use, force_terminal=True))


def test_scoring_before_the_first_step_needs_no_panel():
    output = written(wait_for_scores, force_terminal=True)
    assert "scoring 3/256, 1 s" in ESCAPE_CODE.sub("", output)

"""The console of a run: both screens, plain and terminal."""

import io
import re

import pytest
from rich.cells import cell_len
from screens import (
    ESCAPE_CODE,
    evaluation,
    plain,
    rendered,
    report,
    steps,
    written,
)

from grpo.records import Ending
from grpo.show.console import Console, RunFormat

COMMAND = (
    "python eval.py --model runs/interleave-25 --task interleave --words 10,25,50,100 "
    "--problems 200"
)
HOSTILE = "[bold]one[/bold] \x1b[31mred\x1b[2J </script> \r\x07 \u202eback \ud800 :smile:"
HARMLESS = r"[bold]one[/bold] \x1b[31mred\x1b[2J </script> \r\x07 \u202eback \ud800 :smile:"


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def everything(console):
    console.settings(
        {"task": "interleave, 25 words, ramp 10 → 25", "reward": "clipped " + "and long " * 30}
    )
    with console.loading("builtin " + HOSTILE):
        pass
    console.evaluation(evaluation())
    console.step(report(texts=[HOSTILE], rewards=[0.5], events=["promoted " + HOSTILE]))
    console.warn("a long warning " * 10 + HOSTILE)
    files = {"metrics": "runs/x/metrics.jsonl"}
    console.summary(Ending(files, [COMMAND], [evaluation()], [evaluation(mean=0.97)]))


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
            Ending({"run": "runs/x", "metrics": "runs/x/m"}, ["python a.py"])
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


def test_the_score_goes_by_the_name_that_the_console_was_given():
    lines = plain(
        lambda console: (
            console.step(report()),
            console.evaluation(evaluation()),
            console.summary(Ending({"run": "runs/x"}, before=[evaluation()])),
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


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("grpo.show.activity.time.monotonic", lambda: self.now)


def wait_for_scores(clock):
    """Return a use of a console: two waits for scores, of 75 seconds and of 3."""

    def use(console):
        for seconds in range(1, 75):
            clock.now += 1
            console.scoring(seconds * 3, 256, seconds)
        console.scoring(256, 256, 75.5)
        console.scoring(1, 256, 3.0)
        console.scoring(256, 256, 3.5)

    return use


def test_slow_scoring_is_a_line_now_and_then(monkeypatch):
    assert plain(wait_for_scores(Clock(monkeypatch))) == [
        "scoring 30/256, 10 s",
        "scoring 120/256, 40 s",
        "scoring 210/256, 70 s",
    ]


def test_slow_scoring_is_shown_below_the_panel_until_it_ends():
    def use(console):
        console.step(report())
        with console.working("step 13"):
            console.scoring(12, 256, 3.2)
            assert "step 13: scoring 12/256, 3 s" in rendered(console._live.renderable)
            assert "reward" in rendered(console._live.renderable)  # the panel stays
            console.scoring(256, 256, 4.0)
            assert "scoring" not in rendered(console._live.renderable)
            assert "step 13" in rendered(console._live.renderable)
            console.scoring(1, 256, 3.0)
        assert "scoring" not in rendered(console._live.renderable)  # although it has no end

    assert "scoring 12/256, 3 s" in ESCAPE_CODE.sub("", written(use, force_terminal=True))


def test_scoring_before_the_first_step_needs_no_panel(monkeypatch):
    output = written(wait_for_scores(Clock(monkeypatch)), force_terminal=True)
    assert "scoring 3/256, 1 s" in ESCAPE_CODE.sub("", output)


def evaluate_slowly(clock):
    """Return a use of a console: an evaluation of 64 problems, one a second."""

    def use(console):
        with console.working("evaluating at 10 words") as progress:
            for done in range(64):
                progress("sampling", done, 64)
                clock.now += 1

    return use


def test_a_long_activity_is_a_line_now_and_then(monkeypatch):
    assert plain(evaluate_slowly(Clock(monkeypatch))) == [
        "evaluating at 10 words: sampling 10/64, 10 s",
        "evaluating at 10 words: sampling 40/64, 40 s",
    ]


def test_a_terminal_shows_what_is_done_below_the_panel_until_it_ends(monkeypatch):
    clock = Clock(monkeypatch)

    def use(console):
        console.step(report())
        with console.working("step 13"), console.working("evaluating") as progress:
            progress("scoring", 12, 32)
            clock.now += 5
            shown = rendered(console._live.renderable)
            assert "step 12 of 300" in shown and "evaluating: scoring 12/32, 5 s" in shown
        assert "evaluating" not in rendered(console._live.renderable)

    written(use, force_terminal=True)


def test_the_panel_has_the_last_held_out_score():
    """The final evaluation comes after the last step."""

    def use(console):
        console.step(report())
        console.evaluation(evaluation(mean=0.25))
        console.evaluation(evaluation(mean=0.975))
        assert "held out 0.975" in rendered(console._live.renderable)

    written(use, force_terminal=True)


def test_the_end_has_no_time_left_and_a_verdict_that_is_wrapped_between_words():
    line = "77% of the sampled tokens were in groups that taught nothing"

    def use(console):
        console._rich.width = 40
        console.step(report())
        assert "ETA" in rendered(console._live.renderable)
        console.summary(Ending({"run": "runs/x"}, verdict=["LEARNED", line]))
        assert "ETA" not in rendered(console._live.renderable)

    shown = ESCAPE_CODE.sub("", written(use, force_terminal=True))
    assert "77% of the sampled tokens were in groups\nthat taught nothing" in shown.replace(
        " \n", "\n"
    )


@pytest.mark.parametrize("is_expected", [True, False])
def test_an_unexpected_verdict_is_red(is_expected):
    def use(console):
        files = {"run": "runs/x"}
        verdict = ["NOT LEARNED: 0.2"]
        console.summary(Ending(files, verdict=verdict, is_expected=is_expected))

    colour = "" if is_expected else ";31"
    assert f"\x1b[1{colour}mNOT LEARNED: 0.2" in written(use, force_terminal=True)

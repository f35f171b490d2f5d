"""The console of a run, on a terminal and in a pipe: its lines, and tables that fit the screen."""

import io
from pathlib import Path

import pytest
import rich.console
from screens import ESCAPE_CODE, METRICS, Terminal, evaluation, plain, report, unbroken, written

from grpo.config import Config
from grpo.model.load import load_policy
from grpo.show.console import Console, settings_of, show_table
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer

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


@pytest.fixture
def clock(monkeypatch):
    """The seconds of the monotonic clock, in a list."""
    now = [100.0]
    monkeypatch.setattr("grpo.show.console.time.monotonic", lambda: now[0])
    return now


def everything(console):
    console.settings(
        {"task": "interleave, 25 words, levels 10, 25", "reward": "clipped " + "and long " * 30}
    )
    console.say("loading builtin " + HOSTILE)
    console.evaluation(evaluation())
    console.step(report(texts=[HOSTILE], rewards=[0.5], events=["promoted " + HOSTILE]))
    console.warn("a long warning " * 10 + HOSTILE)
    console.part("next", [f"  {COMMAND}"], is_whole=True)


# --- lines ------------------------------------------------------------------------------------


def test_plain_lines_are_whole_and_hold_no_control_character():
    lines = plain(everything, metric="similarity")
    assert all(line.isprintable() for line in lines)
    text = unbroken("\n".join(lines))
    assert f"promoted {HARMLESS}" in text
    assert f"warning: {'a long warning ' * 10}{HARMLESS}" in text
    assert f"loading builtin {HARMLESS}\n" in text
    assert lines[0] == "task    interleave, 25 words, levels 10, 25"
    assert "held-out score" in text and "similarity 0.531" in text


def test_the_lines_of_a_log_have_at_most_100_columns_but_for_commands():
    lines = written(everything, metric="similarity").splitlines()
    assert lines[1].startswith("reward  clipped and") and lines[2].startswith(" " * 10 + "long")
    lines += plain(lambda console: console.part("next", [COMMAND + " -a" * 9], is_whole=True))
    assert [line[:9] for line in lines if len(line) > 100] == ["python ev"]


def test_terminal_shows_hostile_text_harmlessly(monkeypatch):
    output = written(everything, file=Terminal())
    text = ESCAPE_CODE.sub("", output)
    assert "\x1b[33m" in output  # a warning in yellow, our own
    assert not {"\x1b[31m", "\x1b[2J"} & set(ESCAPE_CODE.findall(output))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert f"  {COMMAND}\n" in text  # left to the terminal to wrap, to be copied whole
    assert f"promoted {HARMLESS}\n" in text

    # Nor does a variable of a build system make a pipe a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in written(everything)


@pytest.mark.parametrize("style, codes", [("bold", "1"), ("bold red", "1;31")])
def test_a_verdict_has_its_style(style, codes):
    use = lambda console: console.part("NOT LEARNED: 0.2", [], style)  # noqa: E731
    output = written(use, file=Terminal())
    assert f"\x1b[{codes}mNOT LEARNED: 0.2" in output


def test_time_left_follows_the_exponential_mean_of_the_step_time():
    def use(console):
        for step, seconds in ((1, 10.0), (2, 20.0), (3, 12.0)):
            console.step(report(step, {"step_time": seconds}))

    # means: 10; 10 + 0.2 * 10 = 12; 12 + 0.2 * 0 = 12
    ends = [line.rpartition("ETA")[2].strip() for line in plain(use, 103)]
    assert ends == ["0:17:00", "0:20:12", "0:20:00"]


# --- what is being done -----------------------------------------------------------------------


def test_an_interrupt_gives_the_terminal_back():
    file = Terminal()
    with pytest.raises(KeyboardInterrupt), Console(300, file=file).working("waiting"):
        raise KeyboardInterrupt
    shown = file.getvalue()
    # The cursor, hidden while something is being done, is visible again.
    assert "waiting" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_long_activity_is_a_line_now_and_then(clock):
    def use(console):
        with console.working("evaluating at 10 words") as progress:
            for done in range(64):
                progress("sampling", done, 64)
                clock[0] += 1

    assert plain(use) == [
        "evaluating at 10 words: sampling 30/64, 30 s",
        "evaluating at 10 words: sampling 60/64, 60 s",
    ]


# --- steps, evaluations and tables as text ----------------------------------------------------


def test_the_line_of_a_step_shows_every_figure():
    (line,) = plain(lambda console: console.step(report()), metric="similarity")
    assert line == (
        "step  12/300  level  25  reward 0.412 ± 0.083  similarity 0.531  kept  6/8   ETA 0:09:36"
    )
    windows = report(12, METRICS | {"windows/expected": 0.25})
    (line,) = plain(lambda console: console.step(windows), metric="similarity")
    assert "± 0.083  expected 0.250  kept" in line and "similarity" not in line


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"metric": "similarity"},
            "held-out similarity at 25 words: 0.412 [0.402, 0.422] (n = 200, temperature 1, exact "
            "0.01 [0.001, 0.036])",
        ),
        ({"purpose": "warm start"}, "imitating: held-out score at 25 words:"),
        ({"purpose": "imitation"}, "after imitation: held-out score at 25 words:"),
        ({"purpose": "promotion", "control": "constant-reward"}, "  validation check: held-out"),
        ({"temperature": 0}, "greedy, exact"),
        ({"unit": "digits"}, "held-out score at 25 digits:"),
        ({"unit": ""}, "held-out score at level 25:"),
        ({"exact": 1.0, "exact_low": 0.9441, "exact_high": 1.0}, "exact 1 [0.944, 1.000])"),
        (
            {"n": 43, "asked": 60, "unjudged": 17},
            "(n = 43 judged problems, 60 asked for, temperature 1, exact 0.01 [0.001, 0.036], 17 "
            "completions unjudged)",
        ),
    ],
)
def test_the_line_of_an_evaluation_says_what_was_measured(changes, words):
    lines = plain(lambda console: console.evaluation(evaluation(**changes)))
    assert words in unbroken("\n".join(lines))


def test_a_table_is_cut_at_the_edge_of_the_screen():
    console = rich.console.Console(width=30, file=io.StringIO(), highlight=False)
    lines = [
        {"level": 7, "value": 0.12345, "text": "w" * 30},
        {"level": 10, "value": None, "text": "w" * 30},
    ]
    show_table(console, lines, ["level", "value", "text"])
    rows = console.file.getvalue().splitlines()
    assert [row[:14] for row in rows] == ["level  score  ", "    7  0.123  ", "   10      -  "]
    assert all(len(row) <= 30 for row in rows) and rows[1].endswith("w…")


# --- the head: it says what was chosen, even where nobody asked ----------------------------------


def said(model, **flags):
    config = Config(
        model=str(model),
        level=4,
        steps=1,
        device="cpu",
        learning_rate=1e-5,
        **{"lora_rank": 0, "prompts": 16} | flags,
    )
    policy = load_policy(config.model, device="cpu", **config.loading)
    return settings_of(
        Path("runs/x"), config, Trainer(config, Supply(load_task("interleave"), seed=0), policy)
    )


def test_what_is_trained_and_how(tiny_model):
    full = said(tiny_model)
    assert " M trained, float32 on cpu" in full["model"]
    assert "lora_rank 0" in full["settings"] and "learning_rate 1e-05" in full["settings"]
    rough = said(tiny_model, dtype="bfloat16")
    assert "bfloat16 with float32 masters on cpu" in rough["model"]
    adapter = said(tiny_model, lora_rank=4, dtype="bfloat16")
    assert "bfloat16 on cpu" in adapter["model"]  # the adapter is in float32
    assert "lora_rank 4" in adapter["settings"]


def test_settings_that_are_not_at_their_default_are_shown(tiny_model):
    plain = said(tiny_model)["settings"]
    assert "beta 0" in plain and "shots" not in plain
    other = said(tiny_model, shots=2, system="Be brief. " * 9, beta=0.04, prompts=3)
    assert "beta 0.04" in other["settings"]
    assert "shots 2" in other["settings"] and "system Be brief." in other["settings"]
    assert "prompts 3, group_size 16" in other["settings"]
    assert (
        said(tiny_model, control="constant-reward")["control"]
        == "constant-reward: a control experiment, whose rewards carry no information"
    )

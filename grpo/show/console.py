"""The console of a run: a live panel on a terminal, plain lines of unlimited width elsewhere.

Text from a model or a file passes `escape_control` and goes to rich as `Text`, which is never
parsed for markup. So no such text can move the cursor or colour the screen. All clock times are
UTC.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from data.text import escape_control, shortened
from grpo.config import Config
from grpo.evaluate import ShowProgress
from grpo.records import Ending, StepReport, sampled_groups
from grpo.show.group import aligned, classes_of, rendered
from grpo.show.lines import (
    FIGURES,
    Evaluation,
    clock_time,
    control_mark,
    evaluation_line,
    figures,
    show_table,
    sparkline,
    step_line,
    summary_table,
)
from grpo.trainer import Trainer
from tasks.base import declared_budget, problems_of, sources_of

# Without a terminal: the seconds that an activity takes before a line says how far it is, and the
# seconds between two such lines.
FIRST = 10.0
EVERY = 30.0

# Of the live panel: steps in the sparkline; the weight of a step's time in the moving average that
# predicts the time left; how much of a completion is shown (three lines of a narrow terminal); and
# by how much the index of the shown completion grows each step, so that other groups follow soon.
RECENT = 30
PACE_WEIGHT = 0.2
SAMPLE_CELLS = 200
ROTATE = 7

# The columns of the table of a pre-flight: heading, (key of the number, format).
SURVEY = {
    "level": ("level", "g"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".3f"),
    "std": ("reward_std", ".3f"),
    "groups that vary": ("varied", ".0%"),
    "any exact": ("any_exact", ".0%"),
    "truncated": ("truncated", ".0%"),
    "distinct": ("distinct", ".1f"),
}

PROMPTS = {
    "examples": ("shots", "g"),
    "reward": ("reward", ".3f"),
    "score": ("value", ".3f"),
    "groups\nthat vary": ("varied", ".0%"),
    "truncated": ("truncated", ".0%"),
}


def _end_of_wording(row: Mapping[str, Any]) -> str:
    """Return the last words of the instruction, before the texts."""
    instruction = row["wording"].partition("\n")[0]
    return f"… {instruction[-50:]}" if instruction else "as the task's own"


class Activity:
    """`what` is being done, and how far it is: "evaluating at 10 words: scoring 64/200, 12 s"."""

    def __init__(self, what: str):
        self.what = what
        self.start = time.monotonic()
        self.next = FIRST  # when a program without a terminal says how far it is

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.start

    @property
    def line(self) -> str:
        """What is being done, how far it is, and for how long."""
        return f"{self.what}, {self.seconds:.0f} s"

    def __rich__(self) -> Text:
        """Return the line as rich redraws it, four times a second."""
        return Text(escape_control(self.line), "dim")


class Console:
    """The screen of a run: ``with Console(300) as console: console.step(report)``.

    A terminal gets a live panel below the lines. Any other `file` (default: standard output) gets
    lines without escape codes; `force_terminal` overrides the choice. Leaving the ``with`` block
    restores the terminal, even after an exception. `metric` is the name of the score,
    `reward_range` the range of the task's rewards. Other programs use `working` alone, on standard
    error: ``Console(0, file=sys.stderr)``.
    """

    def __init__(
        self,
        total_steps: int,
        metric: str = "score",
        reward_range: tuple[float, float] | None = (0.0, 1.0),
        *,
        file: TextIO | None = None,
        force_terminal: bool | None = None,
    ):
        self.total_steps = total_steps
        self.metric = metric
        self.reward_range = reward_range

        # What the steps of this process have shown; `pace` are the smoothed seconds per step.
        self.report: StepReport | None = None
        self.rewards: deque[float] = deque(maxlen=RECENT)
        self.held_out: float | None = None
        self.pace: float | None = None

        self.file = file or sys.stdout

        # Not left to rich, which assumes a terminal if FORCE_COLOR is set, as many CI systems do.
        usable = (
            self.file.isatty()
            and os.environ.get("TERM") != "dumb"
            and "utf" in (self.file.encoding or "utf-8").lower()
        )
        self.terminal = usable if force_terminal is None else force_terminal
        self._rich = RichConsole(
            file=self.file, force_terminal=self.terminal, highlight=False, markup=False
        )
        self._live = Live(console=self._rich)

        self._activity: Activity | None = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.stop()

    # --- lines --------------------------------------------------------------------------------

    def say(self, line: str, style: str = "") -> None:
        """Print a line, preceded by the time of day."""
        self._row(time.strftime("%H:%M:%S", time.gmtime()), line, style)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}", "yellow")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print the settings of the run as an aligned table, and the time zone of later lines."""
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._row(escape_control(name).ljust(width), value)

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the pre-flight: each row has the figures of `curriculum.survey`."""
        show_table(self._rich, rows, SURVEY, {})

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of prompts: each row has those of `curriculum.survey_prompts`."""
        show_table(self._rich, rows, PROMPTS, {"the wording ends": _end_of_wording})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Show a finished step (1, 2, ...) and print its events."""
        self.report = report
        if (reward := report.metrics.get("reward")) is not None:
            self.rewards.append(reward)
        if (seconds := report.metrics.get("step_time")) is not None:
            before = seconds if self.pace is None else self.pace
            self.pace = before + PACE_WEIGHT * (seconds - before)
        if self.terminal:
            self._redraw()
        else:
            self.say(step_line(report, self.total_steps, self.seconds_left, self.metric))
        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    @property
    def seconds_left(self) -> float | None:
        """The seconds of the remaining steps; None if that is unknown."""
        if self.pace is None or self.report is None:
            return None
        return self.pace * (self.total_steps - self.report.step)

    def evaluation(self, line: Evaluation) -> None:
        """Print a line of eval.jsonl (see `evaluation_line`)."""
        if line["split"] != "train" and line["temperature"]:
            self.held_out = line["mean"]
        self._redraw()
        self.say(evaluation_line({"metric": self.metric, **line}))

    def summary(self, ending: Ending) -> None:
        """End the live panel; print verdict, evaluations, files and the commands to try next.

        A verdict that is not expected is in colour.
        """
        self.pace = None  # nothing is left to do, although the run may have ended early
        self._redraw()
        self._live.stop()
        if ending.verdict:
            title, *lines = ending.verdict
            self._write("")
            self._write(title, "bold" if ending.is_expected else "bold red", wrap=True)
            for line in lines:
                self._write(line, wrap=True)

        tables = []
        if ending.before or ending.after:
            tables.append(summary_table(ending.before, ending.after, self.metric))
        width = max(map(len, ending.files))
        files = [f"  {name:<{width}}  {path}" for name, path in ending.files.items()]
        tables.append(["files", *files])
        tables.append(["next", *(f"  {command}" for command in ending.next_commands)])
        for title, *lines in tables:
            self._write("")
            self._write(title, "bold")
            for line in lines:
                self._write(line)

    def _row(self, head: str, text: str, style: str = "") -> None:
        """Print `text` beside `head`; a terminal wraps it within its own column."""
        if self.terminal:
            cell = Text(escape_control(text), style, overflow="fold")
            self._rich.print(columns(Text(head, "dim"), cell))
        else:
            self._write(f"{head}  {text}")

    def _write(self, line: str, style: str = "", wrap: bool = False) -> None:
        """Print `line`; without `wrap`, a path or a command in it can be copied whole."""
        if self.terminal:
            self._rich.print(Text(escape_control(line), style), soft_wrap=not wrap)
        else:
            print(escape_control(line), file=self.file, flush=True)

    # --- what is being done -------------------------------------------------------------------

    @contextmanager
    def working(self, what: str) -> Iterator[ShowProgress]:
        """Show that `what` is being done as long as this block lasts.

        The block gets a function that says how far it is: ``progress("scoring", 64, 200)``.
        """
        activity = Activity(what)
        before, self._activity = self._activity, activity

        def progress(part: str, done: int, total: int) -> None:
            activity.what = f"{what}: {part} {done:,}/{total:,}"
            if not self.terminal and activity.seconds >= activity.next:
                activity.next = activity.seconds + EVERY
                self.say(activity.line)

        self._redraw()
        try:
            yield progress
        finally:
            self._activity = before
            self._redraw()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and then how long it took."""
        start = time.monotonic()
        with self.working(f"loading {what}"):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")

    def _redraw(self) -> None:
        """Draw the panel, and below it what is being done. rich redraws them while time passes."""
        if not self.terminal:
            return
        drawn = None if self.report is None else self._panel(self.report)
        parts = [part for part in (drawn, self._activity) if part is not None]

        # What was drawn before the first panel leaves no trace.
        self._live.transient = drawn is None
        if not parts:
            self._live.stop()
            return
        self._live.update(Group(*parts))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def _panel(self, report: StepReport) -> Panel:
        """Return the live panel after a step, as wide as the terminal.

        It has the figures of the step, recent rewards, the classes of the groups, and a completion
        compared with its target, a different one each step.
        """
        metrics = report.metrics
        head = [f"{control_mark(metrics)}step {report.step} of {self.total_steps}"]
        if self.seconds_left is not None:
            head.append(f"ETA {clock_time(self.seconds_left)}")
        if self.held_out is not None:
            head.append(f"held out {self.held_out:.3f}")
        rows: list[RenderableType] = [
            _dim(escape_control(figures(metrics, tuple(FIGURES), self.metric))),
            _dim(f"recent rewards  {sparkline(self.rewards, self.reward_range)}"),
            Text.assemble(("groups ", "dim"), classes_of(metrics)),
        ]
        scored = [
            (group.problem.target, text, score)
            for group in sampled_groups(report.groups)
            for text, score in zip(group.texts, group.scores)
        ]
        if scored:
            target, text, score = scored[ROTATE * report.step % len(scored)]
            words = rendered(aligned(target, text))
            words.truncate(SAMPLE_CELLS, overflow="ellipsis")
            rows.append(columns(_dim(f"reward {score.reward:.3f}"), words))
        title = Text("  ".join(head), "bold")
        return Panel(Group(*rows), title=title, title_align="left", border_style="dim")


def _dim(text: str) -> Text:
    """Return `text` with its words dimmed, so that the numbers stand out."""
    line = Text.assemble((text, "dim"))
    line.highlight_regex(r"-?\d[\d.,]*(e-?\d+)?%?", "not dim")
    return line


def columns(*cells: Any) -> Table:
    """Return `cells` side by side, each wrapped within its own column."""
    grid = Table.grid(*(Column(overflow="fold") for _ in cells), padding=(0, 2, 0, 0))
    grid.add_row(*cells)
    return grid


# --- the settings of a run --------------------------------------------------------------------

# Settings that are shown always; all others but those of other lines if they are not at their
# default.
MAIN = "reward learning_rate lora_rank temperature loss scale credit beta on_degenerate".split()
ELSEWHERE = (
    "task level steps name resume start mixed control dataset problems task_options model device "
    "dtype prompts group_size max_new_tokens curriculum"
).split()


def settings_of(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    task, levels = trainer.task, trainer.curriculum.levels
    about = [f"{config.task}, level {config.level}"]
    if len(levels) > 1:
        about.append(f"levels {', '.join(map(str, levels))}, drawn where groups vary")
    about += [f"{name} {value}" for name, value in config.task_options.items()]

    texts = len(sources_of(task))
    problems = config.dataset or config.problems + (f", from {texts} texts" if texts else "")
    if own := problems_of(task, "train"):
        problems = f"{len(own):,} training problems of the data, shuffled each epoch"

    default = {each.name: each.default for each in fields(Config)}
    names = [name for name in default if name in MAIN or getattr(config, name) != default[name]]
    chosen = {name: getattr(config, name) for name in names if name not in ELSEWHERE}
    return {
        "run": str(folder),
        **control,
        "task": ", ".join(about),
        "problems": problems,
        "model": _model(config, trainer),
        "batch": _batch(config, trainer),
        "settings": ", ".join(f"{name} {shortened(str(x), 40)}" for name, x in chosen.items()),
    }


def _model(config: Config, trainer: Trainer) -> str:
    policy, ranks = trainer.policy, trainer.ranks.size
    sizes = policy.model.parameters(), policy.parameters
    size, trained = (sum(each.numel() for each in part) / 1e6 for part in sizes)
    optimizer = trainer.optimizer
    has_masters = optimizer.masters[0] is not optimizer.weights[0]
    dtype = str(policy.dtype).removeprefix("torch.")
    return (
        f"{config.model}, {size:.1f} M parameters, {trained:.2f} M trained, {dtype}"
        f"{' with float32 masters' if has_masters else ''} on {policy.device}, "
        f"{torch.get_num_threads()} threads" + (f", {ranks} ranks" if ranks > 1 else "")
    )


def _batch(config: Config, trainer: Trainer) -> str:
    assert config.level is not None, "the configuration is resolved"
    budget = config.max_new_tokens or declared_budget(trainer.task, config.level)
    up_to = f", up to {budget} new tokens" if budget else ""
    recomputed = ", gradient checkpointing" if trainer.policy.gradient_checkpointing else ""
    return (
        f"{config.prompts} prompts × {config.group_size} completions{up_to}, micro-batches of "
        f"{trainer.update_memory.micro_tokens:,} tokens{recomputed}"
    )

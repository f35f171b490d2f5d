"""The console of a run: a live panel on a terminal, plain lines of unlimited width elsewhere.

The modules `lines` and `panel` make the texts. Text from a model or a file passes `escape_control`
and goes to rich as `Text`, which is never parsed for markup. So no such text can move the cursor or
colour the screen. All clock times are UTC.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from data.text import escape_control
from grpo.ending import has_update
from grpo.records import Ending, StepReport
from grpo.show.activity import Activity, ShowProgress
from grpo.show.lines import Evaluation, evaluation_line, smoothed, step_line, summary_table
from grpo.show.panel import RunView, columns, panel
from grpo.show.tables import SURVEY, show_table

# Number of steps in the sparkline, and in the mean next to it.
HISTORY = 30


@dataclass(frozen=True)
class RunFormat:
    """What lines and panel need to know of a run, e.g. ``RunFormat(300, metric="similarity")``.

    Of the plain step lines only every `log_every`-th is printed. `metric` is the name of the score,
    `reward_range` the range of the task's rewards.
    """

    total_steps: int
    log_every: int = 1
    metric: str = "score"
    reward_range: tuple[float, float] | None = (0.0, 1.0)


class Console:
    """The screen of a run: ``with Console(RunFormat(300)) as console: console.step(report)``.

    A terminal gets a live panel below the lines. Any other `file` (default: standard output) gets
    lines without escape codes; `force_terminal` overrides the choice. Leaving the ``with`` block
    restores the terminal, even after an exception.
    """

    def __init__(
        self, run: RunFormat, *, file: TextIO | None = None, force_terminal: bool | None = None
    ):
        self.total_steps = run.total_steps
        self.log_every = run.log_every
        self.metric = run.metric
        self.reward_range = run.reward_range
        self.file = file or sys.stdout
        self.encoding = self.file.encoding or "utf-8"

        # Not left to rich, which assumes a terminal if FORCE_COLOR is set, as many CI systems do.
        usable = (
            self.file.isatty()
            and os.environ.get("TERM") != "dumb"
            and "utf" in self.encoding.lower()
        )
        self.terminal = usable if force_terminal is None else force_terminal
        self._rich = RichConsole(
            file=self.file, force_terminal=self.terminal, highlight=False, markup=False
        )
        self._live = Live(console=self._rich)

        # What is being done, and slow scoring within it.
        self._activity: Activity | None = None
        self._scoring: Activity | None = None

        # State for the panel: the last step, seconds per step, recent rewards, the best reward,
        # how many steps there were and how many of them had an update, and evaluations.
        self._report: StepReport | None = None
        self._pace: float | None = None
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._best: float | None = None
        self._steps = 0
        self._updated = 0
        self._evaluations: list[Evaluation] = []

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Print a line, preceded by the time of day."""
        self._row(time.strftime("%H:%M:%S", time.gmtime()), line, style)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}", "yellow")

    @contextmanager
    def working(self, what: str) -> Iterator[ShowProgress]:
        """Show that `what` is being done as long as this block lasts.

        The block gets a function that says how far it is: ``progress("scoring", 64, 200)``.
        """
        activity = Activity(what)
        before, self._activity = self._activity, activity

        def progress(part: str, done: int, total: int) -> None:
            self._note(activity, part, done, total)

        self._redraw()
        try:
            yield progress
        finally:
            self._activity = before
            self._scoring = None
            self._redraw()

    def scoring(self, done: int, total: int, seconds: float) -> None:
        """Show how far slow scoring is, which began `seconds` ago and ends with all parts done."""
        if done == total:
            self._scoring = None
        elif self._scoring is None:
            self._scoring = Activity(self._activity.what if self._activity else "", seconds)
        if self._scoring is not None:
            self._note(self._scoring, "scoring", done, total)
        self._redraw()

    def _note(self, activity: Activity, part: str, done: int, total: int) -> None:
        """Take note of how far an activity is; without a terminal, print it now and then."""
        activity.note(part, done, total)
        if not self.terminal and activity.is_due():
            self.say(activity.line)

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and then how long it took."""
        start = time.monotonic()
        with self.working(f"loading {what}"):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print the settings of the run as an aligned table, and the time zone of later lines."""
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._row(escape_control(name).ljust(width), value)

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the pre-flight: each row has the fields of a `LevelSurvey`."""
        show_table(self._rich, rows, SURVEY, {})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Show a finished step (1, 2, ...) and print its events."""
        self._report = report
        self._steps += 1
        self._updated += has_update(report.metrics)
        if (step_time := report.metrics.get("step_time")) is not None:
            self._pace = smoothed(self._pace, step_time)
        if (reward := report.metrics.get("reward")) is not None:
            self._rewards.append(reward)
            self._best = reward if self._best is None else max(self._best, reward)

        if self.terminal:
            self._redraw()
        elif report.step % self.log_every == 0 or report.step == self.total_steps:
            self.say(step_line(report, self.total_steps, self._seconds_left, self.metric))

        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    @property
    def _seconds_left(self) -> float | None:
        """The seconds of the remaining steps; None before the first."""
        if self._pace is None or self._report is None:
            return None
        return self._pace * (self.total_steps - self._report.step)

    def _redraw(self) -> None:
        """Draw the panel, and below it what is being done. rich redraws them while time passes."""
        if not self.terminal:
            return
        parts: list[RenderableType] = [] if self._report is None else [self._drawn(self._report)]
        activity = self._scoring or self._activity
        if activity is not None:
            parts.append(activity)

        # What was drawn before the first panel leaves no trace.
        self._live.transient = self._report is None
        if not parts:
            self._live.stop()
            return
        self._live.update(Group(*parts))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def _drawn(self, report: StepReport) -> RenderableType:
        """Return the panel after a step."""
        view = RunView(
            self.total_steps,
            seconds_left=self._seconds_left,
            rewards=self._rewards,
            best=self._best,
            evaluations=self._evaluations,
            metric=self.metric,
            reward_range=self.reward_range,
            steps=self._steps,
            updated=self._updated,
        )
        return panel(report, view)

    def evaluation(self, line: Evaluation) -> None:
        """Print a line of eval.jsonl (see `evaluation_line`)."""
        self._evaluations.append(line)
        self._redraw()
        self.say(evaluation_line({"metric": self.metric, **line}))

    def summary(self, ending: Ending) -> None:
        """End the live panel; print verdict, evaluations, files and the commands to try next.

        A verdict that is not expected is in colour.
        """
        self._pace = None  # nothing is left to do, although the run may have ended early
        self._redraw()
        self._live.stop()
        tables = [list(ending.verdict)] if ending.verdict else []
        if ending.before or ending.after:
            tables.append(summary_table(ending.before, ending.after, self.metric))

        width = max(map(len, ending.files))
        files = [f"  {name:<{width}}  {path}" for name, path in ending.files.items()]
        tables.append(["files", *files])
        tables.append(["next", *(f"  {command}" for command in ending.next_commands)])

        for number, (title, *lines) in enumerate(tables):
            is_verdict = number == 0 and bool(ending.verdict)
            is_alarming = is_verdict and not ending.is_expected
            self._write("")
            self._write(title, "bold red" if is_alarming else "bold", wrap=is_verdict)
            for line in lines:
                self._write(line, wrap=is_verdict)

    def _row(self, head: str, text: str, style: str = "") -> None:
        """Print `text` beside `head`; a terminal wraps it within its own column."""
        if self.terminal:
            self._rich.print(
                columns(Text(head, "dim"), Text(escape_control(text), style, overflow="fold"))
            )
        else:
            self._write(f"{head}  {text}")

    def _write(self, line: str, style: str = "", wrap: bool = False) -> None:
        """Print `line`; without `wrap`, a path or a command in it can be copied whole."""
        if self.terminal:
            self._rich.print(Text(escape_control(line), style), soft_wrap=not wrap)
        else:
            encoded = escape_control(line).encode(self.encoding, "backslashreplace")
            print(encoded.decode(self.encoding), file=self.file, flush=True)

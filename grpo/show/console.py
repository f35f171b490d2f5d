"""The console of a run: a live panel on a terminal, plain lines of unlimited width elsewhere.

The modules `lines` and `panel` make the texts. Text from a model or a file passes `escape_control`
and goes to rich as `Text`, which is never parsed for markup. So no such text can move the cursor or
colour the screen. All clock times are UTC.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from data.text import escape_control
from grpo.evaluate import ShowProgress
from grpo.records import Ending, StepReport
from grpo.show.lines import Evaluation, evaluation_line, show_table, step_line, summary_table
from grpo.show.panel import History, columns, panel

# Without a terminal: the seconds that an activity takes before a line says how far it is, and the
# seconds between two such lines.
FIRST = 10.0
EVERY = 30.0

# The columns of the table of a pre-flight: heading, (key of the number, format).
SURVEY = {
    "level": ("level", "g"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".3f"),
    "reward\nstd": ("reward_std", ".3f"),
    "groups\nthat vary": ("varied", ".0%"),
    "any\nexact": ("any_exact", ".0%"),
    "truncated": ("truncated", ".0%"),
    "distinct\ntexts": ("distinct", ".1f"),
}


class Activity:
    """`what` is being done, and how far it is: "evaluating at 10 words: scoring 64/200, 12 s".

    An evaluation or a slow reward function may take minutes, in which nothing else is printed.
    """

    def __init__(self, what: str, seconds: float = 0.0):
        self.what = what
        self.part = ""
        self.start = time.monotonic() - seconds
        self._next = FIRST

    @property
    def line(self) -> str:
        """What is being done, how far it is, and for how long."""
        said = ": ".join(filter(None, (self.what, self.part)))
        return f"{said}, {time.monotonic() - self.start:.0f} s"

    def note(self, part: str, done: int, total: int) -> bool:
        """Take note of how far it is; return whether a program without a terminal says so now."""
        self.part = f"{part} {done:,}/{total:,}"
        seconds = time.monotonic() - self.start
        is_due = seconds >= self._next
        if is_due:
            self._next = seconds + EVERY
        return is_due

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
        self.history = History(total_steps, metric, reward_range)
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
        """Print the table of the pre-flight: each row has the fields of a `LevelSurvey`."""
        show_table(self._rich, rows, SURVEY, {})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Show a finished step (1, 2, ...) and print its events."""
        history = self.history
        history.add(report)
        if self.terminal:
            self._redraw()
        else:
            line = step_line(report, history.total_steps, history.seconds_left, history.metric)
            self.say(line)
        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    def evaluation(self, line: Evaluation) -> None:
        """Print a line of eval.jsonl (see `evaluation_line`)."""
        self.history.evaluations.append(line)
        self._redraw()
        self.say(evaluation_line({"metric": self.history.metric, **line}))

    def summary(self, ending: Ending) -> None:
        """End the live panel; print verdict, evaluations, files and the commands to try next.

        A verdict that is not expected is in colour.
        """
        self.history.pace = None  # nothing is left to do, although the run may have ended early
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
            tables.append(summary_table(ending.before, ending.after, self.history.metric))
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
            encoded = escape_control(line).encode(self.encoding, "backslashreplace")
            print(encoded.decode(self.encoding), file=self.file, flush=True)

    # --- what is being done -------------------------------------------------------------------

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

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and then how long it took."""
        start = time.monotonic()
        with self.working(f"loading {what}"):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")

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
        if activity.note(part, done, total) and not self.terminal:
            self.say(activity.line)

    def _redraw(self) -> None:
        """Draw the panel, and below it what is being done. rich redraws them while time passes."""
        if not self.terminal:
            return
        report = self.history.report
        drawn = None if report is None else panel(report, self.history)
        parts = [part for part in (drawn, self._scoring or self._activity) if part is not None]

        # What was drawn before the first panel leaves no trace.
        self._live.transient = report is None
        if not parts:
            self._live.stop()
            return
        self._live.update(Group(*parts))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

"""What a program is doing now: a line that moves on a terminal, and now and then a line elsewhere.

An evaluation or a slow reward function may take minutes, in which nothing else is printed.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from data.text import escape_control
from grpo.evaluate import ShowProgress

# Without a terminal: the seconds that an activity takes before a line says how far it is, and the
# seconds between two such lines.
FIRST = 10.0
EVERY = 30.0


class Activity:
    """`what` is being done, e.g. "evaluating at 10 words: scoring 64/200, 12 s".

    It began `seconds` ago.
    """

    def __init__(self, what: str, seconds: float = 0.0):
        self.what = what
        self.part = ""
        self.start = time.monotonic() - seconds
        self._next = FIRST

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.start

    @property
    def line(self) -> str:
        """What is being done, how far it is, and for how long."""
        said = ": ".join(filter(None, (self.what, self.part)))
        return f"{said}, {self.seconds:.0f} s"

    def note(self, part: str, done: int, total: int) -> None:
        """Take note of how far it is."""
        self.part = f"{part} {done:,}/{total:,}"

    def is_due(self) -> bool:
        """Return whether a program without a terminal prints the line now."""
        if self.seconds < self._next:
            return False
        self._next = self.seconds + EVERY
        return True

    def __rich__(self) -> Text:
        """Return the line as rich redraws it, four times a second."""
        return Text(escape_control(self.line), "dim")


class StatusLine:
    """Shows on standard error what a program does whose results go to standard output.

    A terminal gets a line that disappears at the end. Elsewhere a line is printed now and then, of
    an activity that takes long.
    """

    def __init__(self, program: str):
        self.program = program
        self.is_terminal = sys.stderr.isatty()
        self._activity = Activity("")

    @contextmanager
    def working(self, what: str) -> Iterator[ShowProgress]:
        """Show that `what` is being done as long as this block lasts; see `ShowProgress`."""
        self._activity = Activity(what)
        if not self.is_terminal:
            yield self._note
            return
        console = RichConsole(stderr=True, highlight=False, markup=False)
        with Live(self._activity, console=console, transient=True):
            yield self._note

    def scoring(self, done: int, total: int, seconds: float) -> None:
        """Show how far slow scoring is (see `tasks.base.watch_scoring`)."""
        self._note("scoring", done, total)

    def _note(self, part: str, done: int, total: int) -> None:
        self._activity.note(part, done, total)
        if not self.is_terminal and self._activity.is_due():
            print(f"{self.program}: {escape_control(self._activity.line)}", file=sys.stderr)

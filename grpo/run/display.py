"""The interface of everything that shows a run to its user."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo.evaluate import ShowProgress
from grpo.records import Ending, StepReport


class Display(Protocol):
    """Shows the messages of a run, e.g. `grpo.show.console.Console`."""

    def say(self, line: str, style: str = "") -> None:
        """Show a line."""

    def warn(self, line: str) -> None:
        """Show a warning."""

    def working(self, what: str) -> AbstractContextManager[ShowProgress]:
        """Show that `what` is being done as long as the block lasts.

        The block gets a function that says how far it is: ``progress("scoring", 64, 200)``.
        """

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Show a prompt as it is sent to the model."""

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the table of the pre-flight."""

    def step(self, report: StepReport) -> None:
        """Show a step."""

    def scoring(self, done: int, total: int, seconds: float) -> None:
        """Show how far slow scoring is, which began `seconds` ago and ends with all parts done."""

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Show a line of eval.jsonl."""

    def summary(self, ending: Ending) -> None:
        """Show how the run ended."""


@dataclass(frozen=True)
class Output:
    """Where a run speaks to its user, e.g. ``Output(Console(RunFormat(300)), [])``.

    `lost_streams` gets a line whenever standard output or standard error is lost.
    """

    console: Display
    lost_streams: list[str]

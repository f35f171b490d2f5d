"""What the views of `python -m grpo.inspect` share: the selection of lines, and JSON output."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from data.errors import UserError
from data.text import printable_json, quoted
from grpo.records import Group
from grpo.run.reader import RunData

Record = Mapping[str, Any]

# A head of a column -> the key of its figure in a record, and the figure's format.
Figures = Mapping[str, tuple[str, str]]


def chosen(
    lines: Sequence[Record],
    arguments: argparse.Namespace,
    is_wanted: Callable[[Record], bool] = lambda line: True,
) -> list[Record]:
    """Return the wanted lines that --from, --to, --level and --last leave."""
    kept = [
        line
        for line in lines
        if arguments.first <= line["step"] <= arguments.last_step
        and arguments.level in (None, line.get("level"))
        and is_wanted(line)
    ]
    return kept[-arguments.last :] if arguments.last else kept


def chosen_steps(run: RunData, arguments: argparse.Namespace) -> list[Record]:
    """Return the chosen lines of the run's metrics; raises UserError if there are none."""
    lines = chosen(run.metrics, arguments)
    require_steps(run, run.metrics)
    if not lines:
        raise UserError(f"{run.path}: no such steps; it has {len(run.metrics)}")
    return lines


def require_steps(run: RunData, stored: Sequence[Record]) -> None:
    """Raise UserError if nothing is `stored` of any step of the run."""
    if not stored:
        raise UserError(f"{run.path}: the run has made no step yet")


def check_sample(run: RunData, group: Group, sample: int) -> None:
    """Raise UserError unless the group has a completion `sample`."""
    if not 0 <= sample < len(group.completions):
        raise UserError(
            f"{run.path}: the group has no completion {sample}; it has 0 to "
            f"{len(group.completions) - 1}"
        )


def as_json(lines: Sequence[Record], arguments: argparse.Namespace, console: Console) -> bool:
    """With --json, print the lines as one JSON array. Return whether --json was given."""
    if arguments.json:
        console.file.write(printable_json(lines) + "\n")
    return arguments.json


def show_next(run: RunData, command: str, console: Console, before: str = "") -> None:
    """Print the command that shows more, after the text `before`."""
    line = f"{before}next: python -m grpo.inspect {quoted(run.path)} {command}"
    console.print(line, style="dim", soft_wrap=True)

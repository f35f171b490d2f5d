"""Tables of records for a terminal or a pipe, and the texts of their cells."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.text import escape_control
from grpo.records import Group

Record = Mapping[str, Any]

# The classes of groups, and the colour of each.
CLASS_STYLES = {
    "varied": "",
    "solved": "green",
    "failed": "red",
    "identical": "bold red",
    "tied": "yellow",
}

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

# What each class without variance means.
WHY = {
    "identical": "all completions identical",
    "solved": "all right",
    "failed": "all with the lowest reward",
    "tied": "different texts, equal rewards",
}


def show_table(
    console: Console,
    lines: Sequence[Record],
    figures: Mapping[str, tuple[str, str]],
    words: Mapping[str, Callable],
) -> None:
    """Print a table with a row for each line.

    `figures` are the columns of numbers: heading to (key, format). `words` are the columns of text
    after them: heading to a function of the line.
    """
    table = Table(box=None)
    for head in figures:
        table.add_column(head, justify="right", no_wrap=True)
    for head in words:
        table.add_column(head, overflow="ellipsis", no_wrap=True)

    for line in lines:
        numbers = [
            "-" if line.get(key) is None else format(line[key], style)
            for key, style in figures.values()
        ]
        table.add_row(
            *numbers,
            *(
                part if isinstance(part := word(line), Text) else Text(part)
                for word in words.values()
            ),
        )
    console.print(table)


def classes_of(line: Record) -> Text:
    """Return the number of groups of each class in a step, the degenerate ones in colour."""
    numbers = {name: line.get(f"groups/class/{name}") for name in CLASS_STYLES}
    return Text(", ").join(
        Text(f"{number:g} {name}", CLASS_STYLES[name]) for name, number in numbers.items() if number
    )


def class_of(line: Record) -> Text:
    """Return the class of a group, in its colour."""
    return Text(line["class"], CLASS_STYLES.get(line["class"], ""))


def done_to(line: Record) -> str:
    """Return what was done with a group, e.g. "kept" or "skipped (try 3)"."""
    tries = f" (try {line['attempt'] + 1})" if line["attempt"] else ""
    names = {"keep": "kept", "skip": "skipped", "resample": "resampled"}
    return names.get(line["action"], str(line["action"])) + tries


def trap_of(line: Record) -> str:
    """Return the group's common trap, "" without one."""
    return line["trap"] or ""


def advantage_range(group: Group) -> str:
    """Return the range of a group's advantages; "" if the group was not trained on."""
    numbers = list(
        chain.from_iterable(row if isinstance(row, list) else [row] for row in group.advantages)
    )
    return f"{min(numbers):+.2f} to {max(numbers):+.2f}" if numbers else ""


def advantage_of(group: Group, sample: int) -> str:
    """Return the advantage of a completion, or the range of its tokens' advantages."""
    if not group.advantages:
        return "none"
    advantage = group.advantages[sample]
    if isinstance(advantage, list):
        return f"{min(advantage):+.3f} to {max(advantage):+.3f} by token"
    return f"{advantage:+.3f}"


def said_of(parts: Record) -> str:
    """Return the parts of a score, e.g. "; matches 12, trap copies A"."""
    shown = []
    for name, value in parts.items():
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, float) else escape_control(str(value))
            shown.append(f"{name} {text}")
    return f"; {', '.join(shown)}" if shown else ""


def tint(logprob: float) -> str:
    """Return the colour of a token by its probability: none above 0.9, then by 0.5 and 0.1."""
    for least, colour in ((-0.105, ""), (-0.693, "green"), (-2.303, "yellow")):
        if logprob > least:
            return colour
    return "bold red"

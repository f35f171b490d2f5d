"""Tables of records for a terminal or a pipe, and the texts of their cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from data.text import escape_control
from grpo.records import Group

Record = Mapping[str, Any]

# Columns of space around a cell.
PADDING = 2

# A column of longer texts is made narrower, down to this, before other columns are left out.
TEXT = 30

# The classes of groups, and the colour of those that show that training is stuck.
CLASS_STYLES = {
    "varied": "",
    "solved": "",
    "failed": "red",
    "identical": "bold red",
    "tied": "yellow",
    "masked": "yellow",
}

# What was done with a group, by its action.
DONE_TO = {
    "keep": "kept",
    "skip": "skipped",
    "resample": "resampled",
    "demonstrate": "shown the right answer",
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


def show_table(
    console: Console,
    lines: Sequence[Record],
    figures: Mapping[str, tuple[str, str]],
    words: Mapping[str, Callable],
    optional: Sequence[str] = (),
) -> None:
    """Print a table with a row for each line.

    `figures` are the columns of numbers: heading to (key, format). `words` are the columns of text
    after them: heading to a function of the line. On a narrow screen the `optional` columns are
    left out in this order, until the numbers fit, and a line says which.
    """
    columns = [
        _Column(head, [_number(line, key, style) for line in lines], is_number=True)
        for head, (key, style) in figures.items()
    ]
    columns += [
        _Column(head, [_as_text(word(line)) for line in lines]) for head, word in words.items()
    ]
    widths = {
        column.head: PADDING + (column.width if column.is_number else min(column.width, TEXT))
        for column in columns
    }
    left_out = columns_left_out(widths, optional, console.width)
    shown = [column for column in columns if column.head not in left_out]
    _narrow(shown, console.width)

    # Not a `rich.table.Table`, which takes 4 s for 5,000 rows.
    console.print(Segments(_segments(shown, console)), soft_wrap=True, end="")
    note_left_out(left_out, console)


class _Column:
    """A column of a table: its heading and its cells."""

    def __init__(self, head: str, cells: Sequence[Text], is_number: bool = False):
        self.head = head
        self.heading = head.split("\n")
        self.cells = cells
        self.is_number = is_number
        self.width = max([*map(cell_len, self.heading), *(cell.cell_len for cell in cells)])

    def padded(self, cell: Text, console: Console) -> Iterator[Segment]:
        """Yield a cell between its spaces: numbers to the right, texts to the left."""
        if cell.cell_len > self.width:
            cell = cell.copy()
            cell.truncate(self.width, overflow="ellipsis")
        space = " " * (self.width - cell.cell_len)
        before, after = (space, "") if self.is_number else ("", space)

        yield Segment(f" {before}")
        if cell.style or cell.spans:
            style = console.get_style(cell.style)
            yield from Segment.apply_style(cell.render(console), style)
        else:
            yield Segment(cell.plain)
        yield Segment(f"{after} ")


def _segments(columns: Sequence[_Column], console: Console) -> Iterator[Segment]:
    """Yield the heading of a table, which may have several lines, and its rows."""
    height = max(len(column.heading) for column in columns)
    headings = [[""] * (height - len(column.heading)) + column.heading for column in columns]
    rows = [[Text(part, "bold", end="") for part in line] for line in zip(*headings, strict=True)]
    for row in chain(rows, zip(*(column.cells for column in columns), strict=True)):
        for column, cell in zip(columns, row, strict=True):
            yield from column.padded(cell, console)
        yield Segment.line()


def _number(line: Record, key: str, style: str) -> Text:
    """Return a cell of a column of numbers."""
    return Text("-" if line.get(key) is None else format(line[key], style), end="")


def _as_text(part: str | Text) -> Text:
    return part if isinstance(part, Text) else Text(part, end="")


def _narrow(columns: Sequence[_Column], width: int) -> None:
    """Make texts narrower until the table fits a screen of this `width`; numbers stay whole."""
    excess = sum(column.width + PADDING for column in columns) - width
    for column in reversed(columns):
        if excess > 0 and not column.is_number:
            least = max(map(cell_len, column.heading))
            cut = min(excess, max(0, column.width - least))
            column.width -= cut
            excess -= cut


def columns_left_out(widths: Mapping[str, int], optional: Sequence[str], width: int) -> list[str]:
    """Return which of the `optional` columns a screen of this `width` has no room for.

    `widths` are those of all columns, with the space around them, by their headings.
    """
    left_out: list[str] = []
    total = sum(widths.values())
    for head in optional:
        if total <= width:
            break
        if head in widths:
            total -= widths[head]
            left_out.append(head)
    return left_out


def note_left_out(left_out: Sequence[str], console: Console) -> None:
    """Print which columns were left out, if any were."""
    if left_out:
        names = ", ".join(head.replace("\n", " ") for head in left_out)
        note = f"left out at {console.width} columns: {names} (--json has all)"
        console.print(Text(note, "dim"), soft_wrap=not console.is_terminal)


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
    return DONE_TO.get(line["action"], str(line["action"])) + tries


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


def tint(logprob: float | None) -> str:
    """Return the colour of a token by its probability: none above 0.9, then by 0.5 and 0.1.

    A token that was not sampled (None) has none.
    """
    if logprob is None:
        return ""
    for least, colour in ((-0.105, ""), (-0.693, "green"), (-2.303, "yellow")):
        if logprob > least:
            return colour
    return "bold red"

"""A run as lines of text: its steps, its evaluations, and tables of records.

Text from a model or a file is escaped when it is printed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from data.errors import escape_control
from grpo.records import StepReport, level_name

# The metrics in the line of a step, and their formats. Widths are fixed, so that the lines of a run
# form columns. "{name}" is the name of the score.
FIGURES = {
    "level": "  level {:>3g}",
    "reward": "  reward {:.3f}",
    "group_std": " ± {:.3f}",
    "value": "  {name} {:.3f}",
    "groups/kept": "  trained on {:>2g}",
    "groups/count": " of {:g} groups",
    "groups/resampled": "  resampled {:>2g}",
    "temperature": "  T {:.2f}",
    "completions/clipped_ratio": "  truncated {:>4.0%}",
    "completions/mean_length": "  {:>5.1f} tokens",
    "tokens_per_second": "  {:>7,.0f} tok/s",
    "step_time": "  {:>5.1f} s",
    "memory_gb": "  {:>5.1f} GB",
}

# What precedes an evaluation that is no report, by its purpose.
OCCASIONS = {
    "warm start": "imitating: ",
    "imitation": "after imitation: ",
    "promotion": "validation check: ",
}

# A line of eval.jsonl.
Evaluation = Mapping[str, Any]


# --- steps ------------------------------------------------------------------------------------


def step_line(
    report: StepReport, total_steps: int, seconds_left: float | None = None, metric: str = "score"
) -> str:
    """Return a step as one line of aligned figures. `metric` is the name of the score."""
    width = len(str(total_steps))
    head = f"{control_mark(report.metrics)}step {report.step:>{width}}/{total_steps}"
    metrics = report.metrics
    figures = "".join(
        style.format(metrics[key], name=metric)
        for key, style in FIGURES.items()
        if metrics.get(key) is not None
    )
    eta = "" if seconds_left is None else f"ETA {clock_time(seconds_left):>8}"
    return "  ".join(filter(None, (head, figures.lstrip(), eta)))


def control_mark(line: Mapping[str, Any]) -> str:
    """Return the mark that precedes every line of a control experiment; "" for an ordinary run."""
    return f"CONTROL {line['control']}  " if line.get("control") else ""


def clock_time(seconds: float) -> str:
    """Return a span of `seconds` as minutes:seconds, or hours:minutes:seconds from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- evaluations ------------------------------------------------------------------------------


def evaluation_line(line: Evaluation) -> str:
    """Return a line of eval.jsonl as a sentence.

    `metric` in the line is the name of the score, `unit` what a level counts ("words"; "" for a
    level that counts nothing).
    """
    split = "training" if line["split"] == "train" else "held-out"
    details = f"{counted(line)}, {sampling_name(line)}, exact {line['exact']:.3g}"
    if "exact_low" in line:
        details += f" [{line['exact_low']:.3f}, {line['exact_high']:.3f}]"
    if line.get("truncated"):
        details += f", truncated {line['truncated']:.3g}"
    if line.get("dropped"):
        details += f"; {line['dropped']} dropped: the policy was trained on them"
    if line.get("too_long"):
        details += f"; {line['too_long']} dropped: too long for the context or the budget"

    mark = control_mark(line) + OCCASIONS.get(line.get("purpose", ""), "")
    level = level_name(line["level"], line.get("unit", "words"))
    score = f"{line.get('metric', 'score')} at {level}: {interval(line)}"
    return f"{mark}{split} {score} ({details})"


def interval(line: Evaluation) -> str:
    """Return the mean of an evaluation with its 95 % interval."""
    return f"{line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"


def counted(line: Evaluation) -> str:
    """Return the number of problems of an evaluation, and the number asked for if higher."""
    if line["n"] < line.get("asked", 0):
        return f"n = {line['n']} distinct problems, {line['asked']} asked for"
    return f"n = {line['n']}"


def sampling_name(line: Evaluation) -> str:
    """Return how the completions of an evaluation were sampled."""
    return f"temperature {line['temperature']:g}" if line["temperature"] else "greedy"


def summary_table(
    before: Sequence[Evaluation], after: Sequence[Evaluation], metric: str = "score"
) -> list[str]:
    """Return the evaluations before and after training as a table.

    Its lines: title, head, and a row for each level and temperature. A missing evaluation is a
    dash.
    """
    old, new = (
        {(line["level"], line["temperature"]): line for line in lines} for lines in (before, after)
    )
    first = [*before, *after][0]
    counts = ", ".join(map(str, sorted({line["n"] for line in (*before, *after)})))
    table = [
        f"{control_mark(first)}held-out {first.get('metric', metric)}, mean [95 % interval], "
        f"n = {counts}",
        f"{'level':>5}  {'sampling':<8}  {'before':<20}  {'after':<20}  exact",
    ]

    for level, temperature in sorted(old.keys() | new.keys()):
        pair = [lines.get((level, temperature)) for lines in (old, new)]
        sampling = f"T {temperature:g}" if temperature else "greedy"
        means = "  ".join(f"{interval(line) if line else '-':<20}" for line in pair)
        exact = " → ".join(f"{line['exact']:.3f}" if line else "  -  " for line in pair)
        table.append(f"{level:>5}  {sampling:<8}  {means}  {exact}")
    return table


# --- tables -----------------------------------------------------------------------------------


def show_table(
    console: Console,
    lines: Sequence[Mapping[str, Any]],
    figures: Mapping[str, tuple[str, str]],
    words: Mapping[str, Callable[[Mapping[str, Any]], str | Text]],
) -> None:
    """Print a table with a row for each line, cut at the edge of the screen.

    `figures` are the columns of numbers: heading to (key, format). `words` are the columns of text
    after them: heading to a function of the line.
    """
    columns: dict[str, list[Text]] = {}
    for head, (key, style) in figures.items():
        numbers = [line.get(key) for line in lines]
        columns[head] = [Text("-" if x is None else format(x, style)) for x in numbers]
    for head, word in words.items():
        cells = [word(line) for line in lines]
        columns[head] = [Text(escape_control(x)) if isinstance(x, str) else x for x in cells]

    for head, column in columns.items():
        column.insert(0, Text(head, "bold"))
        width = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("left" if head in words else "right", width)
    # Not a `rich.table.Table`, which takes 4 s for 5,000 rows.
    rows = [Text("  ").join(row) for row in zip(*columns.values())]
    console.print(Text("\n").join(rows), no_wrap=True, overflow="ellipsis")

"""Results of an evaluation on the console: tables, remarks, and the worst completions."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from data.text import escape_control
from grpo.evaluate import truncation_warning
from grpo.records import Group
from grpo.tools.evaluation.figures import ALL_KINDS

# Columns, if standard output is no terminal.
WIDTH = 100


def show(results: list[dict[str, Any]], metric: str) -> None:
    """Print the held-out results, those on foreign kinds of text, and the worst completions.

    `metric` is what the task calls its score.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    first = results[0]
    control = f"CONTROL {first['control']}: " if "control" in first else ""
    title = escape_control(f"{control}{first['model']}: {metric} on")

    own = [result for result in results if "foreign" not in result]
    foreign = [result for result in results if "foreign" in result]
    console.print(_table(own, f"{title} {first['dataset'] or _split_name(first)}"))
    if foreign:
        console.print(_table(foreign, f"{title} foreign kinds of text"))

    for line in remarks(results):
        console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as the model was sent it", style="bold")
    for line in first["sent"]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    for result in results:
        for group in result["groups"]:
            _show_worst(console, _name(result), group)


def _table(results: list[dict[str, Any]], title: str) -> Table:
    """Return a table with a row for each result."""
    rows = [_cells(result) for result in results]
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row, result in zip(rows, results):
        table.add_row(*row.values(), end_section=result.get("foreign") == ALL_KINDS)
    return table


def _cells(result: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table, by the names of its columns."""
    if "foreign" in result:
        about = {"kind": result["foreign"]}
    else:
        about = {"sampling": _sampling_text(result), "budget": str(result["budget"])}

    samples = f" × {result['samples']}" if result["samples"] > 1 else ""
    return {
        "level": str(result["level"]),
        "n": f"{result['n']}{samples}",
        **about,
        "mean": f"{result['mean']:.4f}",
        "95 % interval": f"{result['ci_low']:.4f} … {result['ci_high']:.4f}",
        "exact": f"{result['exact']:.3f}",
        "truncated": f"{result['truncated']:.3f}",
        "trained on": str(result["dropped"]),
    }


def _split_name(result: dict[str, Any]) -> str:
    """Return which texts were evaluated on, in words."""
    texts = result.get("texts")
    return f"the {result['split']} split" + (f" of {texts}" if texts else "")


def _name(result: dict[str, Any]) -> str:
    """Return what a result is about: "level 25", "level 25, foreign tables"."""
    kind = f", foreign {result['foreign']}" if "foreign" in result else ""
    return f"level {result['level']}{kind}"


def _sampling_text(result: dict[str, Any]) -> str:
    """Return how completions were sampled: "T 0.7, top-p 0.9"."""
    if result["temperature"] == 0:
        return "greedy"
    top_k = f", top-k {result['top_k']}" if result["top_k"] else ""
    top_p = f", top-p {result['top_p']:g}" if result["top_p"] < 1 else ""
    return f"T {result['temperature']:g}{top_k}{top_p}"


def remarks(results: list[dict[str, Any]]) -> list[str]:
    """Return what a reader must know besides the figures of the table."""
    lines = []
    for result in results:
        name = _name(result)
        if result["n"] < result["asked"]:
            lines.append(f"{result['n']} distinct problems at {name}; {result['asked']} asked for")
        if result["too_long"]:
            lines.append(
                f"{name}: {result['too_long']} problems do not fit the model's context or the "
                "budget and were left out"
            )
        if warning := truncation_warning(result):
            lines.append(f"warning: {warning}")
    return lines


def _show_worst(console: Console, name: str, group: Group) -> None:
    """Print the worst completion of `group` and its target, unless it is right."""
    score, completion = min(zip(group.scores, group.completions), key=lambda pair: pair[0].value)
    if score.exact:
        return
    console.print(f"\n{name}, score {score.value:.4f}", style="bold")
    console.print(f"  wanted: {escape_control(group.problem.target)}", markup=False)
    console.print(f"  wrote:  {escape_control(completion.text)}", markup=False)

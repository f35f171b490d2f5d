"""Results of an evaluation on the console: tables, remarks, and the worst completions."""

import sys
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from data.text import escape_control
from grpo.evaluate import truncation_warning
from grpo.records import Group
from grpo.show.tables import columns_left_out, note_left_out
from grpo.tools.evaluation.figures import ALL_KINDS

# Columns, if standard output is not a terminal.
WIDTH = 100

# Columns that a narrow screen leaves out, in this order.
OPTIONAL = ("budget", "sampling", "truncated", "trained on")

# Columns of space and lines around a cell.
PADDING = 3


def show(results: list[dict[str, Any]], metric: str) -> None:
    """Print the held-out results, those on foreign kinds of text, and the worst completions.

    `metric` is what the task calls its score.
    """
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    first = results[0]
    models = list(dict.fromkeys(result["model"] for result in results))
    control = f"CONTROL {first['control']}: " if "control" in first else ""
    whose = f"{models[0]}: " if len(models) == 1 else ""
    title = escape_control(f"{control}{whose}{metric} on")

    own = [result for result in results if "foreign" not in result]
    foreign = [result for result in results if "foreign" in result]
    _show_table(console, own, f"{title} {first['dataset'] or _split_name(first)}")
    if foreign:
        _show_table(console, foreign, f"{title} foreign kinds of text")
    if "pass_at" in first:
        console.print(_samples_table(results))
    if len(models) > 1:
        console.print(_differences(results, metric))

    for line in remarks(results):
        console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as it was sent to the model", style="bold")
    for line in first["sent"]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    for name, result in _named(results):
        for group in result["worst"]:
            _show_worst(console, name, group)


def _show_table(console: Console, results: list[dict[str, Any]], title: str) -> None:
    """Print a table with a row for each result, without the columns that do not fit."""
    shows_model = len({result["model"] for result in results}) > 1
    rows = [
        ({"model": escape_control(result["model"])} if shows_model else {}) | _cells(result)
        for result in results
    ]
    widths = {
        name: max(cell_len(name), *(cell_len(row[name]) for row in rows)) + PADDING
        for name in rows[0]
    }
    left_out = columns_left_out(widths, OPTIONAL, console.width - 1)

    table = Table(title=title, title_justify="left")
    shown = [name for name in rows[0] if name not in left_out]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row, result in zip(rows, results):
        is_last = result.get("foreign") == ALL_KINDS
        table.add_row(*(row[name] for name in shown), end_section=is_last)
    console.print(table)
    note_left_out(left_out, console)


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


def _samples_table(results: list[dict[str, Any]]) -> Table:
    """Return the table of pass@k and of the majority's answers."""
    table = Table(title="several samples of each problem", title_justify="left")
    for name in ("model", "level", "figure", "mean", "95 % interval"):
        table.add_column(name, justify="right", overflow="fold")
    for result in results:
        of_model = escape_control(result["model"]), _name(result)
        entries = [(f"pass@{entry['k']}", entry) for entry in result["pass_at"]]
        entries.append((f"maj@{result['samples']}", result["majority"]))
        for figure, entry in entries:
            interval = f"{entry['ci_low']:.4f} … {entry['ci_high']:.4f}"
            table.add_row(*of_model, figure, f"{entry['mean']:.4f}", interval)
    return table


def _differences(results: list[dict[str, Any]], metric: str) -> Table:
    """Return the table of how each model differs from the first one."""
    first = results[0]["model"]
    table = Table(title=f"{metric}, difference to {escape_control(first)}", title_justify="left")
    for name in ("model", "level", "n", "difference", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=name != "model", overflow="fold")

    for result in results:
        if found := result.get("difference"):
            table.add_row(
                escape_control(result["model"]),
                _name(result),
                str(found["n"]),
                f"{found['mean']:+.4f}",
                f"{found['ci_low']:+.4f} … {found['ci_high']:+.4f}",
            )
    return table


def _split_name(result: dict[str, Any]) -> str:
    """Return the name of the texts that were evaluated on."""
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
    """Return what a reader must know in addition to the figures of the table."""
    lines = []
    for name, result in _named(results):
        if result["n"] < result["asked"]:
            lines.append(f"{result['n']} distinct problems at {name}; {result['asked']} asked for")
        if result["too_long"]:
            lines.append(
                f"{name}: {result['too_long']} problems do not fit the model's context or the "
                "budget and were left out"
            )

        # Only models behind an endpoint have these.
        if result.get("failed"):
            lines.append(
                f"warning: {name}: {result['failed']} requests failed; their problems are left "
                "out, and the same command asks for them again"
            )
        for argument in result.get("left_out", []):
            lines.append(
                f"warning: {name}: the server does not know {argument}, so it was left out"
            )
        if "completion_tokens" in result:
            lines.append(f"{name}: {_tokens(result)}")

        if warning := truncation_warning(result, name):
            lines.append(f"warning: {warning}")
    return lines


def _named(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each result with what it is about, and with its model if there are several."""
    has_several = len({result["model"] for result in results}) > 1
    return [
        (f"{escape_control(result['model'])}, {_name(result)}", result)
        if has_several
        else (_name(result), result)
        for result in results
    ]


def _tokens(result: dict[str, Any]) -> str:
    """Return how many tokens a server has counted."""
    if not (result["prompt_tokens"] or result["completion_tokens"]):
        return "the server counted no tokens"
    return (
        f"{result['prompt_tokens']:,} prompt tokens and {result['completion_tokens']:,} completion "
        "tokens"
    )


def _show_worst(console: Console, name: str, group: Group) -> None:
    """Print the worst completion of `group`, and its target if it has one, unless it is right."""
    score, completion = min(zip(group.scores, group.completions), key=lambda pair: pair[0].value)
    if score.exact:
        return
    console.print(f"\n{name}, score {score.value:.4f}", style="bold")
    if group.problem.target.strip():
        console.print(f"  wanted: {escape_control(group.problem.target)}", markup=False)
    console.print(f"  wrote:  {escape_control(completion.text)}", markup=False)

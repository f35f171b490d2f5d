"""Results of an evaluation: tables and remarks, figures of several samples, the file of samples."""

import json
import sys
from collections.abc import Sequence
from math import comb
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from data.text import escape_control
from grpo.evaluate import truncation_warning
from grpo.model.prompts import middle_left_out
from grpo.records import Group
from grpo.statistics import mean_interval

Result = dict[str, Any]

# Groups of each result whose worst completion is shown.
WORST = 2

# Columns, if standard output is not a terminal.
WIDTH = 100


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the probability that one of k samples is right, estimated from `right` ones of n.

    The estimator of Chen et al. 2021 (arXiv:2107.03374) has no bias.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 0 <= right <= n and 1 <= k <= n
    return 1 - comb(n - right, k) / comb(n, k)


def repeated_figures(groups: Sequence[Group]) -> dict[str, Any]:
    """Return pass@k for k = 1, 2, 4, ... and the number of samples; {} if there is one sample each.

    For example ``{"pass_at": [{"k": 1, "mean": 0.25, "ci_low": 0.2, "ci_high": 0.3}, ...]}``.
    Intervals are over problems: the samples of one problem are not independent.
    """
    samples = min(len(group.scores) for group in groups)
    if samples == 1:
        return {}

    rights = [[score.exact for score in group.scores] for group in groups]
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    pass_at = []
    for k in (*powers, samples):
        values = [pass_at_k(len(right), sum(right), k) for right in rights]
        low, high = mean_interval(values)
        pass_at.append({"k": k, "mean": fmean(values), "ci_low": low, "ci_high": high})
    return {"pass_at": pass_at}


def as_json(results: Sequence[Result]) -> bytes:
    """Return the content of --json: the figures of each result, and all answers by problem."""
    lines = []
    for result in results:
        answers = [
            {
                "key": group.problem.key,
                "prompt": group.problem.prompt,
                "target": group.problem.target,
                "completions": group.texts,
                "scores": [score.value for score in group.scores],
                "exact": [bool(score.exact) for score in group.scores],
            }
            for group in result["groups"]
        ]
        figures = {key: x for key, x in result.items() if key not in ("sent", "groups")}
        lines.append({**figures, "prompt": "\n".join(result["sent"]), "answers": answers})
    return (json.dumps(lines, indent=1) + "\n").encode()


def show(results: Sequence[Result], metric: str) -> None:
    """Print the results, several samples and differences beside them, and the worst completions.

    `metric` is what the task calls its score.
    """
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    first = results[0]
    models = list(dict.fromkeys(result["model"] for result in results))
    control = f"CONTROL {first['control']}: " if "control" in first else ""
    whose = f"{models[0]}: " if len(models) == 1 else ""
    texts = f" of {first['texts']}" if "texts" in first else ""
    source = first["dataset"] or f"the {first['split']} split{texts}"
    tables = {
        f"{control}{whose}{metric} on {source}": list(map(_row, results)),
        "several samples of each problem": [
            {**_head(result), "figure": f"pass@{entry['k']}", **_mean(entry)}
            for result in results
            for entry in result.get("pass_at", [])
        ],
        f"{metric}, difference to {models[0]}": [
            {**_head(result), "n": str(found["n"]), **_mean(found, "+")}
            for result in results
            if (found := result.get("difference"))
        ],
    }
    for title, rows in tables.items():
        names = [name for name in rows[0] if name != "model" or len(models) > 1] if rows else []
        table = Table(title=escape_control(title), title_justify="left")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*(escape_control(row[name]) for name in names))
        if rows:
            console.print(table)

    for line in remarks(results):
        console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as it was sent to the model", style="bold")
    for line in middle_left_out(first["sent"]):
        console.print(f"  {line}", soft_wrap=True)
    for name, result in _named(results):
        _show_worst(console, name, result["groups"])


def _head(result: Result) -> dict[str, str]:
    """Return the first columns of a table: which model, and on what."""
    kind = f", {result['foreign']}" if "foreign" in result else ""
    return {"model": result["model"], "level": f"{result['level']}{kind}"}


def _name(result: Result) -> str:
    """Return what a result is about: "level 25", "level 25, foreign tables"."""
    kind = f", foreign {result['foreign']}" if "foreign" in result else ""
    return f"level {result['level']}{kind}"


def _row(result: Result) -> dict[str, str]:
    """Return a row of the main table, by the names of its columns."""
    sampling = "greedy" if result["temperature"] == 0 else f"T {result['temperature']:g}"
    if sampling != "greedy" and result["top_p"] < 1:
        sampling += f", top-p {result['top_p']:g}"
    samples = f" × {result['samples']}" if result["samples"] > 1 else ""
    return {
        **_head(result),
        "n": f"{result['n']}{samples}",
        "sampling": sampling,
        "budget": str(result["budget"]),
        **_mean(result),
        "exact": f"{result['exact']:.3f}",
        "truncated": f"{result['truncated']:.3f}",
        "trained on": str(result["dropped"]),
    }


def _mean(entry: Result, sign: str = "") -> dict[str, str]:
    interval = f"{entry['ci_low']:{sign}.4f} … {entry['ci_high']:{sign}.4f}"
    return {"mean": f"{entry['mean']:{sign}.4f}", "95 % interval": interval}


def remarks(results: Sequence[Result]) -> list[str]:
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
        if warning := truncation_warning(result, name):
            lines.append(f"warning: {warning}")
    return lines


def _named(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Return each result with what it is about, and with its model if there are several."""
    has_several = len({result["model"] for result in results}) > 1
    return [
        (
            f"{escape_control(result['model'])}, {_name(result)}" if has_several else _name(result),
            result,
        )
        for result in results
    ]


def _show_worst(console: Console, name: str, groups: Sequence[Group]) -> None:
    """Print the worst completions of `groups`, and their targets, unless they are right."""
    by_value = sorted(groups, key=lambda group: min(score.value for score in group.scores))
    for group in by_value[:WORST]:
        pairs = zip(group.scores, group.completions)
        score, completion = min(pairs, key=lambda pair: pair[0].value)
        if score.exact:
            return
        console.print(f"\n{name}, score {score.value:.4f}", style="bold")
        if group.problem.target.strip():
            console.print(f"  wanted: {escape_control(group.problem.target)}")
        console.print(f"  wrote:  {escape_control(completion.text)}")

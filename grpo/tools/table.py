"""Results of an evaluation: tables and remarks, figures of several samples, the file of samples."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from data.errors import escape_control
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


def add_differences(results: Sequence[Result]) -> None:
    """Add to each result how its model differs from the first one, problem by problem.

    Only problems that both were given count. A result of the first model gets nothing, nor does one
    without such problems.
    """
    first = results[0]["model"]
    of_first: dict[tuple, dict[str, float]] = {}
    for result in results:
        place = result["level"], result.get("foreign")
        values = {
            group.problem.key: fmean(score.value for score in group.scores)
            for group in result["groups"]
        }
        if result["model"] == first:
            of_first[place] = values
            continue
        others = of_first.get(place, {})
        differences = [values[key] - others[key] for key in sorted(values.keys() & others.keys())]
        if differences:
            low, high = mean_interval(differences, bounds=(-1.0, 1.0))
            figures = {"mean": fmean(differences), "ci_low": low, "ci_high": high}
            result["difference"] = {"to": first, "n": len(differences), **figures}


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


# --- what is printed --------------------------------------------------------------------------


def show(results: Sequence[Result], metric: str) -> None:
    """Print the results, several samples and differences beside them, and the worst completions.

    `metric` is what the task calls its score.
    """
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    first = results[0]
    has_several = len({result["model"] for result in results}) > 1
    control = f"CONTROL {first['control']}: " if "control" in first else ""
    whose = "" if has_several else f"{first['model']}: "
    texts = f" of {first['texts']}" if "texts" in first else ""
    source = first["dataset"] or f"the {first['split']} split{texts}"

    rows: list[dict[str, str]] = []
    samples: list[dict[str, str]] = []
    differences: list[dict[str, str]] = []
    for result in results:
        kind = f", {result['foreign']}" if "foreign" in result else ""
        head = {"model": result["model"]} if has_several else {}
        head["level"] = f"{result['level']}{kind}"
        rows.append(head | _row(result))
        for entry in result.get("pass_at", []):
            samples.append({**head, "figure": f"pass@{entry['k']}", **_mean(entry)})
        if difference := result.get("difference"):
            differences.append({**head, "n": str(difference["n"]), **_mean(difference, "+")})
    _print_table(console, f"{control}{whose}{metric} on {source}", rows)
    _print_table(console, "several samples of each problem", samples)
    _print_table(console, f"{metric}, difference to {first['model']}", differences)

    names = [_name(result, has_several) for result in results]
    for name, result in zip(names, results):
        for line in _remarks(name, result):
            console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as it was sent to the model", style="bold")
    for line in middle_left_out(first["sent"]):
        console.print(f"  {line}", soft_wrap=True)
    for name, result in zip(names, results):
        _show_worst(console, name, result["groups"])


def _print_table(console: Console, title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows, whose keys are the columns; nothing if there is no row."""
    if not rows:
        return
    table = Table(title=escape_control(title), title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape_control, row.values()))
    console.print(table)


def _name(result: Result, has_several: bool) -> str:
    """Return what a result is about: "level 25", "runs/a, level 25, foreign tables"."""
    model = f"{escape_control(result['model'])}, " if has_several else ""
    kind = f", foreign {result['foreign']}" if "foreign" in result else ""
    return f"{model}level {result['level']}{kind}"


def _row(result: Result) -> dict[str, str]:
    """Return a row of the main table, by the names of its columns."""
    sampling = "greedy" if result["temperature"] == 0 else f"T {result['temperature']:g}"
    if sampling != "greedy" and result["top_p"] < 1:
        sampling += f", top-p {result['top_p']:g}"
    samples = f" × {result['samples']}" if result["samples"] > 1 else ""
    return {
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


def _remarks(name: str, result: Result) -> Iterator[str]:
    """Yield what a reader must know in addition to the figures of a result, which is of `name`."""
    if result["n"] < result["asked"]:
        yield f"{result['n']} distinct problems at {name}; {result['asked']} asked for"
    if result["too_long"]:
        yield (
            f"{name}: {result['too_long']} problems do not fit the model's context or the budget "
            "and were left out"
        )
    if warning := truncation_warning(result, name):
        yield f"warning: {warning}"


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

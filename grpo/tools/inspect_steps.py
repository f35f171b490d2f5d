"""The views of `python -m grpo.inspect` over steps and groups: steps, step, degenerate, compare.

Each takes the run, the flags and the console.
"""

import argparse
from collections.abc import Callable
from operator import itemgetter
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.records import WHY
from grpo.run.reader import RunData, load_run
from grpo.run.rollouts import summaries
from grpo.show.lines import interval
from grpo.show.tables import (
    advantage_range,
    class_of,
    classes_of,
    done_to,
    show_table,
    trap_of,
)
from grpo.tools.inspect_common import (
    Record,
    as_json,
    chosen,
    chosen_steps,
    require_steps,
    show_next,
)

# The columns of `steps`, from a line of metrics.jsonl.
STEP_FIGURES = {
    "step": ("step", "d"),
    "level": ("level", "d"),
    "reward": ("reward", ".3f"),
    "std": ("group_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "groups": ("groups/count", "d"),
    "kept": ("groups/kept", "d"),
    "T": ("temperature", ".2f"),
    "distinct": ("distinct_completions", ".1f"),
    "entropy": ("entropy", ".3f"),
    "KL": ("kl", ".4f"),
    "grad norm": ("grad_norm", ".3f"),
    "tokens": ("completions/mean_length", ".0f"),
    "time (s)": ("step_time", ".1f"),
}

# The columns of `steps` that a narrow screen leaves out, in this order.
OPTIONAL_IN_STEPS = (
    "KL",
    "T",
    "distinct",
    "grad norm",
    "tokens",
    "entropy",
    "level",
    "std",
    "time (s)",
    "exact",
    "groups",
    "score",
    "classes",
)

# The columns of `step` and `degenerate`, from the summary of a group.
GROUP_FIGURES = {
    "group": ("group", "d"),
    "level": ("level", "d"),
    "T": ("temperature", ".2f"),
    "reward": ("reward", ".3f"),
    "std": ("reward_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "distinct": ("distinct", "d"),
}

# The columns of `step` and `degenerate` that a narrow screen leaves out, in this order.
OPTIONAL_IN_GROUPS = ("T", "level", "exact", "distinct", "score", "advantages", "trap", "std")

# What `compare` averages over the last steps: the head of a row -> a key of metrics.jsonl.
COMPARED = {
    "reward": "reward",
    "score": "value",
    "std": "group_std",
    "entropy": "entropy",
    "grad norm": "grad_norm",
}
COMPARED_STEPS = 10

# The kinds of rollouts that were sampled for training.
TRAINED_KINDS = ("step", "failed")

# The settings that `compare` shows.
COMPARED_SETTINGS = (
    "task",
    "level",
    "curriculum",
    "reward",
    "model",
    "start",
    "loss",
    "credit",
    "on_degenerate",
    "seed",
)


def show_steps(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each step."""
    lines = chosen_steps(run, arguments)
    if as_json(lines, arguments, console):
        return

    # Leave out a column if no step has its figure.
    figures = {
        head: (key, style)
        for head, (key, style) in STEP_FIGURES.items()
        if any(line.get(key) is not None for line in lines)
    }
    show_table(console, lines, figures, {"classes": classes_of}, OPTIONAL_IN_STEPS)
    show_next(run, f"step {lines[-1]['step']}", console)


def show_step(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each group of a step."""
    groups = run.groups(arguments.step, arguments.kind)
    lines = [
        {
            "step": arguments.step,
            **line,
            "advantages": advantage_range(group),
            "prompt": group.problem.prompt,
        }
        for line, group in zip(summaries(groups), groups)
    ]
    if as_json(lines, arguments, console):
        return

    # Only groups that were sampled for training have a class, and something done with them.
    words: dict[str, Callable[[Record], Any]] = {}
    if arguments.kind in TRAINED_KINDS:
        words = {"class": class_of, "done": done_to, "advantages": itemgetter("advantages")}
    words["trap"] = trap_of
    show_table(console, lines, GROUP_FIGURES, words, OPTIONAL_IN_GROUPS)

    widest = max(lines, key=lambda line: line["reward_std"])
    kind = "" if arguments.kind == "step" else f" --kind {arguments.kind}"
    show_next(run, f"group {arguments.step} {widest['group']}{kind}", console)


def show_degenerate(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the groups without gradient."""

    def is_degenerate(line: Record) -> bool:
        return line["class"] != "varied" and arguments.class_name in (None, line["class"])

    require_steps(run, run.group_index)
    lines = chosen(run.group_index, arguments, is_degenerate)
    if as_json(lines, arguments, console):
        return
    if not lines:
        console.print("no such group: every group carried a gradient")
        return

    show_table(
        console,
        lines,
        {"step": ("step", "d"), **GROUP_FIGURES},
        {"why": lambda line: WHY[line["class"]], "done": done_to, "trap": trap_of},
        OPTIONAL_IN_GROUPS,
    )
    every = chosen(run.group_index, argparse.Namespace(**vars(arguments) | {"last": None}))
    count = f"{len(lines)} of {len(every)} groups; "
    show_next(run, f"group {lines[-1]['step']} {lines[-1]['group']}", console, before=count)


def show_compare(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show several runs side by side."""
    columns = [compared(data, arguments) for data in (run, *map(load_run, arguments.others))]
    if as_json(columns, arguments, console):
        return

    table = Table("", box=None, pad_edge=False)
    for column in columns:
        table.add_column(Text(column["run"]))
    for name in columns[0]:
        cells = [column[name] for column in columns]
        if name != "run" and any(cell is not None for cell in cells):
            table.add_row(name, *map(_cell, cells))
    console.print(table)


def _cell(value: Any) -> Text:
    """Return a value as `compare` shows it."""
    if value is None:
        return Text("-")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value))


def compared(run: RunData, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a run's column of `compare`.

    It has the settings, the length of the run, means over the last of the chosen steps, and the
    first and the last held-out score.
    """
    lines = chosen_steps(run, arguments)
    column = {
        "run": run.path.name,
        **{name: run.config.get(name) for name in COMPARED_SETTINGS},
        "steps": len(lines),
        "million tokens": lines[-1].get("num_tokens", 0) / 1e6,
        "minutes": sum(line.get("step_time") or 0 for line in lines) / 60,
    }

    for name, key in COMPARED.items():
        values = [line[key] for line in lines[-COMPARED_STEPS:] if line.get(key) is not None]
        column[f"{name}, last {COMPARED_STEPS} steps"] = fmean(values) if values else None

    # Both at the level asked for, or at the hardest one that was evaluated.
    first = {line["level"]: line for line in run.first_reports}
    last = {line["level"]: line for line in run.reports if line["step"] > 0}
    levels = {*first, *last}
    level = run.config.get("level")
    if level not in levels:
        level = max(levels, default=None)
    for name, reports in (("before", first), ("after", last)):
        line = reports.get(level)
        column[f"held-out score {name}"] = line and f"{interval(line)} at {level}"
    return column

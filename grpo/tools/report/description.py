"""What the page of `grpo.report` shows of a run, except for its completions."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import accumulate
from typing import Any

from data.text import escape_control
from grpo.config import Config
from grpo.records import level_name
from grpo.run.folders import checkpoint_folders, step_of
from grpo.run.reader import RunData
from grpo.show.lines import clock_time, counted, interval
from grpo.tools.report.outcome import outcome
from grpo.tools.report.samples import short
from grpo.variance import COLLAPSED
from tasks.registry import is_of_project

# The most points of a curve. Of a longer run only every second, third ... step is shown.
MAX_POINTS = 2000

# The keys of an evaluation that the page uses.
EVALUATION = (
    "step",
    "purpose",
    "level",
    "temperature",
    "metric",
    "mean",
    "ci_low",
    "ci_high",
    "exact",
    "n",
)

Record = Mapping[str, Any]


def described(run: RunData, kept: Iterable[int]) -> dict[str, Any]:
    """Return what the page shows of a run, except for its completions.

    That is the verdict, metrics, evaluations, decisions, warnings, checkpoints and settings. The
    page has the completions of the steps in `kept`.
    """
    config = {name: value for name, value in run.config.items() if name != "facts"}
    facts = run.config.get("facts") or {}
    control = config.get("control") or "none"
    every = max(1, math.ceil(len(run.metrics) / MAX_POINTS))
    lines = run.metrics[::every]
    return {
        "name": escape_control(run.path.resolve().name),
        "path": escape_control(str(run.path)),
        "control": None if control == "none" else escape_control(str(control)),
        "outcome": outcome(run),
        "headline": headline(run),
        "heldout": heldout(run),
        # The curves, and how many of the steps they show.
        "metrics": curves(lines),
        "minutes": minutes(run.metrics)[::every],
        "range": reward_range(config),
        "drawn": len(lines),
        "made": len(run.metrics),
        # What happened, by step.
        "evals": [{key: short(line.get(key)) for key in EVALUATION} for line in run.evals],
        "decisions": [decision_shown(line) for line in run.decisions],
        "warnings": warnings_of(run.metrics),
        "checkpoints": [step_of(path) for path in checkpoint_folders(run.path)],
        # The settings, and which steps have completions.
        "config": listed(config),
        "changed": changed_settings(config),
        "facts": listed(facts),
        "stored": len(run.steps()),
        "kept": sorted(kept),
    }


def minutes(lines: Sequence[Record]) -> list[float]:
    """Return how many minutes the run had trained after each step."""
    return [
        short(seconds / 60)
        for seconds in accumulate(line.get("step_time") or 0.0 for line in lines)
    ]


def reward_range(config: Record) -> list[float] | None:
    """Return the lowest and the highest reward of the run's task; None if they are unknown.

    A task in a file of the user's may have any range, and the file is not loaded.
    """
    options = config.get("task_options")
    given = options.get("reward-range") if isinstance(options, Mapping) else None
    if isinstance(given, str):
        ends = given.split(",")
        try:
            return [float(ends[0]), float(ends[-1])]
        except ValueError:
            return None
    return [0.0, 1.0] if is_of_project(str(config.get("task"))) else None


def changed_settings(config: Record) -> list[str]:
    """Return the names of the settings that are not at their default."""
    defaults = {
        field.name: field.default if field.default is not MISSING else {}
        for field in fields(Config)
    }
    return [
        escape_control(str(name))
        for name, value in config.items()
        if name in defaults and value != defaults[name]
    ]


def curves(lines: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the values of each metric that is a number, one for each line."""
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if isinstance(value, (int, float))
    )
    return {name: [short(line.get(name)) for line in lines] for name in names}


def decision_shown(line: Record) -> dict[str, Any]:
    """Return what the page shows of a line of curriculum.jsonl."""
    shown = {name: line[name] for name in ("step", "kind", "from", "to")}
    return shown | {"why": escape_control(line["why"])}


def headline(run: RunData) -> list[tuple[str, str]]:
    """Return the facts at the head of the page, as (name, text)."""
    config = run.config
    unit = next((line.get("unit") or "" for line in run.evals), "")

    model = config.get("model")
    if config.get("start") not in (None, model):
        model = f"{model}, started from {config['start']}"

    last = run.metrics[-1] if run.metrics else {}
    time = clock_time(sum(line.get("step_time") or 0 for line in run.metrics))
    time += " h" if time.count(":") > 1 else " min"

    facts = config.get("facts") or {}
    hardware = facts.get("device", "unknown")
    if facts.get("threads"):
        hardware = f"{hardware}, {facts['threads']} threads"

    texts = {
        "task": config.get("task"),
        "level": f"{config.get('level', '')} {unit}",
        "model": model,
        "reward": config.get("reward") or "the task's own reward",
        "steps": f"{len(run.metrics):,}",
        "tokens": f"{last.get('num_tokens', 0):,}",
        "time": time,
        "hardware": hardware,
    }
    return [(name, escape_control(str(text)).strip()) for name, text in texts.items()]


def heldout(run: RunData) -> list[dict[str, Any]]:
    """Return the first and the last reported score for each level and temperature.

    Those of the run's own level come first.
    """
    series: dict[tuple, list[Record]] = {}
    for line in run.reports:
        series.setdefault((line["level"], line.get("temperature", 1.0)), []).append(line)

    own_level = run.config.get("level")
    found = []
    for level, temperature in sorted(series, key=lambda key: (key[0] != own_level, key)):
        lines = series[level, temperature]
        last = lines[-1]
        ends = [lines[0], last] if len(lines) > 1 else [last]

        at = level_name(level, last.get("unit") or "")
        what = f"{last.get('metric') or 'score'} at {at}"
        is_share = last.get("metric") == "exact match"
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        found.append(
            {
                "what": escape_control(what).strip(),
                "how": f"{counted(last)}, {sampling}",
                "scores": [interval(line) for line in ends],
                # An exact match is the score itself, so it is not repeated.
                "exact": None if is_share else " → ".join(f"{line['exact']:.2f}" for line in ends),
            }
        )
    return found


def warnings_of(lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the steps at which something went wrong, and what: a trap, collapsed groups, alarms.

    What holds for several steps in a row is listed at the first of them.
    """
    found = []
    before: set[str] = set()
    for line in lines:
        now = troubles_of(line)
        found += [{"step": line["step"], "why": why} for why in sorted(now - before)]
        before = now
    return found


def troubles_of(line: Record) -> set[str]:
    """Return what went wrong at a step.

    A trap counts if it has at least half of the completions, a collapse if at least half of the
    groups collapsed.
    """
    troubles = {escape_control(each) for each in line.get("events", ()) if each.startswith("ALARM")}
    for name, share in line.items():
        if name.startswith("traps/") and (share or 0) >= 0.5:
            trap = escape_control(name.removeprefix("traps/"))
            troubles.add(f"at least half of the completions are in a trap: {trap}")

    collapsed = sum(line.get(f"groups/class/{name}") or 0 for name in COLLAPSED)
    groups = line.get("groups/count") or math.inf
    if collapsed >= 0.5 * groups:
        troubles.add("at least half of the groups collapsed")
    if line.get("stopped"):
        troubles.add(f"stopped: {escape_control(line['stopped'])}")
    return troubles


def listed(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as the page shows them, e.g. ("level", "25")."""
    found = []
    for name, value in values.items():
        is_empty = value in (None, "", {})
        if isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()):
            text = "; ".join(f"{key}: {each}" for key, each in value.items())
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
        found.append((escape_control(str(name)), "–" if is_empty else escape_control(text)))
    return found

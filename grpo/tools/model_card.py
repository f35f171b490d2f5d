"""The model card of an exported policy: what it is, whether it learned, and its learning curve.

A card may be published, so it names files and folders without this machine's paths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo.config import Config
from grpo.ending import Verdict
from grpo.run.folders import step_of
from grpo.run.reader import RunData
from grpo.show.lines import interval, sparkline

Record = Mapping[str, Any]

# The settings that the card names.
SETTINGS = (
    "loss",
    "scale",
    "credit",
    "beta",
    "learning_rate",
    "prompts",
    "group_size",
    "temperature",
    "lora_rank",
    "seed",
)

# Rows of the learning curve, and bars of its sparkline.
ROWS = 10
BARS = 60


def card(run: RunData, step: int, *, adapter: bool) -> str:
    """Return the card, in Markdown, of the policy that `run` had after `step` steps."""
    config = {**asdict(Config()), **run.config}
    reports = [line for line in run.reports if line["step"] <= step]
    metric = reports[0].get("metric", "score") if reports else "score"

    sections = [
        _front_matter(config, adapter),
        f"# {run.path.name}",
        _summary(config, step),
        *_control(config),
        *_verdict(run, step, reports, metric),
        _before_and_after(reports, metric),
        *_curve([line for line in run.metrics if line["step"] <= step], reports, metric),
        _settings(config),
        "The model was trained for this one task. Its other abilities were not evaluated.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: Record, adapter: bool) -> str:
    lines = [
        "---",
        "library_name: " + ("peft" if adapter else "transformers"),
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning]",
        *([f"base_model: {config['model']}"] if _is_hub_id(config) else []),
        "---",
    ]
    return "\n".join(lines)


def _summary(config: Record, step: int) -> str:
    """Return a sentence on how the model was trained, and one on the policy it started from."""
    start = _start_of(config)
    path = f" (curriculum {config['curriculum']})" if config.get("curriculum") else ""
    reward = f"the reward `{config['reward']}`" if config.get("reward") else "the task's reward"
    summary = (
        f"`{_base_name(config)}` trained by GRPO for {step} steps on the task "
        f"`{_without_folders(config['task'])}`, level {config['level']}{path}, with {reward}."
    )
    return summary + (f" Training started from {origin(start)}." if start else "")


def _control(config: Record) -> list[str]:
    control = config.get("control", "none")
    if control == "none":
        return []
    return [f"**A control experiment ({control}): its rewards carried no information.**"]


def _verdict(run: RunData, step: int, reports: Sequence[Record], metric: str) -> list[str]:
    """Return the verdict on the run, unless a later policy earned it."""
    line = run.verdict
    if not line or line["step"] > step:
        return []
    verdict = Verdict.from_json(line)
    unit = reports[0].get("unit", "") if reports else ""
    conclusion, *more = verdict.lines(metric, unit)
    return [f"**{conclusion}**", *(f"{line}." for line in more)]


def _before_and_after(reports: Sequence[Record], metric: str) -> str:
    """Return a table of the first and the last evaluation of each level and temperature."""
    rows = []
    by_kind = lambda line: (line["level"], line["temperature"])  # noqa: E731
    for (level, temperature), group in groupby(sorted(reports, key=by_kind), by_kind):
        lines = list(group)
        first = lines[0] if lines[0]["step"] == 0 else None
        last = lines[-1] if len(lines) > 1 or first is None else None
        exact = " → ".join(f"{line['exact']:.3f}" if line else "-" for line in (first, last))
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        means = " | ".join(interval(line) if line else "-" for line in (first, last))
        name = f"{level} {lines[0].get('unit', '')}".rstrip()
        rows.append(f"| {name} | {sampling} | {means} | {exact} | {lines[-1]['n']} |")

    head = (
        f"Held-out {metric} on validation problems that training never saw (mean and 95 % "
        "interval):"
    )
    table = [
        "| level | sampling | before | after | exact | n |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return head + "\n\n" + "\n".join(table)


def _curve(metrics: Sequence[Record], reports: Sequence[Record], metric: str) -> list[str]:
    """Return the learning curve as a bar for each stretch of steps, and as a table."""
    if not metrics:
        return []
    bars = [fmean(line["reward"] for line in part) for part in _parts(metrics, BARS)]
    title = (
        f"Mean reward of a step, from {min(bars):.3f} to {max(bars):.3f}: "
        f"`{sparkline(bars, limits=None)}`"
    )

    rows = []
    for part in _parts(metrics, ROWS):
        first, last = part[0]["step"], part[-1]["step"]
        levels = sorted({line["level"] for line in part})
        evaluated = [line for line in reports if first <= line["step"] <= last]
        figures = (
            f"{first} to {last}",
            " to ".join(str(level) for level in dict.fromkeys((levels[0], levels[-1]))),
            f"{fmean(line['reward'] for line in part):.3f}",
            f"{fmean(line['value'] for line in part):.3f}",
            f"{fmean(line['frac_reward_zero_std'] for line in part):.0%}",
            ", ".join(f"{line['mean']:.3f} at {line['level']}" for line in evaluated),
        )
        rows.append(f"| {' | '.join(figures)} |")
    head = f"| steps | level | reward | {metric} | groups without variance | held-out {metric} |"
    return [title, "\n".join([head, "|---|---|---|---|---|---|", *rows])]


def _parts(lines: Sequence[Record], most: int) -> list[Sequence[Record]]:
    """Return `lines` in at most `most` stretches of nearly equal length."""
    count = min(most, len(lines))
    ends = [number * len(lines) // count for number in range(count + 1)]
    return [lines[start:end] for start, end in zip(ends, ends[1:])]


def _settings(config: Record) -> str:
    facts = config.get("facts", {})
    settings = ", ".join(f"{name} {config[name]}" for name in SETTINGS)
    return (
        f"Settings: {settings}.\n\n"
        f"Made with torch {facts.get('torch')}, transformers {facts.get('transformers')}, on "
        f"{facts.get('device')}, at commit {facts.get('commit')}, started {facts.get('started')}."
    )


def _start_of(config: Record) -> Path | None:
    """Return the checkpoint of an earlier run that training started from, if any."""
    return Path(config["start"]) if config.get("start") else None


def _is_hub_id(config: Record) -> bool:
    """Return whether the model is named by its id on the Hugging Face hub."""
    model = config["model"]
    return _base_name(config) == model != "builtin" and not _is_local(config)


def _base_name(config: Record) -> str:
    """Return the name of the model that training started from, without this machine's paths."""
    model, start = config["model"], _start_of(config)
    if start is not None and model == str(start):
        return start.parent.parent.name
    return Path(model).name if _is_local(config) else model


def _is_local(config: Record) -> bool:
    """Return whether the model was a file or folder when training started."""
    return config.get("facts", {}).get("is_local_model", True)


def _without_folders(task: str) -> str:
    """Return the name of a task without folders: "gsm8k:problems" for "gsm8k:/mine/problems"."""
    return ":".join(Path(part).name for part in task.split(":"))


def origin(start: Path) -> str:
    """Return in words which checkpoint of which run this is."""
    return f"step {step_of(start)} of the run `{start.parent.parent.name}`"

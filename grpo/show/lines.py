"""Lines of text about a run: its steps, its evaluations, and a table of before and after.

All functions here are pure. Text from a model or a file is escaped when it is printed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.records import StepReport, level_name

# The format of each metric. Widths are fixed, so that the lines of a run form columns. "{name}" is
# the name of the score.
FIGURES = {
    "level": "  level {:>3g}",
    "reward": "  reward {:.3f}",
    "group_std": " ± {:.3f}",
    "value": "  {name} {:.3f}",
    "groups/kept": "  trained on {:>2g}",
    "groups/count": " of {:g} groups",
    "groups/resampled": "  resampled {:>2g}",
    "temperature": "  T {:.2f}",
    "completions/mean_length": "  {:>5.1f} tokens",
    "completions/clipped_ratio": "  truncated {:>4.0%}",
    "tokens_per_second": "  {:>7,.0f} tok/s",
    "memory_gb": "  {:>5.1f} GB",
    "step_time": "  {:>5.1f} s",
    "time/rollout": "  rollout {:.1f}",
    "time/update": "  update {:.1f}",
    "loss": "  loss {:>7.4f}",
    "kl": "  KL {:.4f}",
    "entropy": "  entropy {:.3f}",
    "grad_norm": "  gradient {:.3f}",
    "clip_ratio/low_mean": "  clipped {:.1%}",
    "clip_ratio/high_mean": " below, {:.1%} above",
    "sampling/sampling_logp_difference/max": "  parity {:.0e}",
}

GROUPS = ("groups/kept", "groups/count", "groups/resampled", "temperature")
SPEED = ("completions/mean_length", "tokens_per_second", "step_time")
LINE = (
    "level",
    "reward",
    "group_std",
    "value",
    *GROUPS,
    "completions/clipped_ratio",
    *SPEED,
    "memory_gb",
)

# A line of eval.jsonl.
Evaluation = Mapping[str, Any]


def clock_time(seconds: float) -> str:
    """Return a span of `seconds` as minutes:seconds, or hours:minutes:seconds from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def smoothed(mean: float | None, value: float, weight: float = 0.2) -> float:
    """Return the exponential moving average `mean` after another `value`; None before the first."""
    return value if mean is None else mean + weight * (value - mean)


def sparkline(values: Sequence[float], limits: tuple[float, float] | None = (0.0, 1.0)) -> str:
    """Return a bar of one of eight heights for each value.

    `limits` are the values of the lowest and the highest bar; None means the range of `values`.
    Values outside the limits get the lowest or the highest bar.
    """
    low, high = limits or (min(values, default=0.0), max(values, default=1.0))
    width = (high - low) or 1.0
    shares = [min(1.0, max(0.0, (value - low) / width)) for value in values]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * share))] for share in shares)


def figures(metrics: Mapping[str, Any], names: Sequence[str], metric: str = "score") -> str:
    """Return the metrics `names` as text, in that order, without those that the step lacks."""
    present = [name for name in names if metrics.get(name) is not None]
    return "".join(FIGURES[name].format(metrics[name], name=metric) for name in present).lstrip()


def step_line(
    report: StepReport, total_steps: int, seconds_left: float | None = None, metric: str = "score"
) -> str:
    """Return a step as one line of aligned figures. `metric` is the name of the score."""
    width = len(str(total_steps))
    head = f"{control_mark(report.metrics)}step {report.step:>{width}}/{total_steps}"
    eta = "" if seconds_left is None else f"ETA {clock_time(seconds_left):>8}"
    parts = (head, figures(report.metrics, LINE, metric), eta)
    return "  ".join(part for part in parts if part)


# What precedes an evaluation that is no report, by its purpose.
OCCASIONS = {
    "warm start": "imitating: ",
    "imitation": "after imitation: ",
    "promotion": "validation check: ",
}


def interval(line: Evaluation) -> str:
    """Return the mean of an evaluation with its 95 % interval."""
    return f"{line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"


def counted(line: Evaluation) -> str:
    """Return the number of problems of an evaluation, and the number asked for if higher."""
    if line["n"] < line.get("asked", 0):
        return f"n = {line['n']} distinct problems, {line['asked']} asked for"
    return f"n = {line['n']}"


def exact_rate(line: Evaluation) -> str:
    """Return the rate of exact answers of an evaluation, with its 95 % interval if it has one."""
    rate = f"exact {line['exact']:.3g}"
    if "exact_low" not in line:
        return rate
    return f"{rate} [{line['exact_low']:.3f}, {line['exact_high']:.3f}]"


def evaluation_line(line: Evaluation) -> str:
    """Return a line of eval.jsonl as a sentence.

    `metric` in the line is the name of the score, `unit` what a level counts ("words"; "" for a
    level that counts nothing).
    """
    split = "training" if line["split"] == "train" else "held-out"
    level = level_name(line["level"], line.get("unit", "words"))

    sampling = f"temperature {line['temperature']:g}" if line["temperature"] else "greedy"
    details = f"{counted(line)}, {sampling}, {exact_rate(line)}"
    if line.get("truncated"):
        details += f", truncated {line['truncated']:.3g}"
    if line.get("dropped"):
        details += f"; {line['dropped']} dropped: the policy was trained on them"
    if line.get("too_long"):
        details += f"; {line['too_long']} dropped: too long for the context or the budget"

    metric = line.get("metric", "score")
    occasion = OCCASIONS.get(line.get("purpose", ""), "")
    return (
        f"{control_mark(line)}{occasion}{split} {metric} at {level}: {interval(line)} ({details})"
    )


def control_mark(line: Mapping[str, Any]) -> str:
    """Return the mark that precedes every line of a control experiment; "" for an ordinary run."""
    return f"CONTROL {line['control']}  " if line.get("control") else ""


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
    metric = first.get("metric", metric)
    counts = ", ".join(map(str, sorted({line["n"] for line in (*before, *after)})))
    table = [
        f"{control_mark(first)}held-out {metric}, mean [95 % interval], n = {counts}",
        f"{'level':>5}  {'sampling':<8}  {'before':<20}  {'after':<20}  exact",
    ]

    for level, temperature in sorted(old.keys() | new.keys()):
        pair = [lines.get((level, temperature)) for lines in (old, new)]
        sampling = f"T {temperature:g}" if temperature else "greedy"
        means = "  ".join(f"{interval(line) if line else '-':<20}" for line in pair)
        exact = " → ".join(f"{line['exact']:.3f}" if line else "  -  " for line in pair)
        table.append(f"{level:>5}  {sampling:<8}  {means}  {exact}")
    return table


def held_out_line(evaluations: Sequence[Evaluation]) -> str:
    """Return the first and last mean of each level: "held out  10: 0.531 → 0.998  25: 0.402".

    Returns "" without evaluations.
    """
    means: dict[int, list[float]] = {}
    for line in filter(_is_held_out, evaluations):
        means.setdefault(line["level"], []).append(line["mean"])
    levels = [
        f"  {level}: {seen[0]:.3f}" + (f" → {seen[-1]:.3f}" if len(seen) > 1 else "")
        for level, seen in sorted(means.items())
    ]
    return "held out" + "".join(levels) if levels else ""


def last_held_out(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the mean of the last held-out evaluation; None without one."""
    means = [line["mean"] for line in filter(_is_held_out, evaluations)]
    return means[-1] if means else None


def _is_held_out(line: Evaluation) -> bool:
    """Return whether an evaluation was on held-out problems, sampled as in training."""
    return line["split"] != "train" and bool(line["temperature"])

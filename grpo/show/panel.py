"""The live panel of a run on a terminal."""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from data.text import escape_control
from grpo.ending import has_update
from grpo.records import StepReport, sampled_groups
from grpo.show.alignment import aligned, rendered
from grpo.show.group import classes_of
from grpo.show.lines import Evaluation, clock_time, control_mark, figures, sparkline

# Metrics of each row.
ROWS = (
    ("level", "value", "groups/resampled", "temperature"),
    (
        "completions/mean_length",
        "tokens_per_second",
        "step_time",
        "time/rollout",
        "time/update",
        "memory_gb",
    ),
    ("loss", "kl", "entropy", "grad_norm"),
    ("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/sampling_logp_difference/max"),
)

# A share of truncated completions, of groups that taught nothing, or of tokens in such groups, is
# yellow from the first number on, and red from the second.
TRUNCATED_LIMITS = (0.1, 0.5)
WASTED_LIMITS = (0.5, 1.0)

# Number of steps in the sparkline, and in the mean next to it.
RECENT = 30

# The weight of a step's time in the moving average that predicts the time left.
PACE_WEIGHT = 0.2

# At most this much of a completion is shown: three lines of a narrow terminal.
SAMPLE_CELLS = 200

# From step to step the index of the shown completion grows by this much, so that other groups are
# soon shown as well.
ROTATE = 7


@dataclass
class History:
    """What the steps and evaluations of this process have shown so far.

    `metric` is the name of the score, `reward_range` the range of the task's rewards (None if it is
    unknown). `pace` are the seconds per step, smoothed; `updated` is the number of steps that
    changed the weights.
    """

    total_steps: int
    metric: str = "score"
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    report: StepReport | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    best: float | None = None
    pace: float | None = None
    steps: int = 0
    updated: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Take note of a step."""
        self.report = report
        self.steps += 1
        self.updated += has_update(report.metrics)
        if (seconds := report.metrics.get("step_time")) is not None:
            self.pace = seconds if self.pace is None else self.pace
            self.pace += PACE_WEIGHT * (seconds - self.pace)
        if (reward := report.metrics.get("reward")) is not None:
            self.rewards.append(reward)
            self.best = reward if self.best is None else max(self.best, reward)

    @property
    def seconds_left(self) -> float | None:
        """The seconds of the remaining steps; None before the first."""
        if self.pace is None or self.report is None:
            return None
        return self.pace * (self.total_steps - self.report.step)

    @property
    def held_out(self) -> dict[int, list[float]]:
        """The means of the held-out evaluations that were sampled as in training, by level."""
        means: dict[int, list[float]] = {}
        for line in self.evaluations:
            if line["split"] != "train" and line["temperature"]:
                # The level that was evaluated last comes last.
                means[line["level"]] = [*means.pop(line["level"], []), line["mean"]]
        return means


def panel(report: StepReport, history: History) -> Panel:
    """Return the live panel after a step, as wide as the terminal.

    The first row has what matters most: reward, held-out score, groups that were trained on,
    truncated completions, and the time left. Below it are the reward with a sparkline, held-out
    scores, what was taught so far, metrics, the classes of the groups, and a completion
    compared with its target, a different one each step. Only what is abnormal is in colour.
    """
    rows: list[RenderableType] = [
        _first_row(report, history),
        _reward_row(report, history),
    ]
    if means := history.held_out:
        levels = [
            f"  {level}: {seen[0]:.3f}" + (f" → {seen[-1]:.3f}" if len(seen) > 1 else "")
            for level, seen in sorted(means.items())
        ]
        rows.append(_dim("held out" + "".join(levels)))
    if wasted := _wasted_row(report, history):
        rows.append(wasted)
    for names in ROWS:
        if line := figures(report.metrics, names, history.metric):
            rows.append(_dim(escape_control(line)))
    if classes := classes_of(report.metrics):
        rows.append(Text.assemble(("groups ", "dim"), classes))
    if sample := sample_row(report):
        rows.append(sample)

    mark = control_mark(report.metrics)
    title = Text(f"{mark}step {report.step} of {history.total_steps}", style="bold")
    return Panel(Group(*rows), title=title, title_align="left", border_style="dim")


def _first_row(report: StepReport, history: History) -> Text:
    """Return the figures that matter most."""
    metrics = report.metrics
    parts = []
    if (reward := metrics.get("reward")) is not None:
        parts.append(_dim(f"reward {reward:.3f}"))
    if means := history.held_out:
        parts.append(_dim(f"held out {list(means.values())[-1][-1]:.3f}"))

    kept, groups = metrics.get("groups/kept"), metrics.get("groups/count")
    if kept is not None and groups:
        style = _alarming(1 - kept / groups, WASTED_LIMITS)
        parts.append(Text.assemble(("groups trained ", "dim"), (f"{kept:g}/{groups:g}", style)))
    if (truncated := metrics.get("completions/clipped_ratio")) is not None:
        style = _alarming(truncated, TRUNCATED_LIMITS)
        parts.append(Text.assemble(("truncated ", "dim"), (f"{truncated:.0%}", style)))
    if history.seconds_left is not None:
        parts.append(Text.assemble(("ETA ", "dim"), clock_time(history.seconds_left)))
    return Text("  ").join(parts)


def _alarming(share: float, limits: tuple[float, float]) -> str:
    """Return the style of a share of which much is bad; "" if it is normal."""
    yellow, red = limits
    return "bold red" if share >= red else "yellow" if share >= yellow else ""


def _reward_row(report: StepReport, history: History) -> Text:
    parts = []
    if (std := report.metrics.get("group_std")) is not None:
        parts.append(f"± {std:.3f} within groups")
    if history.rewards:
        parts.append(f"mean {fmean(history.rewards):.3f}  best {history.best:.3f}")
    return _dim("  ".join(parts)).append("  " + sparkline(history.rewards, history.reward_range))


def _wasted_row(report: StepReport, history: History) -> Text | None:
    """Return how many steps updated the weights, and which share of the tokens taught nothing."""
    tokens, wasted = (report.metrics.get(key) for key in ("num_tokens", "wasted_tokens_total"))
    if not history.steps or not tokens or wasted is None:
        return None
    share = wasted / tokens
    return Text.assemble(
        _dim(f"weights updated in {history.updated} of {history.steps} steps, "),
        (f"{share:.0%}", _alarming(share, WASTED_LIMITS)),
        (" of the tokens taught nothing", "dim"),
    )


def sample_row(report: StepReport) -> Table | None:
    """Return a completion with its reward, compared with its target; None without completions."""
    scored = [
        (group.problem.target, text, score)
        for group in sampled_groups(report.groups)
        for text, score in zip(group.texts, group.scores)
    ]
    if not scored:
        return None
    target, text, score = scored[ROTATE * report.step % len(scored)]
    words = rendered(aligned(target, text))
    words.truncate(SAMPLE_CELLS, overflow="ellipsis")
    return columns(_dim(f"reward {score.reward:.3f}"), words)


def _dim(text: str) -> Text:
    """Return `text` with its words dimmed, so that the numbers stand out."""
    line = Text.assemble((text, "dim"))
    line.highlight_regex(r"-?\d[\d.,]*(e-?\d+)?%?", "not dim")
    return line


def columns(*cells: Any) -> Table:
    """Return `cells` side by side, each wrapped within its own column."""
    grid = Table.grid(*(Column(overflow="fold") for _ in cells), padding=(0, 2, 0, 0))
    grid.add_row(*cells)
    return grid

"""The live panel of a run on a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.console import Group as Stack
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from data.text import escape_control
from grpo.records import StepReport, sampled_groups
from grpo.show.alignment import aligned, rendered
from grpo.show.lines import (
    SPEED,
    Evaluation,
    clock_time,
    control_mark,
    figures,
    held_out_line,
    last_held_out,
    sparkline,
)
from grpo.show.tables import classes_of

# Metrics of each row.
ROWS = (
    ("level", "value", "groups/resampled", "temperature"),
    (*SPEED, "time/rollout", "time/update", "memory_gb"),
    ("loss", "kl", "entropy", "grad_norm"),
    ("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/sampling_logp_difference/max"),
)

# A share of truncated completions, of groups that taught nothing, or of tokens in such groups, is
# coloured from the first number on, and more strongly from the second.
TRUNCATED_LIMITS = (0.1, 0.5)
UNTAUGHT_LIMITS = (0.5, 1.0)

# At most this many lines of a completion are shown.
SAMPLE_LINES = 3

# From step to step the index of the shown completion grows by this much, so that other groups are
# soon shown as well.
ROTATE = 7


@dataclass(frozen=True)
class RunView:
    """What the panel shows in addition to the last step.

    - `rewards`: mean rewards of the last steps; `best`: the highest of all steps;
    - `evaluations`: lines of eval.jsonl;
    - `metric`: the name of the score; `reward_range`: the task's, None if it is unknown;
    - `steps`: how many steps this process has made, `updated`: how many of them had an update.
    """

    total_steps: int
    seconds_left: float | None = None
    rewards: Sequence[float] = ()
    best: float | None = None
    evaluations: Sequence[Evaluation] = ()
    metric: str = "score"
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    steps: int = 0
    updated: int = 0


def panel(report: StepReport, view: RunView) -> Panel:
    """Return the live panel after a step, as wide as the terminal.

    The first row has what matters most: reward, held-out score, groups that were trained on,
    truncated completions, and the time left. Below it are progress, reward with a sparkline,
    held-out scores, what was taught so far, metrics, the classes of the groups, and a completion
    compared with its target, a different one each step. Only what is abnormal is in colour.
    """
    rows: list[RenderableType] = [_first_row(report, view)]
    rows += [_progress_row(report, view), _reward_row(report, view)]
    if line := held_out_line(view.evaluations):
        rows.append(_dim(line))
    if taught := _taught_row(report, view):
        rows.append(taught)
    for names in ROWS:
        if line := figures(report.metrics, names, view.metric):
            rows.append(_dim(escape_control(line)))
    if classes := classes_of(report.metrics):
        rows.append(Text.assemble(("groups ", "dim"), classes))
    if sample := _sample_row(report):
        rows.append(sample)

    mark = control_mark(report.metrics)
    title = Text(f"{mark}step {report.step} of {view.total_steps}", style="bold")
    return Panel(Stack(*rows), title=title, title_align="left", border_style="dim")


def _first_row(report: StepReport, view: RunView) -> Text:
    """Return the figures that matter most."""
    metrics = report.metrics
    parts = []
    if (reward := metrics.get("reward")) is not None:
        parts.append(_dim(f"reward {reward:.3f}"))
    if (score := last_held_out(view.evaluations)) is not None:
        parts.append(_dim(f"held out {score:.3f}"))

    kept, groups = metrics.get("groups/kept"), metrics.get("groups/count")
    if kept is not None and groups:
        style = _alarming(1 - kept / groups, UNTAUGHT_LIMITS)
        parts.append(_figure("groups trained", f"{kept:g}/{groups:g}", style))
    if (truncated := metrics.get("completions/clipped_ratio")) is not None:
        style = _alarming(truncated, TRUNCATED_LIMITS)
        parts.append(_figure("truncated", f"{truncated:.0%}", style))
    if view.seconds_left is not None:
        parts.append(_figure("ETA", clock_time(view.seconds_left)))
    return Text("  ").join(parts)


def _figure(name: str, value: str, style: str = "") -> Text:
    """Return a figure after its dimmed name."""
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _alarming(share: float, limits: tuple[float, float]) -> str:
    """Return the style of a share of which much is bad; "" if it is normal."""
    yellow, red = limits
    return "bold red" if share >= red else "yellow" if share >= yellow else ""


def _progress_row(report: StepReport, view: RunView) -> Table:
    bar = ProgressBar(
        view.total_steps, report.step, complete_style="default", finished_style="default"
    )
    return columns(bar, f"{report.step / view.total_steps:.0%}")


def _reward_row(report: StepReport, view: RunView) -> Text:
    parts = []
    if (std := report.metrics.get("group_std")) is not None:
        parts.append(f"± {std:.3f} within groups")
    if view.rewards and view.best is not None:
        parts.append(f"mean {fmean(view.rewards):.3f}  best {view.best:.3f}")
    return _dim("  ".join(parts)).append("  " + sparkline(view.rewards, view.reward_range))


def _taught_row(report: StepReport, view: RunView) -> Text | None:
    """Return how many steps updated the weights, and which share of the tokens taught nothing."""
    metrics = report.metrics
    tokens, wasted = metrics.get("num_tokens"), metrics.get("wasted_tokens_total")
    if not view.steps or not tokens or wasted is None:
        return None
    share = wasted / tokens
    return Text.assemble(
        _dim(f"weights updated in {view.updated} of {view.steps} steps, "),
        (f"{share:.0%}", _alarming(share, UNTAUGHT_LIMITS)),
        (" of the tokens taught nothing", "dim"),
    )


def _sample_row(report: StepReport) -> Table | None:
    """Return a completion with its reward, compared with its target; None without completions."""
    scored = [
        (group.problem.target, text, score)
        for group in sampled_groups(report.groups)
        for text, score in zip(group.texts, group.scores)
    ]
    if not scored:
        return None

    target, text, score = scored[ROTATE * report.step % len(scored)]
    return columns(_dim(f"reward {score.reward:.3f}"), _Cut(rendered(aligned(target, text))))


@dataclass(frozen=True)
class _Cut:
    """The first SAMPLE_LINES lines of a text, wrapped to the width that there is."""

    text: Text

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, max(1, options.max_width - 2), overflow="fold")
        more = " …" if len(lines) > SAMPLE_LINES else ""
        shown = Text("\n").join(lines[:SAMPLE_LINES])
        shown.rstrip()
        yield shown.append(more, "dim")

    def __rich_measure__(self, console: RichConsole, options: ConsoleOptions) -> Measurement:
        longest = max(self.text.cell_len + 2, 1)
        return Measurement(1, min(longest, options.max_width))


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

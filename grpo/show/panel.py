"""The live panel of a run on a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from data.text import escape_control
from grpo.records import StepReport
from grpo.show.alignment import aligned, rendered
from grpo.show.lines import (
    GROUPS,
    SPEED,
    Evaluation,
    clock_time,
    control_mark,
    figures,
    held_out_line,
    sparkline,
)
from grpo.show.tables import classes_of

# Metrics of each row.
ROWS = (
    ("level", "value", *GROUPS),
    (*SPEED, "time/rollout", "time/update", "memory_gb"),
    ("loss", "kl", "entropy", "grad_norm"),
    ("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/sampling_logp_difference/max"),
)

# Width in characters; rich makes the panel narrower if the terminal is.
WIDTH = 80

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
    - `metric`: the name of the score; `reward_range`: the task's, None if it is unknown.
    """

    total_steps: int
    seconds_left: float | None = None
    rewards: Sequence[float] = ()
    best: float | None = None
    evaluations: Sequence[Evaluation] = ()
    metric: str = "score"
    reward_range: tuple[float, float] | None = (0.0, 1.0)


def panel(report: StepReport, view: RunView) -> Panel:
    """Return the live panel after a step.

    From top to bottom it shows progress, reward with a sparkline, held-out scores, metrics, the
    classes of the groups, and a completion compared with its target, a different one each step.
    """
    rows: list[RenderableType] = [_progress_row(report, view), _reward_row(report, view)]
    if line := held_out_line(view.evaluations):
        rows.append(_dim(line))
    for names in ROWS:
        if line := figures(report.metrics, names, view.metric):
            rows.append(_dim(escape_control(line)))
    if classes := classes_of(report.metrics):
        rows.append(Text.assemble(("groups ", "dim"), classes))
    if sample := _sample_row(report):
        rows.append(sample)

    mark = control_mark(report.metrics)
    title = Text(f"{mark}step {report.step} of {view.total_steps}", style="bold")
    return Panel(Stack(*rows), title=title, title_align="left", border_style="dim", width=WIDTH)


def _progress_row(report: StepReport, view: RunView) -> Table:
    bar = ProgressBar(view.total_steps, report.step, complete_style="cyan", finished_style="cyan")
    eta = "" if view.seconds_left is None else f"ETA {clock_time(view.seconds_left)}"
    return columns(bar, f"{report.step / view.total_steps:.0%}", eta)


def _reward_row(report: StepReport, view: RunView) -> Text:
    text = figures(report.metrics, ("reward", "group_std"))
    if view.rewards and view.best is not None:
        text += f"  mean {fmean(view.rewards):.3f}  best {view.best:.3f}"
    return _dim(text).append("  " + sparkline(view.rewards, view.reward_range), "cyan")


def _sample_row(report: StepReport) -> Table | None:
    """Return a completion with its reward, compared with its target; None without completions."""
    scored = [
        (group.problem.target, text, score)
        for group in report.groups
        for text, score in zip(group.texts, group.scores)
    ]
    if not scored:
        return None

    target, text, score = scored[ROTATE * report.step % len(scored)]
    head = f"reward {score.reward:.3f}"
    return columns(_dim(head), _cut(rendered(aligned(target, text)), WIDTH - len(head) - 6))


def _cut(text: Text, width: int) -> Text:
    """Return the first SAMPLE_LINES lines of `text`, wrapped to `width` columns."""
    lines = text.wrap(RichConsole(), width - 2, overflow="fold")
    more = " …" if len(lines) > SAMPLE_LINES else ""
    shown = Text("\n").join(lines[:SAMPLE_LINES])
    shown.rstrip()
    return shown.append(more, "dim")


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

"""What a run shows while it goes: a live panel on a terminal, plain lines of unlimited width in a
pipe.

The texts are made by pure functions (`step_line`, `evaluation_line`, `summary_table`, ...);
`Console` only puts them on the screen. Text of a model or a file passes `escape_control` and is
handed to rich as `Text`, whose content rich never parses for markup; what is not printable is
spelled out, so that no text can move the cursor or colour the screen. All clock times are UTC.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from grpo.records import StepReport
from grpo.show.alignment import aligned, rendered
from grpo.show.tables import SURVEY, classes_of, show_table
from grpo.text import escape_control

# Metric -> how it reads. Widths are fixed so that the lines of a run stand in columns; "{name}" is
# the score's name.
FIGURES = {
    "level": "  level {:>3g}",
    "reward": "  reward {:.3f}",
    "reward_std": " ± {:.3f}",
    "value": "  {name} {:.3f}",
    "groups/kept": "  kept {:>2g}",
    "groups/count": " of {:g}",
    "groups/resampled": "  resampled {:>2g}",
    "groups/skipped": "  skipped {:>2g}",
    "temperature": "  T {:.2f}",
    "completions/mean_length": "  {:>5.1f} tokens",
    "tokens_per_second": "  {:>7,.0f} tok/s",
    "memory_gb": "  {:>5.1f} GB",
    "step_time": "  {:>5.1f} s",
    "time/rollout": "  rollout {:.1f}",
    "time/update": "  update {:.1f}",
    "loss": "  loss {:>7.4f}",
    "kl": "  KL {:.4f}",
    "entropy": "  entropy {:.3f}",
    "grad_norm": "  gradient {:.3f}",
    "clip_ratio/low": "  clipped {:.1%}",
    "clip_ratio/high": " below, {:.1%} above",
    "parity/max_abs_logprob_diff": "  parity {:.0e}",
}
GROUPS = ("groups/kept", "groups/count", "groups/resampled", "groups/skipped", "temperature")
SPEED = ("completions/mean_length", "tokens_per_second", "step_time")
LINE = ("level", "reward", "reward_std", "value", *GROUPS, *SPEED, "memory_gb")
PANEL_ROWS = (
    ("level", "value", *GROUPS),
    (*SPEED, "time/rollout", "time/update", "memory_gb"),
    ("loss", "kl", "entropy", "grad_norm"),
    ("clip_ratio/low", "clip_ratio/high", "parity/max_abs_logprob_diff"),
)
Evaluation = Mapping[str, Any]  # a line of eval.jsonl
HISTORY = 30  # steps of the sparkline and of the mean beside it
PANEL_WIDTH = 80  # columns; rich makes it narrower where the terminal is
SAMPLE_LINES = 3  # of the completion shown
ROTATE = 7  # completions between those shown in one step and the next: another group soon


def clock_time(seconds: float) -> str:
    """Return a span of `seconds` as minutes:seconds, or hours:minutes:seconds from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def smoothed(mean: float | None, value: float, weight: float = 0.2) -> float:
    """Return the exponential mean after `value`, which starts at the first value (`mean` None) and
    gets `weight`.
    """
    return value if mean is None else mean + weight * (value - mean)


def sparkline(values: Sequence[float], limits: tuple[float, float] | None = (0.0, 1.0)) -> str:
    """Return one bar a value, eight heights over the `limits` (None: from the lowest to the
    highest of the values).

    What lies outside gets the lowest or the highest bar.
    """
    low, high = limits or (min(values, default=0.0), max(values, default=1.0))
    width = (high - low) or 1.0
    shares = [min(1.0, max(0.0, (value - low) / width)) for value in values]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * share))] for share in shares)


def figures(metrics: Mapping[str, Any], names: Sequence[str], metric: str = "score") -> str:
    """Return those of the metrics `names` that the step has, in that order, as text."""
    present = [name for name in names if metrics.get(name) is not None]
    return "".join(FIGURES[name].format(metrics[name], name=metric) for name in present).lstrip()


def step_line(
    report: StepReport, total_steps: int, seconds_left: float | None = None, metric: str = "score"
) -> str:
    """Return a step as one line of aligned figures; `metric` names what `value` measures."""
    head = _control(report.metrics) + f"step {report.step:>{len(str(total_steps))}}/{total_steps}"
    left = "" if seconds_left is None else f"left {clock_time(seconds_left):>8}"
    return "  ".join(part for part in (head, figures(report.metrics, LINE, metric), left) if part)


def interval(line: Evaluation) -> str:
    """Return the mean of an evaluation with its 95 % interval."""
    return f"{line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"


def counted(line: Evaluation) -> str:
    """Return how many problems an evaluation had, and how many it should have had where they were
    fewer.
    """
    if line["n"] < line.get("asked", 0):
        return f"n = {line['n']} distinct problems, {line['asked']} asked for"
    return f"n = {line['n']}"


def exact_rate(line: Evaluation) -> str:
    """Return the rate of exact answers of an evaluation, with its 95 % interval where known."""
    rate = f"exact {line['exact']:.3g}"
    if "exact_low" not in line:
        return rate
    return f"{rate} [{line['exact_low']:.3f}, {line['exact_high']:.3f}]"


def evaluation_line(line: Evaluation) -> str:
    """Return a line of eval.jsonl as a sentence.

    Two more keys say how it reads: `metric` names the score ("score"), `unit` what a level counts
    ("words"; "" for a level that counts nothing).
    """
    split = "training" if line["split"] == "train" else "held-out"
    level = (
        f"{line['level']} {unit}"
        if (unit := line.get("unit", "words"))
        else f"level {line['level']}"
    )
    sampling = f"temperature {line['temperature']:g}" if line["temperature"] else "greedy"
    aside = f"{counted(line)}, {sampling}, {exact_rate(line)}"
    if line.get("truncated"):
        aside += f", truncated {line['truncated']:.3g}"
    dropped = f"; {line['dropped']} trained on, dropped" if line.get("dropped") else ""
    dropped += (
        f"; {line['too_long']} too long for the context or the budget, passed over"
        if line.get("too_long")
        else ""
    )
    return (
        _control(line)
        + f"{split} {line.get('metric', 'score')} at {level}: {interval(line)} ({aside}{dropped})"
    )


def _control(line: Mapping[str, Any]) -> str:
    """Return the mark of a control run, in front of whatever is said of it; "" for a real run."""
    return f"CONTROL {line['control']}  " if line.get("control") else ""


def summary_table(
    before: Sequence[Evaluation], after: Sequence[Evaluation], metric: str = "score"
) -> list[str]:
    """Return the evaluations before and after training as a table: title, head, a line for each
    level and temperature.

    What was evaluated only once has a dash in the other column.
    """
    old, new = (
        {(line["level"], line["temperature"]): line for line in lines} for lines in (before, after)
    )
    counts = ", ".join(map(str, sorted({line["n"] for line in (*before, *after)})))
    metric = [*before, *after][0].get("metric", metric)
    table = [
        _control([*before, *after][0]) + f"held-out {metric}, mean [95 % interval], n = {counts}",
        f"{'level':>5}  {'sampling':<8}  {'before':<20}  {'after':<20}  exact",
    ]
    for level, temperature in sorted(old.keys() | new.keys()):
        pair = [lines.get((level, temperature)) for lines in (old, new)]
        means = "  ".join(f"{interval(line) if line else '-':<20}" for line in pair)
        exact = " → ".join(f"{line['exact']:.3f}" if line else "  -  " for line in pair)
        table.append(
            f"{level:>5}  {f'T {temperature:g}' if temperature else 'greedy':<8}  {means}  {exact}"
        )
    return table


def held_out_line(evaluations: Sequence[Evaluation]) -> str:
    """Return the first and the last mean of each level: "held out  10: 0.531 → 0.998  25: 0.402";
    "" where there is none.
    """
    means: dict[int, list[float]] = {}
    for line in evaluations:
        if line["split"] != "train" and line["temperature"]:
            means.setdefault(line["level"], []).append(line["mean"])
    told = [
        f"  {level}: {seen[0]:.3f}" + (f" → {seen[-1]:.3f}" if len(seen) > 1 else "")
        for level, seen in sorted(means.items())
    ]
    return "held out" + "".join(told) if told else ""


def panel(
    report: StepReport,
    total_steps: int,
    *,
    seconds_left: float | None = None,
    rewards: Sequence[float] = (),
    best: float | None = None,
    evaluations: Sequence[Evaluation] = (),
    metric: str = "score",
    reward_range: tuple[float, float] | None = (0.0, 1.0),
) -> Panel:
    """Return the live panel: progress, figures, the last `rewards` with their mean and the `best`
    of all as a sparkline over the `reward_range`, the held-out `evaluations`, the classes of the
    groups, and a completion, another one each step, held against what was wanted.
    """
    left = "" if seconds_left is None else f"left {clock_time(seconds_left)}"
    rows: list[RenderableType] = [
        _columns(
            ProgressBar(total_steps, report.step, complete_style="cyan", finished_style="cyan"),
            f"{report.step / total_steps:.0%}",
            left,
        )
    ]
    so_far = f"  mean {fmean(rewards):.3f}  best {best:.3f}" if rewards and best is not None else ""
    rows.append(
        _quiet(figures(report.metrics, ("reward", "reward_std")) + so_far).append(
            "  " + sparkline(rewards, reward_range), "cyan"
        )
    )
    if line := held_out_line(evaluations):
        rows.append(_quiet(line))
    rows += [
        _quiet(escape_control(line))
        for names in PANEL_ROWS
        if (line := figures(report.metrics, names, metric))
    ]
    if classes := classes_of(report.metrics):
        rows.append(Text.assemble(("groups ", "dim"), classes))
    scored = [
        (group.problem.target, *pair)
        for group in report.groups
        for pair in zip(group.texts, group.scores)
    ]
    if scored:
        target, text, score = scored[ROTATE * report.step % len(scored)]
        head = f"reward {score.reward:.3f}"
        rows.append(
            _columns(
                _quiet(head),
                _cut(rendered(aligned(target, text)), PANEL_WIDTH - len(head) - 6),
            )
        )
    title = Text(_control(report.metrics) + f"step {report.step} of {total_steps}", style="bold")
    return Panel(
        Stack(*rows), title=title, title_align="left", border_style="dim", width=PANEL_WIDTH
    )


def _cut(text: Text, width: int) -> Text:
    """Return the first SAMPLE_LINES lines of `text`, wrapped to `width` columns."""
    lines = text.wrap(RichConsole(), width - 2, overflow="fold")
    more = " …" if len(lines) > SAMPLE_LINES else ""
    shown = Text("\n").join(lines[:SAMPLE_LINES])
    shown.rstrip()
    return shown.append(more, "dim")


def _quiet(text: str) -> Text:
    """Return `text` with its words dim, so that the figures stand out."""
    line = Text.assemble((text, "dim"))
    line.highlight_regex(r"-?\d[\d.,]*(e-?\d+)?%?", "not dim")
    return line


def _columns(*cells: Any) -> Table:
    """Return `cells` side by side, each wrapped in its own column."""
    grid = Table.grid(*(Column(overflow="fold") for _ in cells), padding=(0, 2, 0, 0))
    grid.add_row(*cells)
    return grid


class Console:
    """The screen of a run: ``with Console(total_steps=300) as console: console.step(report)``.

    A terminal gets a live panel below lines that stay; any other `file` (default: standard output)
    gets lines without escape codes. `force_terminal` overrides the choice. `log_every` thins the
    plain step lines; `metric` names what `value` measures; `reward_range` is the task's. Leaving
    the ``with`` block, by an exception too, gives the terminal back as it was.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int = 1,
        metric: str = "score",
        reward_range: tuple[float, float] | None = (0.0, 1.0),
        file: TextIO | None = None,
        force_terminal: bool | None = None,
    ):
        self.total_steps, self.log_every, self.metric = total_steps, log_every, metric
        self.reward_range = reward_range
        self.file = file or sys.stdout
        self.encoding = self.file.encoding or "utf-8"
        # Decided here, not by rich: rich takes FORCE_COLOR, which many CI systems set, for a
        # terminal.
        usable = (
            self.file.isatty()
            and os.environ.get("TERM") != "dumb"
            and "utf" in self.encoding.lower()
        )
        self.terminal = usable if force_terminal is None else force_terminal
        self._rich = RichConsole(
            file=self.file, force_terminal=self.terminal, highlight=False, markup=False
        )
        self._live = Live(console=self._rich)
        self._pace: float | None = None  # seconds a step
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._best: float | None = None  # reward
        self._evaluations: list[Evaluation] = []

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Print a line that stays, with the time in front."""
        self._row(time.strftime("%H:%M:%S", time.gmtime()), line, style)

    def warn(self, line: str) -> None:
        """Say a warning."""
        self.say(f"warning: {line}", "yellow")

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and afterwards how long it took."""
        start = time.monotonic()
        with (
            self._rich.status(Text(f"loading {escape_control(what)}"))
            if self.terminal
            else nullcontext()
        ):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print what the run is going to do, as an aligned table that also names the clock of the
        lines to come.
        """
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._row(escape_control(name).ljust(width), value)

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of a pre-flight, a row for each level (the fields of a `LevelSurvey`)."""
        show_table(self._rich, rows, SURVEY, {})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Show a finished step (numbered from 1) and say its events."""
        if (step_time := report.metrics.get("step_time")) is not None:
            self._pace = smoothed(self._pace, step_time)
        seconds_left = None if self._pace is None else self._pace * (self.total_steps - report.step)
        if (reward := report.metrics.get("reward")) is not None:
            self._rewards.append(reward)
            self._best = reward if self._best is None else max(self._best, reward)
        if self.terminal:
            self._live.update(
                panel(
                    report,
                    self.total_steps,
                    seconds_left=seconds_left,
                    rewards=self._rewards,
                    best=self._best,
                    evaluations=self._evaluations,
                    metric=self.metric,
                    reward_range=self.reward_range,
                )
            )
            self._live.start(
                refresh=True
            )  # for the first panel; from then on it redraws itself, four times a second
        elif report.step % self.log_every == 0 or report.step == self.total_steps:
            self.say(step_line(report, self.total_steps, seconds_left, self.metric))
        for event in report.events:
            self.say(event)

    def evaluation(self, line: Evaluation) -> None:
        """Say a line of eval.jsonl (see `evaluation_line`)."""
        self._evaluations.append(line)
        self.say(evaluation_line({"metric": self.metric, **line}))

    def summary(
        self,
        before: Sequence[Evaluation],
        after: Sequence[Evaluation],
        files: Mapping[str, str],
        next_commands: Sequence[str],
        verdict: Sequence[str] = (),
    ) -> None:
        """End the live panel and print the verdict, the evaluations before and after, where the
        files are, and what to try next.
        """
        self._live.stop()
        tables = [list(verdict)] if verdict else []
        tables += [summary_table(before, after, self.metric)] if before or after else []
        width = max(map(len, files))
        tables.append(["files", *(f"  {name:<{width}}  {path}" for name, path in files.items())])
        tables.append(["next", *(f"  {command}" for command in next_commands)])
        for title, *lines in tables:
            self._write("")
            self._write(title, "bold")
            for line in lines:
                self._write(line)

    def _row(self, head: str, text: str, style: str = "") -> None:
        """Print `text` beside `head`; on a terminal what is too long for the line goes on below
        `text`.
        """
        if self.terminal:
            self._rich.print(
                _columns(Text(head, "dim"), Text(escape_control(text), style, overflow="fold"))
            )
        else:
            self._write(f"{head}  {text}")

    def _write(self, line: str, style: str = "") -> None:
        """Print `line` unwrapped, so that a path or a command can be copied whole."""
        if self.terminal:
            self._rich.print(Text(escape_control(line), style), soft_wrap=True)
        else:
            line = (
                escape_control(line).encode(self.encoding, "backslashreplace").decode(self.encoding)
            )
            print(line, file=self.file, flush=True)

"""The console of a run: a live panel on a terminal, plain lines of unlimited width elsewhere.

Text from a model or a file passes `escape_control` and goes to rich as `Text`, which is never
parsed for markup. So no such text can move the cursor or colour the screen. All clock times are
UTC.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import torch
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from data.text import escape_control, shortened
from grpo.config import Config
from grpo.ending import has_update
from grpo.evaluate import ShowProgress
from grpo.records import Ending, StepReport, sampled_groups
from grpo.show.group import aligned, classes_of, rendered
from grpo.show.lines import (
    FIGURES,
    Evaluation,
    clock_time,
    control_mark,
    evaluation_line,
    figures,
    show_table,
    sparkline,
    step_line,
    summary_table,
)
from grpo.trainer import Trainer
from tasks.base import declared_budget, problems_of, sources_of

# Without a terminal: the seconds that an activity takes before a line says how far it is, and the
# seconds between two such lines.
FIRST = 10.0
EVERY = 30.0

# The columns of the table of a pre-flight: heading, (key of the number, format).
SURVEY = {
    "level": ("level", "g"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".3f"),
    "std": ("reward_std", ".3f"),
    "groups that vary": ("varied", ".0%"),
    "any exact": ("any_exact", ".0%"),
    "truncated": ("truncated", ".0%"),
    "distinct": ("distinct", ".1f"),
}


class Activity:
    """`what` is being done, and how far it is: "evaluating at 10 words: scoring 64/200, 12 s"."""

    def __init__(self, what: str):
        self.what = what
        self.start = time.monotonic()
        self.next = FIRST  # when a program without a terminal says how far it is

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.start

    @property
    def line(self) -> str:
        """What is being done, how far it is, and for how long."""
        return f"{self.what}, {self.seconds:.0f} s"

    def __rich__(self) -> Text:
        """Return the line as rich redraws it, four times a second."""
        return Text(escape_control(self.line), "dim")


class Console:
    """The screen of a run: ``with Console(300) as console: console.step(report)``.

    A terminal gets a live panel below the lines. Any other `file` (default: standard output) gets
    lines without escape codes; `force_terminal` overrides the choice. Leaving the ``with`` block
    restores the terminal, even after an exception. `metric` is the name of the score,
    `reward_range` the range of the task's rewards. Other programs use `working` alone, on standard
    error: ``Console(0, file=sys.stderr)``.
    """

    def __init__(
        self,
        total_steps: int,
        metric: str = "score",
        reward_range: tuple[float, float] | None = (0.0, 1.0),
        *,
        file: TextIO | None = None,
        force_terminal: bool | None = None,
    ):
        self.history = History(total_steps, metric, reward_range)
        self.file = file or sys.stdout

        # Not left to rich, which assumes a terminal if FORCE_COLOR is set, as many CI systems do.
        usable = (
            self.file.isatty()
            and os.environ.get("TERM") != "dumb"
            and "utf" in (self.file.encoding or "utf-8").lower()
        )
        self.terminal = usable if force_terminal is None else force_terminal
        self._rich = RichConsole(
            file=self.file, force_terminal=self.terminal, highlight=False, markup=False
        )
        self._live = Live(console=self._rich)

        # What is being done, and slow scoring within it.
        self._activity: Activity | None = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.stop()

    # --- lines --------------------------------------------------------------------------------

    def say(self, line: str, style: str = "") -> None:
        """Print a line, preceded by the time of day."""
        self._row(time.strftime("%H:%M:%S", time.gmtime()), line, style)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}", "yellow")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print the settings of the run as an aligned table, and the time zone of later lines."""
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._row(escape_control(name).ljust(width), value)

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the pre-flight: each row has the fields of a `LevelSurvey`."""
        show_table(self._rich, rows, SURVEY, {})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Show a finished step (1, 2, ...) and print its events."""
        history = self.history
        history.add(report)
        if self.terminal:
            self._redraw()
        else:
            line = step_line(report, history.total_steps, history.seconds_left, history.metric)
            self.say(line)
        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    def evaluation(self, line: Evaluation) -> None:
        """Print a line of eval.jsonl (see `evaluation_line`)."""
        if line["split"] != "train" and line["temperature"]:
            self.history.held_out = line["mean"]
        self._redraw()
        self.say(evaluation_line({"metric": self.history.metric, **line}))

    def summary(self, ending: Ending) -> None:
        """End the live panel; print verdict, evaluations, files and the commands to try next.

        A verdict that is not expected is in colour.
        """
        self.history.pace = None  # nothing is left to do, although the run may have ended early
        self._redraw()
        self._live.stop()
        if ending.verdict:
            title, *lines = ending.verdict
            self._write("")
            self._write(title, "bold" if ending.is_expected else "bold red", wrap=True)
            for line in lines:
                self._write(line, wrap=True)

        tables = []
        if ending.before or ending.after:
            tables.append(summary_table(ending.before, ending.after, self.history.metric))
        width = max(map(len, ending.files))
        files = [f"  {name:<{width}}  {path}" for name, path in ending.files.items()]
        tables.append(["files", *files])
        tables.append(["next", *(f"  {command}" for command in ending.next_commands)])
        for title, *lines in tables:
            self._write("")
            self._write(title, "bold")
            for line in lines:
                self._write(line)

    def _row(self, head: str, text: str, style: str = "") -> None:
        """Print `text` beside `head`; a terminal wraps it within its own column."""
        if self.terminal:
            cell = Text(escape_control(text), style, overflow="fold")
            self._rich.print(columns(Text(head, "dim"), cell))
        else:
            self._write(f"{head}  {text}")

    def _write(self, line: str, style: str = "", wrap: bool = False) -> None:
        """Print `line`; without `wrap`, a path or a command in it can be copied whole."""
        if self.terminal:
            self._rich.print(Text(escape_control(line), style), soft_wrap=not wrap)
        else:
            print(escape_control(line), file=self.file, flush=True)

    # --- what is being done -------------------------------------------------------------------

    @contextmanager
    def working(self, what: str) -> Iterator[ShowProgress]:
        """Show that `what` is being done as long as this block lasts.

        The block gets a function that says how far it is: ``progress("scoring", 64, 200)``.
        """
        activity = Activity(what)
        before, self._activity = self._activity, activity

        def progress(part: str, done: int, total: int) -> None:
            activity.what = f"{what}: {part} {done:,}/{total:,}"
            if not self.terminal and activity.seconds >= activity.next:
                activity.next = activity.seconds + EVERY
                self.say(activity.line)

        self._redraw()
        try:
            yield progress
        finally:
            self._activity = before
            self._redraw()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and then how long it took."""
        start = time.monotonic()
        with self.working(f"loading {what}"):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")

    def _redraw(self) -> None:
        """Draw the panel, and below it what is being done. rich redraws them while time passes."""
        if not self.terminal:
            return
        report = self.history.report
        drawn = None if report is None else panel(report, self.history)
        parts = [part for part in (drawn, self._activity) if part is not None]

        # What was drawn before the first panel leaves no trace.
        self._live.transient = report is None
        if not parts:
            self._live.stop()
            return
        self._live.update(Group(*parts))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)


# --- the live panel ---------------------------------------------------------------------------

# A share of truncated completions, of groups that taught nothing, or of tokens in such groups, is
# yellow from the first number on, and red from the second.
TRUNCATED_LIMITS = (0.1, 0.5)
WASTED_LIMITS = (0.5, 1.0)

# Number of steps in the sparkline, and in the mean next to it.
RECENT = 30

# The weight of a step's time in the moving average that predicts the time left.
PACE_WEIGHT = 0.2

# At most this much of a completion is shown: three lines of a narrow terminal. From step to step
# its index grows by ROTATE, so that other groups are soon shown as well.
SAMPLE_CELLS = 200
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
    held_out: float | None = None  # the last mean that was sampled as in training

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


def panel(report: StepReport, history: History) -> Panel:
    """Return the live panel after a step, as wide as the terminal.

    It has what matters most, the reward with a sparkline, what was taught so far, the figures of
    the step, the classes of its groups, and a completion compared with its target, a different one
    each step. Only what is abnormal is in colour.
    """
    metrics = report.metrics
    rows: list[RenderableType] = [_first_row(metrics, history), _reward_row(metrics, history)]
    if metrics.get("num_tokens") and "wasted_tokens_total" in metrics and history.steps:
        share = metrics["wasted_tokens_total"] / metrics["num_tokens"]
        updated = f"weights updated in {history.updated} of {history.steps} steps, "
        taught = (" of the tokens taught nothing", "dim")
        rows.append(Text.assemble(_dim(updated), _alarming(share, WASTED_LIMITS), taught))
    rows.append(_dim(escape_control(figures(metrics, tuple(FIGURES), history.metric))))
    if classes := classes_of(metrics):
        rows.append(Text.assemble(("groups ", "dim"), classes))
    if sample := sample_row(report):
        rows.append(sample)

    title = Text(f"{control_mark(metrics)}step {report.step} of {history.total_steps}", "bold")
    return Panel(Group(*rows), title=title, title_align="left", border_style="dim")


def _first_row(metrics: Mapping[str, Any], history: History) -> Text:
    """Return the figures that matter most: reward, held-out score, groups, truncation, time."""
    parts = []
    if (reward := metrics.get("reward")) is not None:
        parts.append(_dim(f"reward {reward:.3f}"))
    if history.held_out is not None:
        parts.append(_dim(f"held out {history.held_out:.3f}"))

    kept, groups = metrics.get("groups/kept"), metrics.get("groups/count")
    if kept is not None and groups:
        trained = _alarming(1 - kept / groups, WASTED_LIMITS, f"{kept:g}/{groups:g}")
        parts.append(Text.assemble(("groups trained ", "dim"), trained))
    if (truncated := metrics.get("completions/clipped_ratio")) is not None:
        share = _alarming(truncated, TRUNCATED_LIMITS)
        parts.append(Text.assemble(("truncated ", "dim"), share))
    if history.seconds_left is not None:
        parts.append(Text.assemble(("ETA ", "dim"), clock_time(history.seconds_left)))
    return Text("  ").join(parts)


def _alarming(share: float, limits: tuple[float, float], shown: str = "") -> tuple[str, str]:
    """Return a share of which much is bad, and its style; "" if it is normal."""
    yellow, red = limits
    style = "bold red" if share >= red else "yellow" if share >= yellow else ""
    return shown or f"{share:.0%}", style


def _reward_row(metrics: Mapping[str, Any], history: History) -> Text:
    parts = []
    if (std := metrics.get("group_std")) is not None:
        parts.append(f"± {std:.3f} within groups")
    if history.rewards:
        parts.append(f"mean {fmean(history.rewards):.3f}  best {history.best:.3f}")
    return _dim("  ".join(parts)).append("  " + sparkline(history.rewards, history.reward_range))


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


# --- the settings of a run --------------------------------------------------------------------

# Settings that are shown always; all others but those of other lines if they are not at their
# default.
MAIN = "reward learning_rate lora_rank temperature loss scale credit beta on_degenerate".split()
ELSEWHERE = (
    "task level steps name resume start mixed control dataset problems task_options model device "
    "dtype prompts group_size max_new_tokens micro_tokens gradient_checkpointing curriculum"
).split()


def settings_of(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    task, levels = trainer.task, trainer.curriculum.levels
    about = [f"{config.task}, level {config.level}"]
    if len(levels) > 1:
        path = " → ".join(map(str, levels))
        about.append(f"levels {path}, promoted at a mean of {config.promote_at:g}")
    about += [f"{name} {value}" for name, value in config.task_options.items()]

    texts = len(sources_of(task))
    problems = config.dataset or config.problems + (f", from {texts} texts" if texts else "")
    if own := problems_of(task, "train"):
        problems = f"{len(own):,} training problems of the data, shuffled each epoch"

    default = {each.name: each.default for each in fields(Config)}
    names = [name for name in default if name in MAIN or getattr(config, name) != default[name]]
    chosen = {name: getattr(config, name) for name in names if name not in ELSEWHERE}
    return {
        "run": str(folder),
        **control,
        "task": ", ".join(about),
        "problems": problems,
        "model": _model(config, trainer),
        "batch": _batch(config, trainer),
        "settings": ", ".join(f"{name} {shortened(str(x), 40)}" for name, x in chosen.items()),
    }


def _model(config: Config, trainer: Trainer) -> str:
    policy, ranks = trainer.policy, trainer.ranks.size
    sizes = policy.model.parameters(), policy.parameters
    size, trained = (sum(each.numel() for each in part) / 1e6 for part in sizes)
    optimizer = trainer.optimizer
    has_masters = optimizer.masters[0] is not optimizer.weights[0]
    dtype = str(policy.dtype).removeprefix("torch.")
    return (
        f"{config.model}, {size:.1f} M parameters, {trained:.2f} M trained, {dtype}"
        f"{' with float32 masters' if has_masters else ''} on {policy.device}, "
        f"{torch.get_num_threads()} threads" + (f", {ranks} ranks" if ranks > 1 else "")
    )


def _batch(config: Config, trainer: Trainer) -> str:
    assert config.level is not None, "the configuration is resolved"
    budget = config.max_new_tokens or declared_budget(trainer.task, config.level)
    up_to = f", up to {budget} new tokens" if budget else ""
    why = "as set" if config.micro_tokens else "by the memory of the device"
    recomputed = ", gradient checkpointing" if trainer.policy.gradient_checkpointing else ""
    return (
        f"{config.prompts} prompts × {config.group_size} completions{up_to}, micro-batches of "
        f"{trainer.update_memory.micro_tokens:,} tokens ({why}){recomputed}"
    )

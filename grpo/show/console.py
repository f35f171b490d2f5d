"""The console of a run: one line for each thing that happens, and what is being done meanwhile.

Text from a model or a file passes `escape_control`, and is never parsed for markup. So no such text
can move the cursor or colour the screen. All clock times are UTC.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console as RichConsole
from rich.text import Text

from data.errors import escape_control, shortened
from grpo.config import Config
from grpo.evaluate import ShowProgress
from grpo.records import StepReport
from grpo.show.lines import Evaluation, evaluation_line, show_table, step_line, summary_table
from grpo.trainer import Trainer
from tasks.base import declared_budget, problems_of, sources_of

# Without a terminal: the seconds that an activity takes before a line says how far it is, and the
# seconds between two such lines.
FIRST = 10.0
EVERY = 30.0

# The weight of a step's time in the moving average that predicts the time left.
PACE_WEIGHT = 0.2

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

PROMPTS = {
    "examples": ("shots", "g"),
    "reward": ("reward", ".3f"),
    "score": ("value", ".3f"),
    "groups\nthat vary": ("varied", ".0%"),
    "truncated": ("truncated", ".0%"),
}


def _end_of_wording(row: Mapping[str, Any]) -> str:
    """Return the last words of the instruction, before the texts."""
    instruction = row["wording"].partition("\n")[0]
    return f"… {instruction[-50:]}" if instruction else "as the task's own"


class Console:
    """The screen of a run: ``Console(300).step(report)``.

    A terminal also shows what is being done, in a line that vanishes. Any other `file` (default:
    standard output) gets lines without escape codes. `metric` is the name of the score. Other
    programs use `working` alone, on standard error: ``Console(0, file=sys.stderr)``.
    """

    def __init__(self, total_steps: int, metric: str = "score", *, file: TextIO | None = None):
        self.total_steps = total_steps
        self.metric = metric
        self.pace: float | None = None  # the smoothed seconds per step

        self.file = file or sys.stdout
        # Not left to rich, which assumes a terminal if FORCE_COLOR is set, as many CI systems do.
        self.terminal = self.file.isatty()
        self._rich = RichConsole(
            file=self.file, force_terminal=self.terminal, highlight=False, markup=False
        )

    # --- lines --------------------------------------------------------------------------------

    def say(self, line: str, style: str = "") -> None:
        """Print a line, preceded by the time of day."""
        self._write(f"{time.strftime('%H:%M:%S', time.gmtime())}  {line}", style)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}", "yellow")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print the settings of the run as an aligned table, and the time zone of later lines."""
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._write(f"{name:<{width}}  {value}")

    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of the pre-flight: each row has the fields of a `LevelSurvey`."""
        show_table(self._rich, rows, SURVEY, {})

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of prompts: each row has the fields of a `PromptSurvey`."""
        show_table(self._rich, rows, PROMPTS, {"the wording ends": _end_of_wording})

    def prompt(self, title: str, lines: Sequence[str]) -> None:
        """Print a prompt under its title."""
        self._write(title, "dim")
        for line in lines:
            self._write(f"  {line}")

    def step(self, report: StepReport) -> None:
        """Print the line of a finished step (1, 2, ...), and its events."""
        left = None
        if (seconds := report.metrics.get("step_time")) is not None:
            before = seconds if self.pace is None else self.pace
            self.pace = before + PACE_WEIGHT * (seconds - before)
            left = self.pace * (self.total_steps - report.step)
        self.say(step_line(report, self.total_steps, left, self.metric))
        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    def evaluation(self, line: Evaluation) -> None:
        """Print a line of eval.jsonl (see `evaluation_line`)."""
        self.say(evaluation_line({"metric": self.metric, **line}))

    def summary(
        self,
        files: Mapping[str, str],
        next_commands: Sequence[str] = (),
        before: Sequence[Evaluation] = (),
        after: Sequence[Evaluation] = (),
        verdict: Sequence[str] = (),
        is_expected: bool = True,
    ) -> None:
        """Print verdict, evaluations, files and the commands to try next.

        A verdict that is not expected is in colour.
        """
        if verdict:
            title, *lines = verdict
            self._write("")
            self._write(title, "bold" if is_expected else "bold red")
            for line in lines:
                self._write(line)
        if before or after:
            title, *lines = summary_table(before, after, self.metric)
            self._part(title, lines)
        width = max(map(len, files))
        self._part("files", [f"  {key:<{width}}  {path}" for key, path in files.items()])
        self._part("next", [f"  {command}" for command in next_commands])

    def _part(self, title: str, lines: Sequence[str]) -> None:
        """Print the part of a summary below its title."""
        self._write("")
        self._write(title, "bold")
        for line in lines:
            self._write(line)

    def _write(self, line: str, style: str = "") -> None:
        """Print a line in one piece, so that a path or a command in it can be copied whole."""
        if self.terminal:
            self._rich.print(Text(escape_control(line), style), soft_wrap=True)
        else:
            print(escape_control(line), file=self.file, flush=True)

    # --- what is being done -------------------------------------------------------------------

    @contextmanager
    def working(self, what: str) -> Iterator[ShowProgress]:
        """Show that `what` is being done as long as this block lasts.

        The block gets a function that says how far it is: ``progress("scoring", 64, 200)``.
        """
        start, next_line = time.monotonic(), FIRST
        status = self._rich.status(_dim(what), spinner="line", refresh_per_second=4)

        def progress(part: str, done: int, total: int) -> None:
            nonlocal next_line
            line, seconds = f"{what}: {part} {done:,}/{total:,}", time.monotonic() - start
            status.update(_dim(line))
            if not self.terminal and seconds >= next_line:
                next_line = seconds + EVERY
                self.say(f"{line}, {seconds:.0f} s")

        if self.terminal:
            status.start()
        try:
            yield progress
        finally:
            status.stop()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded, and then how long it took."""
        start = time.monotonic()
        with self.working(f"loading {what}"):
            yield
        self.say(f"loading {what} ... {time.monotonic() - start:.1f} s")


def _dim(line: str) -> Text:
    return Text(escape_control(line), "dim")


# --- the settings of a run --------------------------------------------------------------------

# Settings that are shown always; all others but those of other lines if they are not at their
# default.
MAIN = "reward learning_rate lora_rank temperature loss scale credit beta on_degenerate".split()
ELSEWHERE = (
    "task level steps name resume start mixed control dataset problems task_options model device "
    "dtype prompts group_size max_new_tokens curriculum"
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
        about.append(f"levels {', '.join(map(str, levels))}, drawn where groups vary")
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
    recomputed = ", gradient checkpointing" if trainer.policy.gradient_checkpointing else ""
    return (
        f"{config.prompts} prompts × {config.group_size} completions{up_to}, micro-batches of "
        f"{trainer.update_memory.micro_tokens:,} tokens{recomputed}"
    )

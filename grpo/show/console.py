"""The console of a run: one line for each thing that happens, and what is being done meanwhile.

Text from a model or a file passes `escape_control`, and is never parsed for markup. So no such text
can move the cursor or colour the screen. All clock times are UTC. Torch is not imported until a
run's settings are shown, because programs that only read a run use these lines and tables, too.
"""

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from grpo.config import Config
from grpo.data.errors import escape_control, shortened
from grpo.records import StepReport, level_name
from grpo.tasks.base import problems_of, sources_of

if TYPE_CHECKING:
    from grpo.trainer import Trainer

Record = Mapping[str, Any]

# Without a terminal, the seconds between two lines that say how far an activity is.
EVERY = 30.0

# The weight of a step's time in the moving average that predicts the time left.
PACE_WEIGHT = 0.2

# Lines of a log that have more than 100 columns are broken at spaces, and go on indented.
WRAPPER = textwrap.TextWrapper(
    100, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False
)

# The metrics in the line of a step, and their formats. Widths are fixed, so that the lines of a run
# form columns; metrics.jsonl has the rest. "{name}" is the name of the score. In a run by windows,
# which are laid where the policy is weak, what whole answers are expected to score stands for it.
FIGURES = {
    "level": "  level {:>3g}",
    "reward": "  reward {:.3f}",
    "group_std": " ± {:.3f}",
    "value": "  {name} {:.3f}",
    "windows/expected": "  expected {:.3f}",
    "groups/kept": "  kept {:>2g}",
    "groups/count": "/{:<2g}",
}

# What precedes an evaluation that is no report, by its purpose.
OCCASIONS = {
    "warm start": "imitating: ",
    "imitation": "after imitation: ",
    "promotion": "validation check: ",
}

# The columns of numbers in tables, by the key in the metrics of a step, the summary of a group and
# the like: heading, format.
COLUMNS = {
    "step": ("step", "d"),
    "group": ("group", "d"),
    "level": ("level", "d"),
    "shots": ("examples", "d"),
    "reward": ("reward", ".3f"),
    "group_std": ("std", ".3f"),
    "reward_std": ("std", ".3f"),
    "value": ("score", ".3f"),
    "exact": ("exact", ".3f"),
    "varied": ("varied", ".0%"),
    "any_exact": ("any exact", ".0%"),
    "truncated": ("truncated", ".0%"),
    "groups/count": ("groups", "d"),
    "groups/kept": ("kept", "d"),
    "completions/mean_length": ("tokens", ".0f"),
    "distinct": ("distinct", ".3g"),
    "distinct_completions": ("distinct", ".1f"),
    "entropy": ("entropy", ".3f"),
    "grad_norm": ("grad norm", ".3f"),
    "kl": ("KL", ".4f"),
    "step_time": ("time (s)", ".1f"),
    "position": ("position", "d"),
    "token": ("token", "d"),
    "logprob": ("log-prob", ".4f"),
    "advantage": ("advantage", "+.3f"),
    "stored": ("stored", ".17g"),
    "repeated": ("repeated", ".17g"),
}

# Settings that are listed although they are at their default.
MAIN = "task group_size temperature loss scale credit beta on_degenerate".split()


class Console:
    """The screen of a run: ``Console(300).step(report)``; `metric` is the name of the score.

    A terminal also shows what is being done, in a line that vanishes. Any other `file` (default:
    standard output) gets lines without escape codes, of at most 100 columns.
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
        self._write(time.strftime("%H:%M:%S  ", time.gmtime()) + line, style)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}", "yellow")

    def settings(self, settings: Mapping[str, str]) -> None:
        """Print the settings of the run as an aligned table, and the time zone of later lines."""
        settings = {**settings, "clock": "UTC"}
        width = max(map(len, settings))
        for name, value in settings.items():
            self._write(f"{name:<{width}}  {value}")

    def survey(self, rows: Sequence[Record]) -> None:
        """Print a table of the pre-flight, with a row for each level or for each prompt."""
        names = [name for name in COLUMNS if name in rows[0]]
        if "wording" in rows[0]:
            names.append("the wording ends")
            rows = [{**row, names[-1]: _ending(row["wording"])} for row in rows]
        show_table(self._rich, rows, names)

    def part(
        self, title: str, lines: Sequence[str], style: str = "bold", *, is_whole: bool = False
    ) -> None:
        """Print lines below a title; whole ones may be wider than a log."""
        self._write("")
        self._write(title, style)
        for line in lines:
            self._write(line, is_whole=is_whole)

    def step(self, report: StepReport) -> None:
        """Print a finished step (1, 2, ...) as a line of aligned figures, and its events."""
        metrics, left = report.metrics, ""
        if (seconds := metrics.get("step_time")) is not None:
            before = seconds if self.pace is None else self.pace
            self.pace = before + PACE_WEIGHT * (seconds - before)
            rest = round(self.pace * (self.total_steps - report.step))
            left = f"ETA {timedelta(seconds=rest)}"

        width = len(str(self.total_steps))
        head = f"{control_mark(metrics)}step {report.step:>{width}}/{self.total_steps}"
        values = metrics | ({"value": None} if "windows/expected" in metrics else {})
        figures = "".join(
            style.format(values[key], name=self.metric)
            for key, style in FIGURES.items()
            if values.get(key) is not None
        )
        self.say("  ".join(filter(None, (head, figures.lstrip(), left))))
        for event in report.events:
            self.say(event, "yellow" if event.startswith("ALARM") else "")

    def evaluation(self, line: Record) -> None:
        """Print a line of eval.jsonl as a sentence."""
        occasion = OCCASIONS.get(line["purpose"], "")
        self.say(f"{control_mark(line)}{occasion}held-out {evaluation_in_words(line)}")

    def _write(self, line: str, style: str = "", *, is_whole: bool = False) -> None:
        """Print a line. A terminal breaks a long one itself; in a log, one that need not stay whole
        is broken at spaces.
        """
        text = escape_control(line)
        if not (self.terminal or is_whole):
            text = WRAPPER.fill(text)
        self._rich.print(Text(text, style), soft_wrap=True)

    # --- what is being done -------------------------------------------------------------------

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Show that `what` is being done; yield the function ``progress("scoring", 64, 200)``."""
        start, next_line = time.monotonic(), EVERY
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


def _dim(line: str) -> Text:
    return Text(escape_control(line), "dim")


def _ending(wording: str) -> str:
    """Return the last words of the instruction, before the texts."""
    instruction = wording.partition("\n")[0]
    return f"… {instruction[-50:]}" if instruction else "as the task's own"


# --- the settings of a run --------------------------------------------------------------------


def settings_of(folder: Path, config: Config, trainer: "Trainer") -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`."""
    problems = config.dataset or "fresh"
    if not config.dataset and (own := problems_of(trainer.task, "train")):
        problems = f"{len(own):,} training problems of the data, shuffled each epoch"
    elif not config.dataset and (texts := sources_of(trainer.task)):
        problems = f"fresh, from {len(texts)} texts"

    defaults = vars(Config()) | {"control": config.control, "model": config.model}  # shown above
    chosen = [
        f"{name} {shortened(str(value), 40)}"
        for name, value in vars(config).items()
        if value != defaults[name] or name in MAIN
    ]
    about_control = "a control experiment, whose rewards carry no information"
    return {
        "run": str(folder),
        **{name: f"{control}: {about_control}" for name, control in config.mark.items()},
        "model": _model(config, trainer),
        "problems": problems,
        "settings": ", ".join(chosen),
    }


def _model(config: Config, trainer: "Trainer") -> str:
    import torch

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


# --- evaluations and tables -------------------------------------------------------------------


def control_mark(line: Record) -> str:
    """Return the mark of a control experiment; "" for an ordinary run."""
    return f"CONTROL {line['control']}  " if line.get("control") else ""


def interval(line: Record, style: str = ".3f") -> str:
    """Return the mean of an evaluation with its 95 % interval, by the format of a number."""
    mean, low, high = (format(line[name], style) for name in ("mean", "ci_low", "ci_high"))
    return f"{mean} [{low}, {high}]"


def evaluation_in_words(line: Record) -> str:
    """Return a line of eval.jsonl in words: the score with its interval, and how it was taken."""
    details = (
        f"{counted(line)}, {sampling_name(line)}, exact {line['exact']:.3g} "
        f"[{line['exact_low']:.3f}, {line['exact_high']:.3f}]"
    )
    if line["truncated"]:
        details += f", truncated {line['truncated']:.3g}"
    if line.get("unjudged"):
        details += f", {line['unjudged']} completions unjudged"
    if line["dropped"]:
        details += f"; {line['dropped']} dropped: the policy was trained on them"
    if line["too_long"]:
        details += f"; {line['too_long']} dropped: too long for the context or the budget"
    level = level_name(line["level"], line["unit"])
    return f"{line['metric']} at {level}: {interval(line)} ({details})"


def counted(line: Record) -> str:
    """Return the number of problems of an evaluation, and the number asked for if higher."""
    if line["n"] < line.get("asked", 0):
        kind = "judged" if line.get("unjudged") else "distinct"
        return f"n = {line['n']} {kind} problems, {line['asked']} asked for"
    return f"n = {line['n']}"


def sampling_name(line: Record) -> str:
    """Return how the completions of an evaluation were sampled."""
    return f"temperature {line['temperature']:g}" if line["temperature"] else "greedy"


def show_table(console: RichConsole, lines: Sequence[Record], names: Sequence[str]) -> None:
    """Print a table with a row for each line, cut at the edge of the screen.

    `names` are keys of the lines: those of COLUMNS are numbers, all others are text below the name.
    """
    columns = []
    for name in names:
        head, style = COLUMNS.get(name, (name, ""))
        column = [Text(head, "bold")]
        for value in (line.get(name) for line in lines):
            if style:
                column.append(Text("-" if value is None else format(value, style)))
            else:
                column.append(Text(escape_control(value or "")))
        width = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("right" if style else "left", width)
        columns.append(column)

    # Not a `rich.table.Table`, which takes 4 s for 5,000 rows.
    rows = [Text("  ").join(row) for row in zip(*columns)]
    console.print(Text("\n").join(rows), no_wrap=True, overflow="ellipsis")

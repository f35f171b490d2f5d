"""Send a run to TensorBoard, Weights & Biases or trackio: its hyperparameters, its metrics under
their names in metrics.jsonl, histograms of each step, and tables of samples.

A tracker that fails is reported once and not used again, and training continues. Weights & Biases
follows WANDB_MODE (offline, online, disabled) and WANDB_PROJECT. trackio needs a newer
huggingface_hub than constraints.txt has, so it is an extra of its own (tested with trackio 0.43).
"""

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.text import escape_control
from grpo.config import names_in
from grpo.records import Group, StepReport, sampled_groups

PROJECT = "grpo"

# A table has so many completions of a step, evenly spaced from the lowest to the highest reward.
SAMPLES = 8
COLUMNS = ("level", "prompt", "completion", "target", "reward", "advantage", "finish")

Numbers = Mapping[str, float]
Histograms = Mapping[str, Sequence[float]]
Rows = Sequence[Sequence[Any]]


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        settings = (f"    {name}: {value}" for name, value in config.items())
        self.writer.add_text("settings", "\n".join(settings))

    def log(self, step: int, scalars: Numbers, histograms: Histograms, rows: Rows) -> None:
        for name, number in scalars.items():
            self.writer.add_scalar(name, number, step)
        for name, values in histograms.items():
            self.writer.add_histogram(name, list(values), step)
        if rows:
            self.writer.add_text("samples", markdown(rows), step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class _WeightsAndBiases:
    """Weights & Biases, or trackio, which has the same interface."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int, name: str = "wandb"):
        self.module = importlib.import_module(name)
        more: dict[str, Any] = {}
        if name == "wandb":
            more = {"id": folder.name, "dir": str(folder)}
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            config=dict(config),
            resume="allow",
            **more,
        )

    def log(self, step: int, scalars: Numbers, histograms: Histograms, rows: Rows) -> None:
        sent: dict[str, Any] = dict(scalars)
        for name, values in histograms.items():
            sent[name] = self.module.Histogram(list(values))
        if rows:
            table = self.module.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
            sent["samples"] = table
        self.run.log(sent, step=step)

    def finish(self) -> None:
        self.run.finish()


# By the name of the package as well. Each is made with the run's folder, its settings and the
# number of steps it has made. `log` sends numbers, values for histograms, and rows of the table
# "samples"; `finish` sends the rest.
CLASSES: dict[str, Any] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "trackio": partial(_WeightsAndBiases, name="trackio"),
}


def check_installed(text: str | None) -> None:
    """Raise UserError if a tracker in the comma-separated list `text` is not installed."""
    for name in names_in(text):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"--track {text}: {name} is not installed: pip install {name}"
            ) from error


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl or eval.jsonl.

    Those of an evaluation get its purpose and level as a prefix, e.g. "report/25/mean".
    """
    prefix = f"{line['purpose']}/{line['level']}/" if "purpose" in line else ""
    left_out = {"step", "level"} if prefix else {"step"}

    found = {}
    for name, value in line.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and name not in left_out:
            found[prefix + name] = value
    return found


def histograms(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return the rewards and lengths of a step's sampled completions, and all advantages.

    There are no advantages if nothing was learned; advantages of tokens count one by one.
    """
    sampled = sampled_groups(groups)
    values: dict[str, list[float]] = {
        "rewards": [reward for group in sampled for reward in group.rewards],
        "advantages": [
            number
            for group in groups
            for advantage in group.advantages
            for number in (advantage if isinstance(advantage, list) else [advantage])
        ],
        "lengths": [
            len(completion.tokens) for group in sampled for completion in group.completions
        ],
    }
    finite = {name: [one for one in all_ if math.isfinite(one)] for name, all_ in values.items()}
    return {f"histograms/{name}": kept for name, kept in finite.items() if kept}


def samples(groups: Sequence[Group]) -> list[Sequence[Any]]:
    """Return a few sampled completions of a step, from the lowest to the highest reward.

    The advantage of a completion whose tokens have one each is their mean, None if it has none.
    """
    groups = sampled_groups(groups)
    rows = [
        (
            group.problem.level,
            group.problem.prompt,
            completion.text,
            group.problem.target,
            score.reward,
            _mean(group.advantages[number]) if group.advantages else None,
            completion.finish,
        )
        for group in groups
        for number, (completion, score) in enumerate(zip(group.completions, group.scores))
    ]
    rewards = [reward for group in groups for reward in group.rewards]
    rows = [rows[number] for number in sorted(range(len(rows)), key=rewards.__getitem__)]
    last = min(SAMPLES, len(rows)) - 1
    return [rows[number * (len(rows) - 1) // max(last, 1)] for number in range(last + 1)]


def _mean(advantage: float | list[float]) -> float:
    if isinstance(advantage, list):
        return sum(advantage) / max(len(advantage), 1)
    return advantage


def markdown(rows: Rows) -> str:
    """Return a table in Markdown, in which no text of a model has a meaning."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = escape_control("" if value is None else str(value))
    return "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in text)


class Trackers:
    """The trackers of one run.

    `text` names them, separated by commas. Each is started for the run in `folder`, which has made
    `done` steps. `say` gets a line for each one that fails.
    """

    def __init__(
        self,
        text: str | None,
        folder: Path,
        config: Mapping[str, Any],
        done: int,
        say: Callable[[str], None],
    ):
        self.say = say
        self.live: dict[str, Any] = {}
        for name in names_in(text):
            with self._guarded(name):
                self.live[name] = CLASSES[name](folder, config, done)

    def step(self, report: StepReport, *, with_samples: bool) -> None:
        """Send a step: its metrics and histograms, and a table of samples if that is asked for."""
        if self.live:
            rows = samples(report.groups) if with_samples else []
            self._send(report.step, scalars(report.metrics), histograms(report.groups), rows)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of eval.jsonl, at its step."""
        self._send(line["step"], scalars(line), {}, [])

    def finish(self) -> None:
        """Close the trackers."""
        for name, tracker in list(self.live.items()):
            with self._guarded(name):
                tracker.finish()

    def _send(self, step: int, numbers: Numbers, values: Histograms, rows: Rows) -> None:
        for name, tracker in list(self.live.items()):
            with self._guarded(name):
                tracker.log(step, numbers, values, rows)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Leave out a tracker that fails in this block: no failure of one may end the run."""
        try:
            yield
        except Exception as error:
            self.live.pop(name, None)
            self.say(
                f"--track {name} failed and is no longer used: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )

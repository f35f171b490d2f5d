"""Send a run's metrics to TensorBoard, Weights & Biases or trackio.

They have the same names as in metrics.jsonl. A tracker that fails is reported once and not used
again, and training continues. Weights & Biases follows WANDB_MODE (offline, online, disabled) and
WANDB_PROJECT. trackio needs a newer huggingface_hub than constraints.txt has, so it is an extra of
its own (tested with trackio 0.43).
"""

import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo.config import names_in
from tasks.base import UserError

PROJECT = "grpo"


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class _Run:
    """A tracker with the interface of Weights & Biases, which trackio has as well."""

    run: Any

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def finish(self) -> None:
        self.run.finish()


class _WeightsAndBiases(_Run):
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )


class _Trackio(_Run):
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        import trackio

        self.run = trackio.init(
            project=PROJECT, name=folder.name, config=dict(config), resume="allow"
        )


CLASSES = {
    "tensorboard": ("tensorboard", _TensorBoard),
    "wandb": ("wandb", _WeightsAndBiases),
    "trackio": ("trackio", _Trackio),
}


def check_installed(text: str | None) -> None:
    """Raise UserError if a tracker in the comma-separated list `text` is not installed."""
    for name in names_in(text):
        try:
            importlib.import_module(CLASSES[name][0])
        except ImportError as error:
            raise UserError(
                f"--track {text}: {name} is not installed: pip install {CLASSES[name][0]}"
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
            self._try(name, partial(self._begin, name, folder, config, done))

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl or eval.jsonl, at its step."""
        for name, tracker in list(self.live.items()):
            self._try(name, partial(tracker.log, scalars(line), line["step"]))

    def finish(self) -> None:
        """Close the trackers."""
        for name, tracker in list(self.live.items()):
            self._try(name, tracker.finish)

    def _begin(self, name: str, folder: Path, config: Mapping[str, Any], done: int) -> None:
        self.live[name] = CLASSES[name][1](folder, config, done)

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # no failure of a tracker may end the run
            self.live.pop(name, None)
            self.say(
                f"--track {name} failed and is no longer used: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )

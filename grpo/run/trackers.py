"""Send a run to TensorBoard or Weights & Biases: its settings, and its metrics under their names in
metrics.jsonl.

A tracker that fails is reported once and not used again, and training continues. Weights & Biases
follows WANDB_MODE (offline, online, disabled) and WANDB_PROJECT.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.data.errors import needs


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        settings = (f"    {name}: {value}" for name, value in config.items())
        self.writer.add_text("settings", "\n".join(settings))
        self.finish = self.writer.close

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()


class _WeightsAndBiases:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo"),
            name=folder.name,
            id=folder.name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )
        self.finish = self.run.finish

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)


# By the name of the package. Each is made with the run's folder, its settings and the number of
# steps it has made.
CLASSES: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}


def check_installed(name: str) -> None:
    """Raise UserError if the tracker `name` is not installed."""
    with needs(name, "trackers", f"--track {name}"):
        importlib.import_module(name)


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl or eval.jsonl.

    Those of an evaluation get its purpose and level as a prefix, e.g. "report/25/mean".
    """
    prefix = f"{line['purpose']}/{line['level']}/" if "purpose" in line else ""
    left_out = {"step", "level"} if prefix else {"step"}
    return {
        prefix + name: value
        for name, value in line.items()
        if type(value) in (int, float) and name not in left_out
    }


class Tracker:
    """The tracker `name` of the run in `folder`, which has made `done` steps.

    `say` gets a line if it fails.
    """

    def __init__(self, name: str, folder: Path, config: dict, done: int, say: Callable):
        self.name, self.say = name, say
        self.inner: Any = None
        with self._guarded():
            self.inner = CLASSES[name](folder, config, done)

    def send(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl or eval.jsonl, at its step."""
        if self.inner:
            with self._guarded():
                self.inner.log(line["step"], scalars(line))

    def finish(self) -> None:
        """Close the tracker."""
        if self.inner:
            with self._guarded():
                self.inner.finish()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Stop using the tracker if it fails in this block: that must not end the run."""
        try:
            yield
        except Exception as error:
            self.inner = None
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.say(f"--track {self.name} failed and is no longer used: {why}")

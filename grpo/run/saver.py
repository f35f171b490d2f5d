"""Save a run: decide when a checkpoint is due, copy the state, and write it in the background.

The state is copied to host memory, and the copy is written while training continues. If host memory
has no room for the copy, training waits until the checkpoint is written.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.errors import blaming
from data.files import read_json
from grpo.learn.update import named_tensors
from grpo.model.weights import check_loaded
from grpo.run.background import HostMemory, Save, Saved, Writer
from grpo.run.checkpoint import (
    load_optimizer,
    save_optimizer,
)
from grpo.run.checkpoint_rules import SHARE, CheckpointRules
from grpo.run.display import Display
from grpo.run.folders import step_of
from grpo.run.random_state import load_rng, rng_state
from grpo.run.sources import NAME
from grpo.trainer import Trainer


class Saver:
    """The checkpoints of one run.

    - `saved`: the last step that is saved, or being saved;
    - `best`: the name of the checkpoint with the highest reward;
    - `step_times`: seconds of each step, until the spacing of saves is chosen;
    - `chosen_spacing`: the spacing that the last save chose; known on rank 0 only.

    `warn` shows a warning and keeps it in warnings.log. `dependencies` returns the contents of
    sources.json.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        console: Display,
        warn: Callable[[str], None],
        dependencies: Callable[[], dict[str, Any]],
    ):
        # Absolute, because a reward may change the working directory while a checkpoint is written.
        self.folder = folder.absolute()
        self.config = config = trainer.config
        self.trainer = trainer
        self.ranks = trainer.ranks
        self.console = console
        self.warn = warn
        self.dependencies = dependencies
        self.rules = CheckpointRules(config.save_every, config.save_threshold, config.best_margin)
        self.best: str | None = None
        self.saved: int | None = None
        self.memory = HostMemory()
        self.writer = Writer()
        self.step_times: list[float] = []
        self.chosen_spacing: int | None = None
        self.has_warned_of_memory = False

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load the optimizer, the random state and the rules of a checkpoint.

        Raises UserError if they are not those of this run.
        """
        self.rules.load_state_dict(state["rules"])
        with blaming(f"{checkpoint}: manifest.json is not what a run writes"):
            note = read_json(checkpoint / "manifest.json")["note"]
            self.rules.spacing = note.get("spacing")
        self.best = state["best"]
        self.saved = step_of(checkpoint)

        optimizer = self.trainer.optimizer
        with blaming(f"{checkpoint}: the optimizer's state does not fit this run"):
            load_optimizer(checkpoint, optimizer)
        check_loaded(named_tensors(self.trainer.policy, optimizer), str(checkpoint))
        with blaming(f"{checkpoint}: rng.json holds no state of the random generators"):
            load_rng(checkpoint)

    def save_if_due(
        self, step: int, earned: float, level: int, step_time: float, *, is_last: bool
    ) -> None:
        """Save the state after `step` at `level` if the rules ask for it or it is the last one.

        `earned` is the step's mean reward on a scale from 0 to 1, `step_time` is in seconds. Also
        reports the previous save if it is complete.
        """
        self.collect()
        self._settle_spacing(step_time)

        reasons = self.rules.decide(step, earned, level)
        if not reasons and is_last:
            reasons = ["the last step"]
        if reasons:
            self.save(reasons)

    def _settle_spacing(self, step_time: float) -> None:
        """Adopt the spacing that the last save chose, unless the rules have one already.

        All ranks adopt the same spacing.
        """
        if self.rules.spacing is not None:
            return
        self.step_times.append(step_time)
        if self.rules.last is not None:
            self.rules.spacing = self.ranks.on_rank0(lambda: self.chosen_spacing)

    def save(self, reasons: list[str]) -> None:
        """Copy the state after this step, and write the copy while training continues."""
        started = time.perf_counter()
        self.collect(wait=True)
        self.saved = self.trainer.done
        if self.saved == self.rules.best_step:
            self.best = f"step-{self.saved:06d}"

        optimizer = self.trainer.optimizer.state_dict()  # all ranks take part
        if not self.ranks.is_rank0:
            return

        tensors, is_copied = self._copied(self.trainer.policy.saved_tensors(), optimizer)
        best = self.folder / "checkpoints" / self.best if self.best else None
        save = Save(
            self.folder,
            self.saved,
            partial(self._write_state, tensors, self._state_texts()),
            reasons,
            waiting=time.perf_counter() - started,
            spacing=self.rules.spacing or self.chosen_spacing,
            step_times=tuple(self.step_times),
            keep=best if self.config.keep_best else None,
            in_background=is_copied,
        )
        if is_copied:
            self.writer.start(save)
        else:
            self._say_saved(save())

    def _copied(
        self, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Return "weights" and "optimizer" as copies in host memory, and True.

        If host memory has no room for them, returns the originals and False.
        """
        live = {"weights": weights, "optimizer": optimizer}
        try:
            return {"optimizer": optimizer, **self.memory.copy(live)}, True
        except MemoryError as error:
            if not self.has_warned_of_memory:
                self.has_warned_of_memory = True
                self.warn(
                    f"not enough host memory for a copy of the state ({error}): training waits "
                    "while checkpoints are written"
                )
            return {"optimizer": optimizer, "weights": weights}, False

    def collect(self, *, wait: bool = False) -> None:
        """Report the checkpoint that is being written if it is complete, or raise its error.

        With `wait`, waits until it is complete.
        """
        if saved := self.writer.collect(wait=wait):
            self._say_saved(saved)

    def _say_saved(self, saved: Saved) -> None:
        """Report a complete checkpoint, and the spacing if it is the first one that chose it."""
        for line in (saved.line, *saved.removed):
            self.console.say(line)

        has_spacing = self.rules.spacing is not None or self.chosen_spacing is not None
        if saved.spacing and not has_spacing:
            self.chosen_spacing = saved.spacing
            if saved.spacing > 1:
                self.console.say(
                    "from now on, checkpoints that are saved only for a new best are at least "
                    f"{saved.spacing} steps apart, so that they take at most "
                    f"{SHARE:.0%} of the time"
                )

    def _state_texts(self) -> dict[str, str]:
        """Return the text of each JSON file of a checkpoint, by name."""
        state = {
            "trainer": self.trainer.state(),
            "rules": self.rules.state_dict(),
            "best": self.best,
        }
        return {
            "rng.json": json.dumps(rng_state()),
            "trainer.json": json.dumps(state),
            NAME: json.dumps(self.dependencies(), indent=1) + "\n",
        }

    def _write_state(self, tensors: dict[str, Any], texts: Mapping[str, str], folder: Path) -> None:
        """Write the files of a checkpoint into `folder`."""
        self.trainer.policy.save(folder, tensors["weights"])
        save_optimizer(folder, tensors["optimizer"])
        for name, text in texts.items():
            (folder / name).write_text(text, "utf-8")

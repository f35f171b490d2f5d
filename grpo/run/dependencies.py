"""What a run depends on besides its checkpoint: the base model, data, the task's code, settings."""

import dataclasses
from typing import Any

from grpo.config import ON_RESUME, Config
from grpo.distributed import Ranks
from grpo.learn.loss import OwnLoss
from grpo.run.folders import step_of
from grpo.run.opening import OpenedRun
from grpo.run.sources import (
    accepted,
    check,
    differences,
    read_sources,
    sources_now,
)
from tasks.base import Task, summary_of


class Dependencies:
    """The fingerprints of what a run depends on, compared with those in its checkpoint.

    - `notes`: what the user should know about the comparison;
    - `accepted`: the changes that were accepted in the life of the run.
    """

    def __init__(self, opened: OpenedRun, ranks: Ranks):
        self.opened = opened
        self.ranks = ranks
        self.sources: dict[str, Any] = {}
        self.notes: list[str] = []
        self.accepted: list[dict[str, Any]] = []

    @property
    def is_complete(self) -> bool:
        """Whether the base model has a fingerprint. A hub model has none before its download."""
        return self.sources.get("base") is not None

    def read(self, config: Config, task: Task, own_loss: OwnLoss | None) -> None:
        """Take the fingerprints, and compare them with those in the checkpoint of a resumed run.

        This happens before anything is loaded or written, and again once a model of the hub has
        been downloaded. Raises UserError if a fingerprint differs and the change is not accepted.
        """
        self.sources = self.ranks.on_rank0(lambda: sources_now(config, task, own_loss))
        checkpoint = self.opened.checkpoint
        if checkpoint is None:
            return

        saved = read_sources(checkpoint)
        found, then = self.opened.found, saved["config"]
        settings_then = {name: then[name] for name in found if name not in ON_RESUME}
        settings_now = {name: value for name, value in found.items() if name not in ON_RESUME}
        changes = check(
            checkpoint,
            {**saved, "config": settings_then},
            self.sources | {"config": settings_now},
            self.opened.accept,
        )

        step = step_of(checkpoint)
        self.accepted = saved["accepted"] + [
            {"step": step, "kind": kind, "change": change} for kind, change in changes.items()
        ]

        free_then = {name: then[name] for name in ON_RESUME}
        free_now = {name: found[name] for name in ON_RESUME}
        self.notes = [
            *(accepted(checkpoint, kind, change) for kind, change in changes.items()),
            *(
                f"config.yaml, since {checkpoint.name} was saved: {line}"
                for line in differences(free_then, free_now, is_config=True)
            ),
        ]

    def to_json(self, config: Config) -> dict[str, Any]:
        """Return the contents of sources.json, with the run's `config`."""
        settings = dataclasses.asdict(config)
        return self.sources | {"config": settings, "accepted": self.accepted}

    def summary(self) -> dict[str, Any]:
        """Return the fingerprints and any accepted changes, for config.yaml."""
        fingerprints = {kind: summary_of(found) for kind, found in self.sources.items() if found}
        changes = {"accepted_changes": self.accepted} if self.accepted else {}
        return {"fingerprints": fingerprints, **changes}

"""What the parts of a run share."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo.config import Config
from grpo.distributed import Ranks
from grpo.run.display import Display
from grpo.run.files import NoFiles, RunFiles
from grpo.run.heldout import HeldOut
from grpo.trainer import Trainer


@dataclass(frozen=True)
class RunContext:
    """The resolved configuration of a run, what it trains, and where it reports.

    `files` writes nothing except on rank 0; `warn` shows a warning and keeps it in warnings.log.
    """

    config: Config
    trainer: Trainer
    ranks: Ranks
    files: RunFiles | NoFiles
    heldout: HeldOut
    console: Display
    warn: Callable[[str], None]

    @property
    def level(self) -> int:
        """The level that the run was asked to train."""
        assert self.config.level is not None, "the configuration is resolved"
        return self.config.level

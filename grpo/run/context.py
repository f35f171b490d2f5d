"""What the parts of a run share."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo.config import Config
from grpo.curriculum import SurveySettings, SurveySubject
from grpo.distributed import Ranks
from grpo.run.display import Display
from grpo.run.files import NoFiles, RunFiles
from grpo.run.heldout import HeldOutEvaluator
from grpo.trainer import Trainer, class_rule


@dataclass(frozen=True)
class RunContext:
    """The resolved configuration of a run, what it trains, and where it reports.

    `files` writes nothing except on rank 0; `warn` shows a warning and keeps it in warnings.log.
    """

    config: Config
    trainer: Trainer
    ranks: Ranks
    files: RunFiles | NoFiles
    heldout: HeldOutEvaluator
    console: Display
    warn: Callable[[str], None]

    @property
    def subject(self) -> SurveySubject:
        """What the survey measures."""
        config, trainer = self.config, self.trainer
        settings = SurveySettings(
            self.heldout.sampling, config.group_size, class_rule(config), config.draft
        )
        return SurveySubject(trainer.policy, trainer.stream.supply, settings, self.ranks)

    @property
    def level(self) -> int:
        """The level that the run was asked to train."""
        assert self.config.level is not None, "the configuration is resolved"
        return self.config.level

    @property
    def reported_levels(self) -> set[int]:
        """The levels at which the policy is evaluated now: the one asked for, and, on a ladder that
        promotes by held-out problems, the current one.
        """
        is_ladder = self.config.promote_by == "heldout"
        return {self.level, self.trainer.curriculum.level} if is_ladder else {self.level}

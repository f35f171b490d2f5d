"""Evaluate a run on held-out problems: its reports, and the validation checks during training.

A check ends a run that is solved. Each evaluation is a line of
eval.jsonl and a line on the console.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from grpo.ending import CHECK_PROBLEMS
from grpo.evaluate import (
    EvaluationSettings,
    HeldOutRequest,
    Sampling,
    budgets,
    evaluate,
    find_problems,
    first_room_warning,
    summarise,
    truncation_warning,
)
from grpo.records import Group, level_name, truncated_share
from grpo.run.logs import NoFiles, RunFiles
from grpo.show.console import Console
from grpo.trainer import Trainer
from tasks.base import compares

# These seeds do not depend on the run's seed, so held-out problems are the same in every run and at
# every step. Promotions use other problems than reports. Otherwise selection would bias the
# reported scores.
EVAL_SEED = 1_000_003
PROMOTION_SEED = 2_000_003
WARM_START_SEED = 3_000_017


class HeldOutEvaluator:
    """Scores the policy of a run on problems that it was not trained on.

    `warn` shows a warning and keeps it in warnings.log.
    """

    def __init__(
        self,
        trainer: Trainer,
        files: RunFiles | NoFiles,
        console: Console,
        warn: Callable[[str], None],
    ):
        self.config = trainer.config
        self.trainer = trainer
        self.files = files
        self.console = console
        self.warn = warn
        self.warned: set[str] = set()  # keys of the warnings that have been shown

    @cached_property
    def _dataset(self) -> set[str]:
        """The keys of the data set, which are excluded before training has drawn them as well.

        Otherwise the first evaluation would use problems that later ones lack.
        """
        return {problem.key for problem in self.trainer.stream.supply.dataset}

    def evaluate(
        self, level: int, seed: int, size: int, purpose: str
    ) -> tuple[dict[str, Any] | None, list[Group]]:
        """Score the policy on held-out problems that training has not seen.

        Writes and shows a line of eval.jsonl, and returns it with the groups. If there are no such
        problems, shows a warning and returns (None, []).
        """
        line, groups = self.measure(level, seed, size, purpose)
        if line is not None:
            self.record([line])
        return line, groups

    def measure_levels(
        self, levels: Collection[int], purpose: str
    ) -> tuple[list[dict[str, Any]], list[Group]]:
        """Score the policy at several levels, on problems that later reports use as well.

        Returns the lines of eval.jsonl, which are not yet written, and the groups. A level without
        such problems has neither; it gets a warning.
        """
        lines, groups = [], []
        for level in sorted(levels):
            line, answers = self.measure(level, EVAL_SEED, self.config.eval_problems, purpose)
            if line is not None:
                lines.append(line)
                groups += answers
        return lines, groups

    def record(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write and show lines of eval.jsonl."""
        self.files.write_evaluations(lines)
        for line in lines:
            self.console.evaluation(line)
            self._warn_of_truncation(line)

    def measure(
        self, level: int, seed: int, size: int, purpose: str
    ) -> tuple[dict[str, Any] | None, list[Group]]:
        """Do the work of `evaluate` without writing and showing the line."""
        config, trainer, task = self.config, self.trainer, self.trainer.task
        sampling = Sampling.of(config)
        found = find_problems(
            trainer.policy,
            task,
            HeldOutRequest(level, "validation", seed, size),
            trainer.stream.seen.keys() | self._dataset,
            sampling,
        )
        if not found.problems:
            self._warn_once(f"no {purpose} evaluation at level {level}: {found.why_none}")
            return None, []

        if warning := first_room_warning(trainer.policy, task, found.problems, sampling):
            self._warn_once(warning, "room")

        # In a small family of problems a report and a validation check may share a problem. With
        # different seeds they do not share its completion.
        unit = getattr(task, "level_unit", "")
        settings = EvaluationSettings(
            sampling,
            seed=0 if seed == EVAL_SEED else seed,
            samples=config.group_size if compares(task) else 1,
            draft=config.draft,
        )
        with self.console.working(f"evaluating at {level_name(level, unit)}") as progress:
            local = evaluate(
                trainer.policy, task, trainer.ranks.share(found.problems), settings, progress
            )
        groups = trainer.ranks.gather(local)
        for index, group in enumerate(groups):
            group.index = index

        line = {
            "step": trainer.done,
            "purpose": purpose,
            **config.mark,
            "task": config.task,
            "level": level,
            "unit": unit,
            "split": "validation",
            "temperature": config.temperature,
            "top_k": sampling.top_k,
            "top_p": config.top_p,
            "budget": max(budgets(trainer.policy, task, found.problems, sampling)),
            "asked": found.asked,
            "dropped": found.dropped,
            "too_long": found.too_long,
            "metric": getattr(task, "metric", "score"),
            **summarise(groups),
            "truncated": truncated_share(groups),
        }
        return line, groups

    # --- warnings -----------------------------------------------------------------------------

    def _warn_once(self, text: str, key: str = "") -> None:
        """Show a warning, unless one with this key (by default its text) has been shown."""
        if (key or text) not in self.warned:
            self.warned.add(key or text)
            self.warn(text)

    def _warn_of_truncation(self, line: dict[str, Any]) -> None:
        """Warn if most completions were truncated; again only after an evaluation without that.

        A policy that is still imitating right answers is not yet expected to stop by itself.
        """
        if line["purpose"] == "warm start":
            return
        text = truncation_warning(line, f"level {line['level']}")
        key = f"truncated/{line['purpose']}/{line['level']}"
        if text:
            self._warn_once(text, key)
        else:
            self.warned.discard(key)

    # --- validation checks --------------------------------------------------------------------

    def end_if_solved(self) -> None:
        """End the run if the last level is solved in training and on held-out problems."""
        trainer, level = self.trainer, self.trainer.curriculum.level
        if not trainer.end.wants_check(trainer.curriculum.levels, level):
            return

        line, groups = self.evaluate(level, PROMOTION_SEED, CHECK_PROBLEMS, "promotion")
        if line is not None:
            self.files.write_rollouts("promotion", trainer.done, groups)
            self.files.write_decisions(trainer.end.take_check(trainer.done, line))

"""Evaluate a run on held-out problems: its reports, and the validation check that ends a run which
is solved. Each evaluation is a line of eval.jsonl and a line on the console.
"""

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from grpo.ending import CHECK_PROBLEMS
from grpo.evaluate import (
    EvaluationSettings,
    budgets,
    evaluate,
    first_room_warning,
    held_out_stream,
    select,
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

WARM_START_PROBLEMS = 32

# Of each purpose: the seed of its problems, how many they are (0: --eval-problems), and the kind
# as which their rollouts are stored.
PURPOSES = {
    "report": (EVAL_SEED, 0, "eval"),
    "imitation": (EVAL_SEED, 0, "imitated"),  # after it
    "promotion": (PROMOTION_SEED, CHECK_PROBLEMS, "promotion"),  # whether the run is solved
    "warm start": (WARM_START_SEED, WARM_START_PROBLEMS, ""),  # whether imitation ends
}


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

    def evaluate(self, purpose: str, levels: Collection[int]) -> list[dict[str, Any]]:
        """Score the policy at several levels for one of PURPOSES.

        Writes and shows a line of eval.jsonl for each level, and returns them. A level without such
        problems gets a warning instead.
        """
        measured = [each for level in sorted(levels) if (each := self._measure(purpose, level))]
        if not measured:
            return []

        # The lines come last, because a resumed run takes them as a sign that this step has been
        # evaluated: the final evaluation follows the last checkpoint.
        lines = [line for line, _ in measured]
        *_, kind = PURPOSES[purpose]
        if kind:
            groups = [group for _, answers in measured for group in answers]
            self.files.write_rollouts(kind, self.trainer.done, groups)
        self.files.write_evaluations(*lines)
        for line in lines:
            self.console.evaluation(line)
            # A policy that is still imitating right answers is not expected to stop by itself.
            if purpose != "warm start":
                warning = truncation_warning(line, f"level {line['level']}")
                self._warn_once(warning, f"truncated/{purpose}/{line['level']}")
        return lines

    def warm_start_score(self, level: int) -> float:
        """Return the score at a level while right answers are imitated; 0 without problems."""
        lines = self.evaluate("warm start", [level])
        return lines[0]["mean"] if lines else 0.0

    def end_if_solved(self) -> None:
        """End the run if the last level is solved in training and on held-out problems."""
        trainer, level = self.trainer, self.trainer.curriculum.level
        if trainer.end.wants_check(level):
            for line in self.evaluate("promotion", [level]):
                self.files.write_decisions(trainer.end.take_check(trainer.done, line))

    def _measure(self, purpose: str, level: int) -> tuple[dict[str, Any], list[Group]] | None:
        """Return the line of eval.jsonl of a level, and the groups; None without problems."""
        trainer, config = self.trainer, self.trainer.config
        policy, task, asked = trainer.policy, trainer.task, config.max_new_tokens
        seed, size, _ = PURPOSES[purpose]
        size = size or config.eval_problems
        seen = trainer.stream.seen | self._dataset
        stream, limits = held_out_stream(task, level, "validation", seed=seed, size=size)
        found = select(policy, stream, size, seen, asked, **limits)
        if not found.problems:
            why = f"no {purpose} evaluation at level {level}: {found.why_none}"
            self._warn_once(why, why)
            return None
        self._warn_once(first_room_warning(policy, task, found.problems, asked), "room")

        # In a small family of problems a report and a validation check may share a problem. With
        # different seeds they do not share its completion.
        settings = EvaluationSettings.of(
            config,
            seed=0 if seed == EVAL_SEED else seed,
            samples=config.group_size if compares(task) else 1,
        )
        unit = getattr(task, "level_unit", "")
        with self.console.working(f"evaluating at {level_name(level, unit)}") as progress:
            mine = trainer.ranks.share(found.problems)
            groups = trainer.ranks.gather(evaluate(policy, task, mine, settings, progress))
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
            "top_k": 0,
            "top_p": config.top_p,
            "budget": max(budgets(policy, task, found.problems, asked)),
            "asked": found.asked,
            "dropped": found.dropped,
            "too_long": found.too_long,
            "metric": getattr(task, "metric", "score"),
            **summarise(groups),
            "truncated": truncated_share(groups),
        }
        return line, groups

    def _warn_once(self, text: str, key: str) -> None:
        """Show a warning, if there is one, unless one with its key was."""
        if text and key not in self.warned:
            self.warned.add(key)
            self.warn(text)

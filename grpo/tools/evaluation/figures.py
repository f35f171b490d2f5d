"""The evaluation itself: a result for each level, and for each foreign kind of text."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.text import escape_control
from grpo.config import Config
from grpo.evaluate import (
    budgets,
    evaluate,
    find_problems,
    select,
    summarise,
    truncated_share,
)
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out, sent_lines
from grpo.records import Group
from grpo.run.schemas import StartFile, read_checked
from grpo.run.sources import check_base
from grpo.tools.evaluation.request import Request
from tasks.base import Problem, Task, UserError, worded
from tasks.supply import HeldOut

# The row of all foreign kinds of text together.
ALL_KINDS = "all"

# Entries of a result for the screen, not for --json.
SHOWN = ("groups", "sent")

# Where foreign problems come from, whatever the flags say of the others.
FOREIGN_SOURCE = {"split": "test", "dataset": ""}


def load_run_policy(
    checkpoint: Path, config: Config, device: str, accept: Sequence[str] = ()
) -> tuple[Policy, set[str]]:
    """Return the policy of a checkpoint, and the keys of the problems that it was trained on.

    Kinds of sources in `accept` may have changed since the checkpoint. Raises UserError if others
    have.
    """
    for warning in check_base(checkpoint, config.model, accept):
        print(f"eval.py: {escape_control(warning)}", file=sys.stderr)
    seen = read_checked(checkpoint / "trainer.json", StartFile)["trainer"]["seen"]
    policy = load_policy(
        config.model,
        device=device,
        dtype=config.dtype,
        quantise=config.quantise,
        weights=checkpoint,
    )
    # Again, because loading may have downloaded a model of the hub.
    check_base(checkpoint, config.model, accept)
    return policy, set(seen)


class Evaluator:
    """Evaluates one policy as a `request` asks.

    `dataset` holds the problems of --dataset; `seen` are the keys of problems that the policy was
    trained on, which are left out.
    """

    def __init__(self, request: Request, policy: Policy, seen: set[str], dataset: list[Problem]):
        self.request = request
        self.policy = policy
        self.seen = seen
        self.dataset = dataset

    def level(self, task: Task, level: int) -> dict[str, Any]:
        """Return the result of a level.

        Besides figures it holds, for the screen, the worst completions ("groups") and the first
        problem's prompt as the model was sent it ("sent"). Raises UserError if there is no problem.
        """
        found = self._problems(task, level)
        groups = self._answers(task, found)
        return {
            **self._figures(task, level, found, groups),
            "groups": self._worst(groups),
        }

    def foreign(self, tasks: Mapping[str, Task], level: int) -> list[dict[str, Any]]:
        """Return the result of each foreign kind of text at a level, and last that of all kinds.

        The kinds share the problems evenly. A kind has no result if none of its problems fits the
        model. Raises UserError if none of any kind fits.
        """
        size = math.ceil(self.request.problems / len(tasks))
        results = []
        every: list[Group] = []
        found_of_kinds = []
        for kind, task in tasks.items():
            found = self._find(task, level, "test", size)
            found_of_kinds.append(found)
            if not found.problems:
                continue

            groups = self._answers(task, found)
            every += groups
            figures = self._figures(task, level, found, groups)
            results.append(
                {**figures, **FOREIGN_SOURCE, "foreign": kind, "groups": self._worst(groups)}
            )

        if not every:
            raise UserError(
                f"--foreign: no problem of level {level} fits the model; give a lower level"
            )
        together = HeldOut(
            [group.problem for group in every],
            sum(found.asked for found in found_of_kinds),
            sum(found.dropped for found in found_of_kinds),
            sum(found.too_long for found in found_of_kinds),
        )
        overall = self._figures(task, level, together, every)
        return [*results, {**overall, **FOREIGN_SOURCE, "foreign": ALL_KINDS, "groups": []}]

    def _problems(self, task: Task, level: int) -> HeldOut:
        request = self.request
        if request.dataset:
            of_level = [worded(task, one) for one in self.dataset if one.level == level]
            found = select(self.policy, of_level, request.problems, self.seen, request.sampling)
            where = f"{request.dataset}, level {level}"
        else:
            found = self._find(task, level, request.split, request.problems)
            where = f"the {request.split} split, level {level}, --seed {request.seed}"

        if not found.problems:
            raise UserError(found.error or f"{where}: {found.why_none}")
        return found

    def _find(self, task: Task, level: int, split: str, size: int) -> HeldOut:
        return find_problems(
            self.policy,
            task,
            level=level,
            split=split,
            seed=self.request.seed,
            size=size,
            seen=self.seen,
            sampling=self.request.sampling,
        )

    def _answers(self, task: Task, found: HeldOut) -> list[Group]:
        """Return a group of scored completions for each problem."""
        return evaluate(
            self.policy,
            task,
            found.problems,
            sampling=self.request.sampling,
            seed=self.request.seed,
            samples=self.request.samples,
        )

    def _worst(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the worst completions, the worst first."""
        by_value = sorted(groups, key=lambda group: min(score.value for score in group.scores))
        return by_value[: self.request.worst]

    def _figures(
        self, task: Task, level: int, found: HeldOut, groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return the result as --json has it, and "sent" for the screen."""
        request = self.request
        sent = sent_lines(self.policy, found.problems[0])
        return {
            "model": request.model,
            **request.mark,
            "task": request.task,
            **request.options,
            "level": level,
            "split": request.split,
            "dataset": request.dataset,
            "seed": request.seed,
            **asdict(request.prompt),
            "prompt": "\n".join(sent),
            **asdict(request.sampling),
            "budget": max(budgets(self.policy, task, found.problems, request.sampling)),
            "asked": found.asked,
            "samples": request.samples,
            "dropped": found.dropped,
            "too_long": found.too_long,
            **summarise(groups),
            "truncated": truncated_share(groups),
            "sent": middle_left_out(sent),
        }

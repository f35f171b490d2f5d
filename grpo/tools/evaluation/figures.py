"""The evaluation itself: a result for each level, and for each foreign kind of text."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from data.errors import UserError
from data.text import escape_control
from grpo.config import Config
from grpo.evaluate import summarise
from grpo.model.load import load_policy
from grpo.model.options import LoadOptions
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out
from grpo.records import Group, truncated_share
from grpo.run.schemas import StartFile, read_checked
from grpo.run.sources import check_base
from grpo.show.activity import StatusLine
from grpo.statistics import mean_interval
from grpo.tools.evaluation.models import EvaluatedModel
from grpo.tools.evaluation.repeated import repeated_figures
from grpo.tools.evaluation.request import Request
from tasks.base import Problem, Task, watch_scoring, worded
from tasks.supply import DistinctProblems

# The row of all foreign kinds of text together.
ALL_KINDS = "all"

# Entries of a result that are not figures: the first problem's prompt as it was sent to the model,
# the groups with the worst completions, and all groups.
ON_SCREEN = ("sent", "worst", "groups")

# Where foreign problems come from. The flags apply to the other problems only.
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
        weights=checkpoint,
        options=LoadOptions(config.dtype, quantise=config.quantise),
    )
    # Again, because loading may have downloaded a model of the hub.
    check_base(checkpoint, config.model, accept)
    return policy, set(seen)


class Evaluator:
    """Evaluates one `model` as a `request` asks; `dataset` holds the problems of --dataset."""

    def __init__(self, request: Request, model: EvaluatedModel, dataset: list[Problem]):
        self.status = StatusLine("eval.py")
        self.request = request
        self.model = model
        self.dataset = dataset
        self.has_warned = False

    def level(self, task: Task, level: int) -> dict[str, Any]:
        """Return the result of a level.

        It has figures and the entries of ON_SCREEN. Raises UserError if there is no problem.
        """
        found = self._problems(task, level)
        groups = self._answer(task, found, f"level {level}")
        return self._result(task, level, found, groups)

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
            found = self.model.find(task, level, "test", size)
            found_of_kinds.append(found)
            if not found.problems:
                continue

            groups = self._answer(task, found, f"level {level}, foreign {kind}")
            every += groups
            result = self._result(task, level, found, groups)
            results.append({**result, **FOREIGN_SOURCE, "foreign": kind})

        if not every:
            raise UserError(
                f"--foreign: no problem of level {level} fits the model; give a lower level"
            )
        together = DistinctProblems(
            [group.problem for group in every],
            sum(found.asked for found in found_of_kinds),
            sum(found.dropped for found in found_of_kinds),
            sum(found.too_long for found in found_of_kinds),
        )
        overall = self._result(task, level, together, every)
        return [
            *results,
            {**overall, **FOREIGN_SOURCE, "foreign": ALL_KINDS, "worst": [], "groups": []},
        ]

    def _answer(self, task: Task, found: DistinctProblems, where: str) -> list[Group]:
        """Return the model's scored completions, and show how far it is."""
        warning = self.model.warning(task, found.problems)
        if warning and not self.has_warned:
            self.has_warned = True
            print(f"eval.py: warning: {escape_control(warning)}", file=sys.stderr)

        watch_scoring(task, self.status.scoring)
        with self.status.working(f"{self.request.model}, {where}") as progress:
            return self.model.answer(task, found.problems, progress)

    def _problems(self, task: Task, level: int) -> DistinctProblems:
        request = self.request
        if request.dataset:
            of_level = [worded(task, one) for one in self.dataset if one.level == level]
            found = self.model.select(of_level)
            where = f"{request.dataset}, level {level}"
        else:
            found = self.model.find(task, level, request.split, request.problems)
            where = f"the {request.split} split, level {level}, --seed {request.seed}"

        if not found.problems:
            raise UserError(found.error or f"{where}: {found.why_none}")
        return found

    def _worst(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the worst completions, the worst first."""
        by_value = sorted(groups, key=lambda group: min(score.value for score in group.scores))
        return by_value[: self.request.worst]

    def _result(
        self, task: Task, level: int, found: DistinctProblems, groups: list[Group]
    ) -> dict[str, Any]:
        """Return the result as --json has it, with what ON_SCREEN says."""
        if not groups:
            raise UserError(f"level {level}: no problem was answered")
        request = self.request
        sent = self.model.sent(groups[0].problem)
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
            "budget": self.model.budget(task, found.problems),
            "asked": found.asked,
            "samples": request.samples,
            "dropped": found.dropped,
            "too_long": found.too_long,
            **summarise(groups),
            **repeated_figures(task, groups),
            "truncated": truncated_share(groups),
            **self.model.figures(),
            "sent": middle_left_out(sent),
            "worst": self._worst(groups),
            "groups": groups,
        }


def add_differences(results: Sequence[dict[str, Any]]) -> None:
    """Add to each result how its model differs from the first one, problem by problem.

    Only problems that both were given count. A result of the first model gets nothing, nor does one
    without such problems.
    """
    first = results[0]["model"]
    of_first = {_about(result): _values(result) for result in results if result["model"] == first}
    for result in results:
        if result["model"] == first:
            continue
        values, others = _values(result), of_first.get(_about(result), {})
        shared = sorted(values.keys() & others.keys())
        if not shared:
            continue
        differences = [values[key] - others[key] for key in shared]
        low, high = mean_interval(differences, bounds=(-1.0, 1.0))
        result["difference"] = {
            "to": first,
            "n": len(shared),
            "mean": fmean(differences),
            "ci_low": low,
            "ci_high": high,
        }


def _about(result: Mapping[str, Any]) -> tuple[int, str | None]:
    """Return the level of a result, and its kind of foreign text."""
    return result["level"], result.get("foreign")


def _values(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean score of each problem, by its key."""
    return {
        group.problem.key: fmean(score.value for score in group.scores)
        for group in result["groups"]
    }

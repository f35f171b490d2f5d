"""What `eval.py` does with its flags: prepare each model, evaluate it, and compare."""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError, escape_control
from data.files import check_output, write_whole
from grpo.config import Config
from grpo.evaluate import (
    EvaluationSettings,
    ShowProgress,
    budgets,
    evaluate,
    first_room_warning,
    held_out_stream,
    select,
    summarise,
)
from grpo.model.load import load_policy
from grpo.model.prompts import format_of, sent_lines, wording_text
from grpo.records import Group, truncated_share
from grpo.run.resume import checkpoint_of, config_of, load_run_policy
from grpo.show.console import Console
from grpo.tools.table import add_differences, as_json, repeated_figures, show
from tasks.base import Problem, Task, compares, foreign_of, problems_of, worded
from tasks.registry import (
    REWARD_FILE,
    check_wording,
    implied_task,
    load_task,
    require_trusted_task,
    split_options,
)
from tasks.supply import DistinctProblems, parse_levels, read_problems

# The settings of a run that hold in its evaluation, unless a flag overrides them.
SAMPLING = ("temperature", "top_p", "max_new_tokens")
PROMPT = ("system", "shots", "chat_template_kwargs", "wording")

# What a search for problems counts.
COUNTS = ("asked", "dropped", "too_long")


def report(flags: argparse.Namespace, others: list[str], kind: type["Evaluation"]) -> int:
    """Evaluate each model, write the figures and the answers, and show them; return 0.

    `others` are words that may be flags of the task; `kind` is Evaluation, or RemoteEvaluation for
    models behind a server.
    """
    if flags.json:
        check_output(flags.json, "--json")
    evaluations = [kind(flags, model, others) for model in flags.models]
    results = [result for each in evaluations for result in each.results()]
    add_differences(results)

    # The file is written first, because the table may go to a pipe that is closed early.
    if flags.json:
        write_whole(flags.json, as_json(results))
    show(results, getattr(evaluations[0].task, "metric", "score"))
    return 0


class Evaluation:
    """The evaluation of one model: the flags, completed by the settings of the run, if it is one.

    `settings` are the task, its options, and those of SAMPLING and PROMPT. A run has a
    `checkpoint`, and a `config` of its own; the `config` of any other model is the default one.
    """

    def __init__(self, flags: argparse.Namespace, model: str, others: list[str]):
        """Prepare everything but the model, which takes longer to load.

        `others` are the words of the command line that may be flags of the task. Raises UserError
        for an unknown flag, and if a run's task is a program that the flags do not name.
        """
        self.flags, self.model = flags, model
        self.checkpoint, warnings = (None, []) if flags.endpoint else checkpoint_of(model)
        for warning in warnings:
            _say(warning)
        self.config = config = config_of(self.checkpoint) if self.checkpoint else Config()
        self.settings = settings = self._settings(others)
        self.task = load_task(
            settings.task, options=settings.task_options, wording=settings.wording
        )
        self.levels = self._levels()
        if flags.samples == 1 and compares(self.task):
            raise UserError(
                "--samples 1: the reward may compare the completions of a group; give the size of "
                "a group, or leave it out"
            )
        samples = flags.samples or (config.group_size if compares(self.task) else 1)
        sampling = {name: getattr(settings, name) for name in SAMPLING}
        self.answering = EvaluationSettings(**sampling, seed=flags.seed, samples=samples)
        prompt = {name: getattr(settings, name) for name in PROMPT if name != "wording"}
        self.format = format_of(self.task, **prompt, seed=flags.seed)

    def _settings(self, others: list[str]) -> argparse.Namespace:
        """Return the settings: those of the run, unless a flag overrides them."""
        flags, config, where = self.flags, self.config, Path(self.model)
        spec = flags.task
        if spec is None:  # an empty one is a mistake
            spec = implied_task(others) or config.task
        is_runs_task = spec == config.task
        require_trusted_task(spec, {}, (flags.task,), where)  # its options are in the program
        given, unknown = split_options(spec, others)
        if unknown:
            raise UserError(f"{unknown[0]}: no such flag; python eval.py --help lists the flags")
        options = {**(config.task_options if is_runs_task else {}), **given}
        require_trusted_task(spec, options, (spec, given.get(REWARD_FILE)), where)

        settings = argparse.Namespace(task=spec, task_options=options)
        for name in (*SAMPLING, *PROMPT):
            own = getattr(flags, name)
            setattr(settings, name, getattr(config, name) if own is None else own)
        if flags.wording:
            settings.wording = wording_text(flags.wording)
            check_wording(spec, settings.wording, flags.wording)
        elif not is_runs_task:
            settings.wording = ""  # that of the run is for another task
        return settings

    def _levels(self) -> list[int]:
        """Return the levels asked for, else the run's, else the task's own."""
        config, settings = self.config, self.settings
        if self.flags.words:
            return parse_levels(self.flags.words, "--words")

        # The run's level means the same for its own task on other texts.
        own, asked = ({**each.task_options, "texts": ""} for each in (config, settings))
        if settings.task == config.task and own == asked and config.level:
            return [config.level]
        of_rows = {problem.level for problem in problems_of(self.task, "train")}
        return [max(of_rows, default=getattr(self.task, "default_level", 1))]

    # --- the model and its results ------------------------------------------------------------

    def results(self) -> list[dict[str, Any]]:
        """Return the result of each level and, with --foreign, of each kind of text there."""
        flags, task = self.flags, self.task
        dataset = read_problems(Path(flags.dataset), task) if flags.dataset else []
        kinds = {level: foreign_of(task, level) for level in self.levels if flags.foreign}
        self._load()
        results = [self._at_level(level, dataset) for level in self.levels]
        for level, tasks in kinds.items():
            results += self._foreign(level, tasks)
        return results

    def _load(self) -> None:
        """Load the model, and the keys of the problems that it was trained on."""
        self.seen: set[str] = set()
        if self.checkpoint is None:
            self.policy = load_policy(self.model, device=self.flags.device)
        else:
            self.policy, self.seen = load_run_policy(
                self.checkpoint, self.config, self.flags.device
            )
        for note in self.policy.notes:
            _say(f"warning: {note}")
        self.policy.use(self.format)

    def _at_level(self, level: int, dataset: Sequence[Problem]) -> dict[str, Any]:
        """Return the result of a level. Raises UserError if there is no problem."""
        flags, task = self.flags, self.task
        if flags.dataset:
            problems = [worded(task, one) for one in dataset if one.level == level]
            found = self._select(problems, flags.problems)
            where = f"{flags.dataset}, level {level}"
        else:
            found = self._find(task, level, flags.problems, flags.split)
            where = f"the {flags.split} split, level {level}, --seed {flags.seed}"
        if not found.problems:
            raise UserError(found.error or f"{where}: {found.why_none}")
        return self._result(task, level, found, self._answer(task, level, found))

    def _foreign(self, level: int, tasks: Mapping[str, Task]) -> list[dict[str, Any]]:
        """Return the result of each foreign kind of text at a level, and last that of all kinds.

        The kinds share the problems evenly. A kind has no result if none of its problems fits the
        model. Raises UserError if none of any kind fits.
        """
        size = math.ceil(self.flags.problems / len(tasks))
        found = {kind: self._find(task, level, size, "test") for kind, task in tasks.items()}
        results = []
        every: list[Group] = []
        for kind, task in tasks.items():
            if found[kind].problems:
                groups = self._answer(task, level, found[kind], kind)
                results.append(self._result(task, level, found[kind], groups, kind))
                every += groups
        if not every:
            raise UserError(
                f"--foreign: no problem of level {level} fits the model; give a lower level"
            )
        together = DistinctProblems(
            [group.problem for group in every],
            *(sum(getattr(each, name) for each in found.values()) for name in COUNTS),
        )
        overall = self._result(self.task, level, together, every, "all")
        return [*results, {**overall, "groups": []}]

    def _find(self, task: Task, level: int, size: int, split: str) -> DistinctProblems:
        """Return `size` distinct problems that the model may be evaluated on, or all there are."""
        stream, limits = held_out_stream(task, level, split, seed=self.flags.seed, size=size)
        return self._select(stream, size, **limits)

    def _select(
        self, problems: Iterable[Problem], size: int, **limits: int | None
    ) -> DistinctProblems:
        """Return distinct problems that training has not seen, and that fit the model's context."""
        budget = self.answering.max_new_tokens
        return select(self.policy, problems, size, self.seen, budget, **limits)

    def _answer(
        self, task: Task, level: int, found: DistinctProblems, kind: str = ""
    ) -> list[Group]:
        """Return the model's scored completions, and show how far it is."""
        where = f"level {level}{kind and f', foreign {kind}'}"
        with Console(0, file=sys.stderr).working(f"{self.model}, {where}") as progress:
            return self._sample(task, found.problems, progress)

    def _sample(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Return the model's scored completions, and warn if there is little room for them."""
        settings = self.answering
        if warning := first_room_warning(self.policy, task, problems, settings.max_new_tokens):
            _say(f"warning: {warning}")
        return evaluate(self.policy, task, problems, settings, progress)

    def _about(self, task: Task, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return the largest budget, and the first prompt, decoded from its token ids."""
        budget = max(budgets(self.policy, task, problems, self.answering.max_new_tokens))
        return {"budget": budget, "sent": sent_lines(self.policy, problems[0])}

    def _result(
        self,
        task: Task,
        level: int,
        found: DistinctProblems,
        groups: list[Group],
        kind: str = "",
    ) -> dict[str, Any]:
        """Return the result: figures, "sent" (the lines of the first prompt), and all "groups"."""
        flags, settings, answering = self.flags, self.settings, self.answering
        # Where foreign problems come from: flags apply to the other problems only.
        source = {"split": flags.split, "dataset": flags.dataset}
        if kind:
            source = {"split": "test", "dataset": "", "foreign": kind}
        return {
            "model": self.model,
            **self.config.mark,
            "task": settings.task,
            **settings.task_options,
            "level": level,
            **source,
            "seed": flags.seed,
            **{name: getattr(settings, name) for name in PROMPT},
            **{name: getattr(answering, name) for name in SAMPLING},
            **{name: getattr(found, name) for name in COUNTS},
            "samples": answering.samples,
            **summarise(groups),
            **repeated_figures(groups),
            "truncated": truncated_share(groups),
            **self._about(task, found.problems),
            "groups": groups,
        }


def _say(text: str) -> None:
    print(f"eval.py: {escape_control(text)}", file=sys.stderr)

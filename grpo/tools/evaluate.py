"""What `eval.py` does with its flags: prepare each model, evaluate it, and compare."""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from data.errors import UserError
from data.files import write_whole
from data.text import escape_control
from grpo.config import Config
from grpo.evaluate import (
    EvaluationSettings,
    Sampling,
    ShowProgress,
    budgets,
    evaluate,
    first_room_warning,
    select,
    summarise,
)
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import format_of, sent_lines, wording_text
from grpo.records import Group, truncated_share
from grpo.run.files import check_output
from grpo.run.resume import checkpoint_of, config_of, load_run_policy
from grpo.show.console import Console
from grpo.statistics import mean_interval
from grpo.tools.endpoint import RemoteModel
from grpo.tools.table import as_json, repeated_figures, show
from tasks.base import (
    Problem,
    Task,
    compares,
    family_size,
    foreign_of,
    problems_of,
    worded,
)
from tasks.registry import (
    REWARD_FILE,
    check_wording,
    implied_task,
    load_task,
    require_trusted_task,
    split_options,
)
from tasks.supply import (
    DistinctProblems,
    parse_levels,
    patience,
    problem_stream,
    read_problems,
)

# The settings of a run that hold in its evaluation, unless a flag overrides them.
SAMPLING = ("temperature", "top_p", "max_new_tokens")
PROMPT = ("system", "shots", "chat_template_kwargs", "wording")


@dataclass(frozen=True)
class Request:
    """The evaluation of one model: the flags, completed by the settings of the run, if it is one.

    `settings` are the task, its options, and those of SAMPLING and PROMPT. A run has a
    `checkpoint`, and a `config` of its own; the `config` of any other model is the default one.
    """

    flags: argparse.Namespace
    model: str
    checkpoint: Path | None
    config: Config
    settings: argparse.Namespace
    task: Task
    levels: Sequence[int]
    answering: EvaluationSettings


def report(flags: argparse.Namespace, others: list[str]) -> int:
    """Evaluate each model, write the figures and the answers, and show them; return 0.

    `others` are words that may be flags of the task.
    """
    if flags.json:
        check_output(flags.json, "--json")
    requests = [make_request(flags, model, others) for model in flags.models]
    results = [result for request in requests for result in evaluate_model(request)]
    add_differences(results)

    # The file is written first, because the table may go to a pipe that is closed early.
    if flags.json:
        write_whole(flags.json, as_json(results))
    show(results, getattr(requests[0].task, "metric", "score"))
    return 0


# --- the request: what to evaluate, and how


def make_request(flags: argparse.Namespace, model: str, others: list[str]) -> Request:
    """Return what to evaluate of a model, which is not loaded yet.

    `others` are the words of the command line that may be flags of the task. Raises UserError for
    an unknown flag, and if a run's task is a program that the flags do not name.
    """
    checkpoint, warnings = (None, []) if flags.endpoint else checkpoint_of(model)
    for warning in warnings:
        _say(warning)
    config = config_of(checkpoint) if checkpoint else Config()

    spec = flags.task
    if spec is None:  # an empty one is a mistake
        spec = implied_task(others) or config.task
    is_runs_task = spec == config.task
    require_trusted_task(spec, {}, (flags.task,), Path(model))  # its options are in the program
    given, unknown = split_options(spec, others)
    if unknown:
        raise UserError(f"{unknown[0]}: no such flag; python eval.py --help lists the flags")
    options = {**(config.task_options if is_runs_task else {}), **given}
    require_trusted_task(spec, options, (spec, given.get(REWARD_FILE)), Path(model))

    settings = argparse.Namespace(task=spec, task_options=options)
    for name in (*SAMPLING, *PROMPT):
        own = getattr(flags, name)
        setattr(settings, name, getattr(config, name) if own is None else own)
    if flags.greedy:
        settings.temperature = 0.0
    if flags.wording:
        settings.wording = wording_text(flags.wording)
        check_wording(spec, settings.wording, flags.wording)
    elif not is_runs_task:
        settings.wording = ""  # that of the run is for another task

    task = load_task(spec, options=options, wording=settings.wording)
    sampling = Sampling(**{name: getattr(settings, name) for name in SAMPLING})
    levels = _levels(flags.words, task, config, settings)
    if flags.samples == 1 and compares(task):
        raise UserError(
            "--samples 1: the reward may compare the completions of a group; give the size of a "
            "group, or leave it out"
        )
    samples = flags.samples or (config.group_size if compares(task) else 1)
    answering = EvaluationSettings(sampling, flags.seed, samples)
    return Request(flags, model, checkpoint, config, settings, task, levels, answering)


def _levels(text: str, task: Task, config: Config, settings: argparse.Namespace) -> list[int]:
    """Return the levels asked for, else the run's, else the task's own."""
    if text:
        return parse_levels(text, "--words")

    # The run's level means the same for its own task on other texts.
    own, asked = ({**each.task_options, "texts": ""} for each in (config, settings))
    if settings.task == config.task and own == asked and config.level:
        return [config.level]
    of_rows = {problem.level for problem in problems_of(task, "train")}
    return [max(of_rows, default=getattr(task, "default_level", 1))]


# --- models and their results


class LocalModel:
    """A policy in this process; `seen` are the keys of problems that it was trained on."""

    def __init__(self, policy: Policy, seen: set[str], settings: EvaluationSettings):
        self.policy = policy
        self.seen = seen
        self.settings = settings
        self.has_warned = False

    def choose(self, problems: Iterable[Problem], size: int, **limits: Any) -> DistinctProblems:
        """Return distinct problems that training has not seen, and that fit the context."""
        return select(self.policy, problems, size, self.seen, self.settings.sampling, **limits)

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Sample a group of completions for each problem, and score it."""
        warning = first_room_warning(self.policy, task, problems, self.settings.sampling)
        if warning and not self.has_warned:
            self.has_warned = True
            _say(f"warning: {warning}")
        return evaluate(self.policy, task, problems, self.settings, progress)

    def about(self, task: Task, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return the largest budget, and the first prompt, decoded from its token ids."""
        budget = max(budgets(self.policy, task, problems, self.settings.sampling))
        return {"budget": budget, "sent": sent_lines(self.policy, problems[0])}


Evaluated = LocalModel | RemoteModel


def _load(request: Request) -> Evaluated:
    """Return the model, which presents problems as the request says."""
    settings, flags = request.settings, request.flags
    format = format_of(
        request.task,
        system=settings.system,
        shots=settings.shots,
        chat_template_kwargs=settings.chat_template_kwargs,
        seed=flags.seed,
    )
    if flags.endpoint:
        return RemoteModel(flags.endpoint, request.model, format, request.answering)

    if request.checkpoint is None:
        policy, seen = load_policy(request.model, device=flags.device), set[str]()
    else:
        policy, seen = load_run_policy(request.checkpoint, request.config, flags.device)
    for note in policy.notes:
        _say(f"warning: {note}")
    policy.use(format)
    return LocalModel(policy, seen, request.answering)


def evaluate_model(request: Request) -> list[dict[str, Any]]:
    """Return the results of a model: for each level, and for each foreign kind of text."""
    flags, task = request.flags, request.task
    dataset = read_problems(Path(flags.dataset), task) if flags.dataset else []
    kinds = {level: foreign_of(task, level) for level in request.levels if flags.foreign}
    model = _load(request)
    results = [_at_level(request, model, level, dataset) for level in request.levels]
    for level, tasks in kinds.items():
        results += _foreign(request, model, level, tasks)
    return results


def _at_level(
    request: Request, model: Evaluated, level: int, dataset: Sequence[Problem]
) -> dict[str, Any]:
    """Return the result of a level. Raises UserError if there is no problem."""
    flags, task = request.flags, request.task
    if flags.dataset:
        problems = [worded(task, one) for one in dataset if one.level == level]
        found = model.choose(problems, flags.problems)
        where = f"{flags.dataset}, level {level}"
    else:
        found = _find(request, model, task, level, flags.problems, flags.split)
        where = f"the {flags.split} split, level {level}, --seed {flags.seed}"
    if not found.problems:
        raise UserError(found.error or f"{where}: {found.why_none}")
    return _result(request, model, task, level, found, _answer(request, model, task, found))


def _foreign(
    request: Request, model: Evaluated, level: int, tasks: Mapping[str, Task]
) -> list[dict[str, Any]]:
    """Return the result of each foreign kind of text at a level, and last that of all kinds.

    The kinds share the problems evenly. A kind has no result if none of its problems fits the
    model. Raises UserError if none of any kind fits.
    """
    size = math.ceil(request.flags.problems / len(tasks))
    found = {kind: _find(request, model, task, level, size) for kind, task in tasks.items()}
    results = []
    every: list[Group] = []
    for kind, task in tasks.items():
        if found[kind].problems:
            groups = _answer(request, model, task, found[kind], kind)
            results.append(_result(request, model, task, level, found[kind], groups, kind))
            every += groups
    if not every:
        raise UserError(
            f"--foreign: no problem of level {level} fits the model; give a lower level"
        )
    together = DistinctProblems(
        [group.problem for group in every],
        sum(each.asked for each in found.values()),
        sum(each.dropped for each in found.values()),
        sum(each.too_long for each in found.values()),
    )
    overall = _result(request, model, task, level, together, every, "all")
    return [*results, {**overall, "groups": []}]


def _find(
    request: Request, model: Evaluated, task: Task, level: int, size: int, split: str = "test"
) -> DistinctProblems:
    """Return `size` distinct problems that the model may be evaluated on, or all there are."""
    family = family_size(task, level)
    stream = problem_stream(task, seed=request.flags.seed, split=split, level=level)
    return model.choose(stream, size, fruitless=patience(size, family), family=family)


def _answer(
    request: Request, model: Evaluated, task: Task, found: DistinctProblems, kind: str = ""
) -> list[Group]:
    """Return the model's scored completions, and show how far it is."""
    where = f"level {found.problems[0].level}{kind and f', foreign {kind}'}"
    with Console(0, file=sys.stderr).working(f"{request.model}, {where}") as progress:
        return model.answer(task, found.problems, progress)


def _result(
    request: Request,
    model: Evaluated,
    task: Task,
    level: int,
    found: DistinctProblems,
    groups: list[Group],
    kind: str = "",
) -> dict[str, Any]:
    """Return the result: figures, "sent" (the lines of the first prompt), and all "groups"."""
    flags, settings = request.flags, request.settings
    about = model.about(task, found.problems)
    # Where foreign problems come from: flags apply to the other problems only.
    source = {"split": flags.split, "dataset": flags.dataset}
    if kind:
        source = {"split": "test", "dataset": "", "foreign": kind}
    return {
        "model": request.model,
        **request.config.mark,
        "task": settings.task,
        **settings.task_options,
        "level": level,
        **source,
        "seed": flags.seed,
        **{name: getattr(settings, name) for name in PROMPT},
        **asdict(request.answering.sampling),
        "asked": found.asked,
        "samples": request.answering.samples,
        "dropped": found.dropped,
        "too_long": found.too_long,
        **summarise(groups),
        **repeated_figures(groups),
        "truncated": truncated_share(groups),
        **about,
        "groups": groups,
    }


def add_differences(results: Sequence[dict[str, Any]]) -> None:
    """Add to each result how its model differs from the first one, problem by problem.

    Only problems that both were given count. A result of the first model gets nothing, nor does one
    without such problems.
    """
    first = results[0]["model"]
    of_first: dict[tuple, dict[str, float]] = {}
    for result in results:
        place = result["level"], result.get("foreign")
        values = {
            group.problem.key: fmean(score.value for score in group.scores)
            for group in result["groups"]
        }
        if result["model"] == first:
            of_first[place] = values
            continue
        others = of_first.get(place, {})
        differences = [values[key] - others[key] for key in sorted(values.keys() & others.keys())]
        if differences:
            low, high = mean_interval(differences, bounds=(-1.0, 1.0))
            figures = {"mean": fmean(differences), "ci_low": low, "ci_high": high}
            result["difference"] = {"to": first, "n": len(differences), **figures}


def _say(text: str) -> None:
    print(f"eval.py: {escape_control(text)}", file=sys.stderr)

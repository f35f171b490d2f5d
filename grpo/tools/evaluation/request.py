"""What is evaluated: the flags of `eval.py`, completed by the settings of the run, if it is one."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.text import escape_control
from grpo.config import Config, names_in
from grpo.evaluate import Sampling
from grpo.model.prompts import wording_text
from grpo.run.start import checkpoint_of, config_of
from grpo.tools.evaluation.flags import task_options
from tasks.base import Task, compares, problems_of
from tasks.registry import REWARD_FILE, check_wording, implied_task, load_task, require_trusted_task
from tasks.supply import parse_levels


@dataclass(frozen=True)
class PromptFlags:
    """How a problem's prompt is presented, as flags and configurations write it."""

    system: str
    shots: int
    chat_template_kwargs: str
    wording: str


@dataclass(frozen=True)
class Request:
    """One evaluation.

    `task` is the name by which the task is loaded, with its `options`. `mark` names the control
    experiment that the run is, e.g. ``{"control": "shuffled-rewards"}``; {} for an ordinary run.
    """

    model: str
    task: str
    options: Mapping[str, str]
    levels: Sequence[int]
    problems: int
    samples: int
    dataset: str
    split: str
    seed: int
    foreign: bool
    sampling: Sampling
    prompt: PromptFlags
    mark: Mapping[str, str]
    device: str
    accept: Sequence[str]
    worst: int

    @property
    def texts(self) -> str | None:
        """The folder of the user's own texts, if there is one."""
        return self.options.get("texts")

    @property
    def holds_out_texts(self) -> bool:
        """Whether the texts that a model has drawn from are left out of the user's own."""
        return self.texts is not None and self.split == "test"


def trained_run(model: str) -> tuple[Path | None, Config]:
    """Return the newest valid checkpoint of run (or checkpoint) `model`, and its configuration.

    Any other model has no checkpoint; its configuration is the default one.
    """
    checkpoint, warnings = checkpoint_of(model)
    if checkpoint is None:
        return None, Config()
    for warning in warnings:
        print(f"eval.py: {escape_control(warning)}", file=sys.stderr)
    return checkpoint, config_of(checkpoint)


def make_request(
    flags: argparse.Namespace, others: list[str], config: Config
) -> tuple[Request, Task]:
    """Return what to evaluate, and its task; `config` fills in what the flags leave open.

    `others` are the words of the command line that may be flags of the task. Raises UserError for
    an unknown flag, and if a run's task is a program that the flags do not name.
    """
    spec = flags.task
    if spec is None:  # an empty one is a mistake
        spec = implied_task(others) or config.task
    is_runs_task = spec == config.task
    where = Path(flags.model)
    if is_runs_task:
        require_trusted_task(spec, {}, (flags.task,), where)
    given = task_options(spec, others)
    options = {**(config.task_options if is_runs_task else {}), **given}
    require_trusted_task(spec, options, (spec, given.get(REWARD_FILE)), where)
    prompt = _prompt_flags(flags, config, spec, is_runs_task)
    task = load_task(spec, options=options, wording=prompt.wording)

    request = Request(
        model=flags.model,
        task=spec,
        options=options,
        levels=_levels(flags.words, task, config, is_runs_task, options),
        problems=flags.problems,
        samples=_samples(flags.samples, task, config),
        dataset=flags.dataset,
        split=flags.split,
        seed=flags.seed,
        foreign=flags.foreign,
        sampling=_sampling(flags, config),
        prompt=prompt,
        mark=config.mark,
        device=flags.device,
        accept=names_in(flags.accept_changes),
        worst=flags.worst,
    )
    return request, task


def require_same_problems(requests: Sequence[Request]) -> None:
    """Raise UserError if a model would answer other problems than the first one.

    Two runs of different tasks or levels would, unless the flags name these.
    """
    first, *others = requests
    for other in others:
        if _problems_of(other) != _problems_of(first):
            raise UserError(
                f"--model {other.model}: would answer other problems ({_problems_of(other)}) than "
                f"{first.model} ({_problems_of(first)}); add the flags of one of them"
            )


def _problems_of(request: Request) -> str:
    """Return the flags that say what the models of a request are compared on."""
    options = [
        word for name, value in sorted(request.options.items()) for word in (f"--{name}", value)
    ]
    levels = ",".join(map(str, request.levels))
    samples = ["--samples", str(request.samples)] if request.samples > 1 else []
    return shlex.join(["--task", request.task, *options, "--levels", levels, *samples])


def _prompt_flags(
    flags: argparse.Namespace, config: Config, spec: str, is_runs_task: bool
) -> PromptFlags:
    """Return the prompt's flags. The run's wording applies only to the run's own task."""
    wording = flags.wording
    if wording:
        wording = wording_text(flags.wording)
        check_wording(spec, wording, flags.wording)
    elif wording is None:
        wording = config.wording if is_runs_task else ""

    def value(name: str) -> Any:
        given = getattr(flags, name)
        return getattr(config, name) if given is None else given

    return PromptFlags(
        system=value("system"),
        shots=value("shots"),
        chat_template_kwargs=value("chat_template_kwargs"),
        wording=wording,
    )


def _levels(
    text: str, task: Task, config: Config, is_runs_task: bool, options: Mapping[str, str]
) -> list[int]:
    """Return the levels asked for, else the run's, else the task's own."""
    if text:
        return parse_levels(text, "--words")

    # The run's level means the same for its own task on other texts.
    differing = {
        name
        for name in {*options, *config.task_options}
        if options.get(name) != config.task_options.get(name)
    }
    is_runs_level = is_runs_task and differing <= {"texts"}
    if is_runs_level and config.level:
        return [config.level]
    of_rows = {problem.level for problem in problems_of(task, "train")}
    return [max(of_rows, default=getattr(task, "default_level", 1))]


def _samples(given: int | None, task: Task, config: Config) -> int:
    """Return the number of completions of each problem."""
    if not compares(task):
        return given or 1
    if given == 1:
        raise UserError(
            "--samples 1: the reward may compare the completions of a group; give the size of a "
            "group, or leave it out"
        )
    return given or config.group_size


def _sampling(flags: argparse.Namespace, config: Config) -> Sampling:
    values = {
        name: getattr(config if getattr(flags, name) is None else flags, name)
        for name in asdict(Sampling())
    }
    if flags.greedy:
        values["temperature"] = 0.0
    return Sampling(**values)

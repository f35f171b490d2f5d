"""What `eval.py` does with its flags: prepare each model, evaluate it, and compare."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import UserError
from data.files import write_whole
from data.text import escape_control
from grpo.config import Config
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import format_of
from grpo.run.folders import check_output
from grpo.tools.evaluation.endpoint import Endpoint
from grpo.tools.evaluation.figures import ON_SCREEN, Evaluator, add_differences, load_run_policy
from grpo.tools.evaluation.models import EvaluatedModel, LocalModel, RemoteModel
from grpo.tools.evaluation.request import (
    Request,
    make_request,
    require_same_problems,
    trained_run,
)
from grpo.tools.evaluation.samples import write_samples
from grpo.tools.evaluation.table import show
from grpo.tools.evaluation.texts import held_out_texts, known_texts, task_of_examples
from tasks.base import Task, foreign_of
from tasks.supply import read_problems


def report(flags: argparse.Namespace, others: list[str]) -> int:
    """Evaluate each model, write the figures and the samples, and show them; return 0.

    `others` are words that may be flags of the task.
    """
    outputs: dict[str, str] = {}
    for name in ("json", "out", "answers"):
        if path := getattr(flags, name):
            check_output(path, f"--{name}")
            earlier = outputs.setdefault(os.path.realpath(path), name)
            if earlier != name:
                raise UserError(f"--{name} {path}: --{earlier} is the same file; give another")

    prepared = [prepare(flags, name, others) for name in flags.models]
    require_same_problems([one.request for one in prepared])

    # All models answer the same problems, so what one of them knows is left out for all.
    known: set[str] = set()
    if prepared[0].request.holds_out_texts:
        known = set().union(*(known_texts(one.checkpoint, one.config) for one in prepared))

    results = [result for one in prepared for result in evaluate_model(flags, one, known)]
    add_differences(results)

    # The files are written first, because the table may go to a pipe that is closed early.
    if flags.json:
        lines = [
            {key: value for key, value in result.items() if key not in ON_SCREEN}
            for result in results
        ]
        write_whole(flags.json, (json.dumps(lines, indent=1) + "\n").encode())
    if flags.out:
        write_samples(Path(flags.out), results)
    show(results, getattr(prepared[0].task, "metric", "score"))
    return 0


class Prepared(NamedTuple):
    """A model that is to be evaluated: if it is a run, its checkpoint and configuration."""

    checkpoint: Path | None
    config: Config
    request: Request
    task: Task


def prepare(flags: argparse.Namespace, model: str, others: list[str]) -> Prepared:
    """Return what to evaluate of a model, which is not loaded yet."""
    flags.model = model
    checkpoint, config = (None, Config()) if flags.endpoint else trained_run(model)
    return Prepared(checkpoint, config, *make_request(flags, others, config))


def evaluate_model(
    flags: argparse.Namespace, prepared: Prepared, known: set[str]
) -> list[dict[str, Any]]:
    """Return the results of a model; texts with a `known` fingerprint are not held out."""
    checkpoint, config, request, task = prepared
    dataset = read_problems(Path(request.dataset), task) if request.dataset else []

    examples_from = task
    if request.holds_out_texts:
        examples_from = task_of_examples(task, request, config)
        task = held_out_texts(task, known)
    kinds = {level: foreign_of(task, level) for level in request.levels if request.foreign}

    prompt = request.prompt
    format = format_of(
        examples_from,
        system=prompt.system,
        shots=prompt.shots,
        chat_template_kwargs=prompt.chat_template_kwargs,
        seed=request.seed,
    )
    model: EvaluatedModel
    if flags.endpoint:
        kept = Path("runs", "endpoint", f"{_file_name(request.model)}.jsonl")
        answers = Path(flags.answers) if flags.answers else kept
        endpoint = Endpoint(flags.endpoint, request.model, flags.concurrency, answers)
        model = RemoteModel(request, endpoint, format)
    else:
        policy, seen = _load(request, checkpoint, config)
        policy.use(format)
        model = LocalModel(request, policy, seen)

    evaluator = Evaluator(request, model, dataset)
    results = [evaluator.level(task, level) for level in request.levels]
    for level, tasks in kinds.items():
        results += evaluator.foreign(tasks, level)

    if isinstance(model, RemoteModel) and model.endpoint.remembered:
        print(f"eval.py: {model.endpoint.remembered} answers are from {answers}", file=sys.stderr)
    return results


def _file_name(model: str) -> str:
    """Return a file name for the answers of a model: "a-b" for "a/b"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[:100] or "model"


def _load(request: Request, checkpoint: Path | None, config: Config) -> tuple[Policy, set[str]]:
    """Return the policy, and the keys of the problems that it was trained on."""
    if checkpoint is None:
        policy, seen = load_policy(request.model, device=request.device), set[str]()
    else:
        policy, seen = load_run_policy(checkpoint, config, request.device, request.accept)
    for note in policy.notes:
        print(f"eval.py: warning: {escape_control(note)}", file=sys.stderr)
    return policy, seen

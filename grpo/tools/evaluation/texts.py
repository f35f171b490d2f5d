"""Which texts may be evaluated on: those that the model was neither trained nor chosen on."""

import sys
from pathlib import Path

from data.text import printable
from grpo.config import Config
from grpo.run.sources import read_sources
from grpo.tools.evaluation.request import Request, trained_run
from tasks.base import Task, sources_of, unseen_texts
from tasks.registry import load_task


def known_texts(checkpoint: Path | None, config: Config) -> set[str]:
    """Return the fingerprints of the texts that a run has drawn from.

    The runs that it started from count as well.
    """
    known: set[str] = set()
    while checkpoint is not None:
        saved = read_sources(checkpoint)
        known |= set(saved["corpus"].values())
        if any(one["kind"] == "corpus" for one in saved["accepted"]):
            line = (
                f"eval.py: {checkpoint}: not all texts that the run was trained on are known; some "
                "may be evaluated on"
            )
            print(printable(line), file=sys.stderr)
        checkpoint, config = trained_run(config.start or config.model)
    return known


def held_out_texts(task: Task, known: set[str]) -> Task:
    """Return `task` for evaluation on all texts but the `known` ones."""
    unseen = unseen_texts(task, known)
    if left_out := len(sources_of(task)) - len(sources_of(unseen)):
        print(f"eval.py: {left_out} texts are left out: a model was trained or chosen on them")
    return unseen


def task_of_examples(task: Task, request: Request, config: Config) -> Task:
    """Return the task whose training split supplies the examples of --shots.

    It draws on the run's own texts, because those of --texts are held out.
    """
    own = config.task_options if request.task == config.task else {}
    if not request.prompt.shots or request.texts == own.get("texts"):
        return task

    options = {name: value for name, value in request.options.items() if name != "texts"}
    if "texts" in own:
        options["texts"] = own["texts"]
    return load_task(request.task, options=options, wording=request.prompt.wording)

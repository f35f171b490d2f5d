"""The end of a run: its verdict, and the summary on the console."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.text import quoted
from grpo.config import Config
from grpo.curriculum.ladder import PROMOTE_AT, reaches_mark
from grpo.run.logs import read_metrics
from grpo.run.reader import load_run
from grpo.trainer import Trainer
from grpo.verdict import HeldOutScores, Verdict, reach_verdict, values_by_problem
from tasks.base import REWARD_FILE, Task, is_of_project


def is_solved(line: Mapping[str, Any]) -> bool:
    """Return whether a held-out evaluation passes the test that promotes on a ladder."""
    return reaches_mark(line["mean"], line["ci_low"], PROMOTE_AT["heldout"])


def verdict_of(folder: Path, trainer: Trainer, level: int) -> Verdict:
    """Return the verdict on the run in `folder` at the requested `level`.

    If the run learned nothing there, it is the verdict on the hardest level at which it learned.
    """
    run = load_run(folder)
    first_step = min((line["step"] for line in run.reports), default=trainer.done)
    first_reports = {line["level"]: line for line in run.reports if line["step"] == first_step}

    stored = run.steps("eval")
    before = run.groups(first_step, "eval") if first_step in stored else []
    after = run.groups(trainer.done, "eval") if trainer.done in stored else []
    imitated = run.groups(0, "imitated") if run.steps("imitated") else []

    verdicts = {}
    for each in sorted({*first_reports, level}, reverse=True):
        scores = HeldOutScores(
            before=values_by_problem(before, each),
            after=values_by_problem(after, each),
            imitated=values_by_problem(imitated, each) or None,
        )
        verdicts[each] = reach_verdict(
            each,
            scores,
            run.metrics,
            was_solved=each in first_reports and is_solved(first_reports[each]),
            stopped=trainer.stopped,
        )

    requested = verdicts[level]
    if requested.kind == "learned":
        return requested
    learned = [verdict for verdict in verdicts.values() if verdict.kind == "learned"]
    return learned[0] if learned else requested


def files_of(folder: Path) -> dict[str, str]:
    """Return the paths that the summary lists, by name."""
    return {
        "metrics": str(folder / "metrics.jsonl"),
        "rollouts": str(folder / "rollouts"),
        "samples": str(folder / "samples.log"),
        "checkpoints": str(folder / "checkpoints"),
    }


def next_commands(folder: Path, config: Config, step: int, task: Task) -> list[str]:
    """Return the commands to run after a run that ended at `step`.

    A task that was made from Python values cannot be loaded by a command, so those that would are
    left out.
    """
    options = "".join(
        f" --{name} {shlex.quote(value)}" for name, value in config.task_options.items()
    )
    program = f" --task {shlex.quote(config.task)}" if not is_of_project(config.task) else ""
    if reward_file := config.task_options.get(REWARD_FILE):
        program += f" --{REWARD_FILE} {shlex.quote(reward_file)}"

    run = quoted(folder)
    task_flags = f"--task {shlex.quote(config.task)}{options}"
    evaluation = f"python eval.py --model {run} {task_flags} --levels {config.level}"
    audit = f"python -m tasks.audit {run}{program}"
    of_run = [f"python -m grpo.inspect {run} step {step}", f"python -m grpo.report {run}"]
    return of_run if getattr(task, "from_python", False) else [evaluation, *of_run, audit]


def supply_line(folder: Path, trainer: Trainer, level: int) -> str:
    """Return a line that says how many problems were drawn, and how many of them were unique.

    For a finite family of problems it also gives the share that was seen.
    """
    before = trainer.stream.inherited
    seen = len(trainer.stream.seen) - before
    drawn = sum(line.get("groups/count", 0) for line in read_metrics(folder / "metrics.jsonl"))
    line = f"trained on {seen:,} unique problems in {drawn:,} draws"

    if trainer.imitation and trainer.imitation.answers:
        line += f" and {trainer.imitation.answers:,} imitated answers"
    if size := trainer.stream.supply.family_size(level):
        line += f", {seen / size:.1%} of the {size:,} that exist"
    if before:
        line += f", after {before:,} in earlier runs"
    return line

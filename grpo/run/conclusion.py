"""The end of a run: its verdict, and the summary on the console."""

from dataclasses import replace
from pathlib import Path

from grpo.curriculum import levels_to_survey
from grpo.ending import HeldOut, Verdict, conclude
from grpo.run.logs import read_metrics
from grpo.run.next_commands import EndedRun, next_command, remedy
from grpo.run.reader import RunData, load_run
from grpo.trainer import Trainer
from tasks.base import mistakes_of


def verdict_of(folder: Path, trainer: Trainer, level: int) -> Verdict:
    """Return the verdict on the run in `folder` at the requested `level`; see `conclude`.

    Without the evaluation before the first step nothing is measured.
    """
    run = load_run(folder)
    stored = run.steps("eval")
    answers = HeldOut(
        before=run.groups(0, "eval") if run.first_reports and 0 in stored else [],
        after=run.groups(trainer.done, "eval") if trainer.done in stored else [],
        imitated=run.groups(0, "imitated") if run.steps("imitated") else None,
    )
    verdict = conclude(
        level,
        answers,
        run.metrics,
        run.evals,
        stopped=trainer.stopped,
        words=mistakes_of(trainer.task),
    )
    ended = ended_run(run, trainer)
    return replace(
        verdict, remedy=remedy(ended, verdict), next_command=next_command(ended, verdict)
    )


def ended_run(run: RunData, trainer: Trainer) -> EndedRun:
    """Return what the next commands depend on."""
    config = trainer.config
    levels = list(trainer.curriculum.levels)
    survey = levels_to_survey(trainer.stream.supply, [*levels[:-1], config.level or levels[-1]])
    return EndedRun(
        run.path,
        config,
        trainer.task,
        trainer.done,
        budget=run.reports[-1]["budget"] if run.reports else 0,
        levels=tuple(levels),
        easier=tuple(survey[:-1]),
        ended=trainer.ended,
    )


def files_of(folder: Path) -> dict[str, str]:
    """Return the paths that the summary lists, by name."""
    return {
        "metrics": str(folder / "metrics.jsonl"),
        "rollouts": str(folder / "rollouts"),
        "samples": str(folder / "samples.log"),
        "checkpoints": str(folder / "checkpoints"),
    }


def supply_line(folder: Path, trainer: Trainer, level: int) -> str:
    """Return a line that says how many problems were drawn, and how many of them were unique."""
    drawn = sum(line.get("groups/count", 0) for line in read_metrics(folder / "metrics.jsonl"))
    imitated = trainer.imitation.answers if trainer.imitation else 0
    return trainer.stream.summary(level, drawn, imitated)

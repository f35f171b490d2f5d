"""The end of a run: its verdict, and the summary on the console."""

from dataclasses import replace
from pathlib import Path

from grpo.curriculum import levels_to_survey
from grpo.ending import HeldOut, Verdict, is_solved, most_common_mistake, reach_verdict, solved_step
from grpo.run.logs import read_metrics
from grpo.run.next_commands import EndedRun, next_command, remedy
from grpo.run.reader import RunData, load_run
from grpo.trainer import Trainer
from tasks.base import mistakes_of


def verdict_of(folder: Path, trainer: Trainer, level: int) -> Verdict:
    """Return the verdict on the run in `folder` at the requested `level`.

    If the run learned nothing there, it is the verdict on the hardest level at which it learned,
    unless the policy collapsed or got worse at the level that it was training on. Without the
    evaluation before the first step nothing is measured.
    """
    run = load_run(folder)
    first_reports = {line["level"]: line for line in run.first_reports}

    stored = run.steps("eval")
    before = run.groups(0, "eval") if first_reports and 0 in stored else []
    after = run.groups(trainer.done, "eval") if trainer.done in stored else []
    imitated = run.groups(0, "imitated") if run.steps("imitated") else None

    levels = sorted({*first_reports, level}, reverse=True)
    answers = HeldOut(before, after, imitated, len(levels))
    verdicts = {
        each: reach_verdict(
            each,
            answers,
            run.metrics,
            was_solved=each in first_reports and is_solved(first_reports[each]),
            stopped=trainer.stopped,
        )
        for each in levels
    }

    chosen = verdicts[level]
    last = run.metrics[-1].get("levels", {}) if run.metrics else {}
    has_fallen = chosen.kind in ("collapsed", "got worse") and str(level) in last
    learned = [verdict for verdict in verdicts.values() if verdict.kind == "learned"]
    if chosen.kind != "learned" and learned and not has_fallen:
        chosen = learned[0]

    chosen = replace(
        chosen,
        solved_step=solved_step(run.evals, chosen.level),
        mistake=_mistake_of(run, trainer, chosen.level),
    )
    ended = ended_run(run, trainer)
    remedied = replace(chosen, remedy=remedy(ended, chosen))
    return replace(remedied, next_command=next_command(ended, chosen))


def _mistake_of(run: RunData, trainer: Trainer, level: int) -> str:
    """Return the most common mistake of the last held-out evaluation of `level`, in words."""
    for step in reversed(run.steps("eval")):
        groups = [group for group in run.groups(step, "eval") if group.problem.level == level]
        if groups:
            return most_common_mistake(groups, mistakes_of(trainer.task))
    return ""


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
    """Return a line that says how many problems were drawn, and how many of them were unique.

    For a finite family of problems it also gives the share of those at `level` that were drawn.
    """
    before = trainer.stream.inherited
    seen = len(trainer.stream.seen) - before
    drawn = sum(line.get("groups/count", 0) for line in read_metrics(folder / "metrics.jsonl"))
    line = f"trained on {seen:,} unique problems in {drawn:,} draws"

    if trainer.imitation and trainer.imitation.answers:
        line += f" and {trainer.imitation.answers:,} imitated answers"
    if size := trainer.stream.supply.family_size(level):
        of_level = trainer.stream.trained[level]
        where = "" if of_level == seen else f" at level {level}"
        what = "training problems" if trainer.stream.supply.dataset else "that exist"
        line += f", {of_level / size:.1%} of the {size:,} {what}{where}"
    if before:
        line += f", after {before:,} in earlier runs"
    return line

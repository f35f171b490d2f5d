"""The end of a run: its verdict, and the summary on the console."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo.curriculum.ladder import MARGIN, PROMOTE_AT, reaches_mark
from grpo.curriculum.survey import levels_to_survey
from grpo.mistakes import most_common_mistake
from grpo.run.logs import read_metrics
from grpo.run.next_commands import EndedRun, next_command, remedy
from grpo.run.reader import RunData, load_run
from grpo.trainer import Trainer
from grpo.verdict import HeldOut, Verdict, reach_verdict
from tasks.base import mistakes_of


def is_solved(line: Mapping[str, Any]) -> bool:
    """Return whether a held-out evaluation solves its level.

    The mean must be at least 0.97 and the interval begin at 0.92 or above, whatever --promote-at,
    and the budget may cut off one completion of twenty: an answer needs an end.
    """
    is_high = reaches_mark(line["mean"], line["ci_low"], PROMOTE_AT["heldout"])
    return is_high and line.get("truncated", 0.0) <= MARGIN


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


def solved_step(evaluations: Sequence[Mapping[str, Any]], level: int) -> int | None:
    """Return the first step from which on each held-out evaluation of `level` is solved.

    These are reports and validation checks. Returns None if the last of them is not solved, or if
    there is none.
    """
    of_level = [
        line
        for line in evaluations
        if line["level"] == level and line["purpose"] in ("report", "promotion")
    ]
    last_unsolved = max((line["step"] for line in of_level if not is_solved(line)), default=-1)
    later = [line["step"] for line in of_level if line["step"] > last_unsolved]
    return min(later, default=None)


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

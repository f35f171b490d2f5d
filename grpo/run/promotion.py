"""Validation checks during training: they promote the curriculum, or end a run that is solved."""

from typing import Any

from grpo.ending import SOLVED_MEAN, SOLVED_SHARE, SOLVED_STEPS, is_solved
from grpo.records import Decision
from grpo.run.context import RunContext
from grpo.run.heldout import PROMOTION_SEED
from grpo.statistics import problems_needed


def check_problems(run: RunContext) -> None:
    """Warn of each level that has too few held-out problems for a validation check."""
    curriculum = run.trainer.curriculum
    size = min(problems_needed(curriculum.settings.promote_at), run.config.promote_problems)
    for level in curriculum.levels_to_check:
        found = run.heldout.find(level, PROMOTION_SEED, size)
        if warning := curriculum.note_problems(level, len(found.problems)):
            run.warn(warning)


def promote_if_due(run: RunContext) -> None:
    """If the curriculum wants a validation check, make it, and pass the result on."""
    curriculum, step = run.trainer.curriculum, run.trainer.done
    if not curriculum.wants_validation(step):
        return

    line = _check(run, curriculum.level)
    # Training may have used up a small family of problems.
    if warning := curriculum.note_problems(curriculum.level, line["n"] if line else 0):
        run.warn(warning)
    if line is None:
        return

    decisions = curriculum.observe_validation(step, line)
    run.files.write_decisions(decisions)
    for decision in decisions:
        run.console.say(decision.line)


def end_if_solved(run: RunContext) -> None:
    """End the run if the last level is solved in training and on held-out problems."""
    trainer = run.trainer
    if trainer.ended or not trainer.seems_solved:
        return

    level = trainer.curriculum.level
    line = _check(run, level)
    if line is None or not is_solved(line) or line["mean"] < SOLVED_MEAN:
        return

    trainer.solved_reason = (
        f"at least {SOLVED_SHARE:.0%} of the groups of the last {SOLVED_STEPS} steps were solved, "
        f"and the held-out mean is {line['mean']:.3f} "
        f"[{line['ci_low']:.3f}, {line['ci_high']:.3f}]"
    )
    figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
    run.files.write_decisions(
        [Decision(trainer.done, level, level, "solved", trainer.solved_reason, figures)]
    )


def _check(run: RunContext, level: int) -> dict[str, Any] | None:
    """Evaluate a level on the held-out problems of promotions; None if there are none."""
    line, groups = run.heldout.evaluate(
        level, PROMOTION_SEED, run.config.promote_problems, "promotion"
    )
    if line is not None:
        run.files.write_rollouts("promotion", run.trainer.done, groups)
    return line

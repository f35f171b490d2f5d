"""What happens before the first step: the pre-flight, and the imitation of right answers.

The pre-flight chooses the levels (`grpo.curriculum.choose_start`). If none of them is within reach,
right answers are imitated (`grpo.curriculum.warm_start`).
"""

import dataclasses
from collections.abc import Sequence

from grpo.curriculum import (
    PROBLEMS,
    LevelSurvey,
    Start,
    advice,
    choose_mixed_start,
    choose_start,
    figures_of,
    levels_to_survey,
    survey,
)
from grpo.records import Decision, Group
from grpo.run.context import RunContext
from grpo.run.heldout import WARM_START_SEED
from grpo.trainer import build_curriculum, no_answers

# How many held-out problems decide when the imitation ends.
WARM_START_PROBLEMS = 32


def make_preflight(run: RunContext) -> Start:
    """Sample a few problems of each level, and choose the level where the run starts."""
    config, trainer = run.config, run.trainer
    levels = list(trainer.curriculum.levels)
    rows, groups = _survey_levels(run, levels)

    # The run may start at an easier level than the requested one, unless --no-ramp forbids it or a
    # dataset was asked for at one level.
    may_ease = config.ramp and (config.curriculum or not config.dataset)
    eligible = [row for row in rows if may_ease or row.level in levels]
    choose = choose_mixed_start if config.mixed else choose_start
    start = choose(eligible, levels)
    if start.levels != levels:
        trainer.curriculum = build_curriculum(config, start.levels)
        trainer.check_fit()

    figures = figures_of(rows, start)
    level = trainer.curriculum.level
    run.files.write_rollouts("preflight", 0, groups)
    run.files.write_decisions([Decision(0, levels[0], level, "preflight", start.why, figures)])
    _show_preflight(run, start, rows)
    return start


def _survey_levels(run: RunContext, levels: Sequence[int]) -> tuple[list[LevelSurvey], list[Group]]:
    """Return a row for each level up to the last of `levels`, and its groups."""
    config, trainer = run.config, run.trainer
    mark = "".join(f"CONTROL {control}  " for control in config.mark.values())
    run.console.say(
        f"{mark}pre-flight: {PROBLEMS} problems per level, {config.group_size} completions each"
    )

    with run.console.working("pre-flight"):
        return survey(
            run.subject, levels_to_survey(trainer.stream.supply, levels), training_levels=levels
        )


def _show_preflight(run: RunContext, start: Start, rows: Sequence[LevelSurvey]) -> None:
    """Show the table, the decision, and the warnings."""
    run.console.survey([dataclasses.asdict(row) for row in rows])

    level, levels = start.levels[0], start.levels
    climb = f" (by way of {' → '.join(map(str, levels))})" if len(levels) > 1 else ""
    if start.level is not None:
        run.console.say(f"the run starts at level {level}{climb}: {start.why}")
    elif wants_imitation(run, start):
        run.console.say(
            f"the run starts at level {level}{climb} and imitates right answers first: {start.why}"
        )
    else:
        run.warn(
            f"{start.why}: training starts at level {level}, as asked, and may learn nothing; "
            + advice(rows)
        )


def wants_imitation(run: RunContext, start: Start | None) -> bool:
    """Return whether right answers are imitated before the first step of a new run.

    They are if --warm-start asks for it, or if the policy can learn at no level. `start` is the
    choice of the pre-flight, or None without one. Raises UserError if imitation is asked for and
    the task's targets are not right answers.
    """
    way = run.config.warm_start
    if way == "auto":
        is_needed = start is not None and start.level is None
        return is_needed and run.trainer.knows_answers
    if way == "imitation" and not run.trainer.knows_answers:
        remedy = "imitate; give --warm-start off"
        raise no_answers("--warm-start imitation", run.config.task, remedy)
    return way == "imitation"


def imitate_answers(run: RunContext) -> None:
    """Run the warm start, and report the result."""
    trainer = run.trainer
    level = trainer.curriculum.level

    def validate() -> float:
        line, _ = run.heldout.evaluate(level, WARM_START_SEED, WARM_START_PROBLEMS, "warm start")
        return line["mean"] if line else 0.0

    with run.console.working("imitating right answers"):
        answers = trainer.imitate(validate)
    imitation = trainer.imitation
    assert imitation is not None

    run.files.write_imitation(answers)
    decision = Decision(0, level, level, "imitation", imitation.why, imitation.to_json())
    run.files.write_decisions([decision])
    run.console.say(decision.line)

    if not imitation.updates:  # the score was enough from the start
        return

    # At each level that was evaluated before, so that the verdict can tell what imitation taught.
    lines, groups = run.heldout.measure_levels(run.reported_levels, "imitation")
    if lines:  # there are none if the task has too few problems for a validation split
        run.files.write_rollouts("imitated", 0, groups)
        run.heldout.record(lines)

"""Training on problems of middling difficulty alone: measured once, and stored with the run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from data.errors import UserError
from grpo.curriculum.difficulty import Difficulty, Outcome, measure_difficulty
from grpo.run.context import RunContext
from grpo.run.logs import read_metrics

# The file in a run's directory that has a line for each problem.
FILE = "difficulty.jsonl"

OTHERS: tuple[Outcome, ...] = ("too hard", "too easy", "too long")


def filter_by_difficulty(run: RunContext, folder: Path, *, is_new: bool) -> None:
    """Leave out of the supply what is too hard or too easy, if the run asks for that.

    A new run measures and stores the difficulty of every problem. A resumed one reads what was
    stored, so that it has the same problems. Raises UserError if no problem is left at a level, or
    if the stored problems are not those of the run.
    """
    limits = run.config.keep_difficulty
    if not limits:
        return

    found = _measure(run, limits) if is_new else run.ranks.on_rank0(lambda: _stored(run, folder))
    counts = Counter(each.outcome for each in found)
    others = _others(counts)
    run.console.say(
        f"kept {counts['kept']:,} of {len(found):,} problems, with a mean score from "
        f"{limits[0]:g} to {limits[1]:g}"
        + (f"; left out: {others}" if others else "")
        + f" ({folder / FILE})"
    )
    _check_levels(run, found)
    run.trainer.stream.supply.keep({each.key for each in found if each.outcome == "kept"})


def _measure(run: RunContext, limits: Sequence[float]) -> list[Difficulty]:
    """Measure the difficulty of every problem, and store it."""
    config, trainer = run.config, run.trainer
    run.console.say(
        f"difficulty: {len(trainer.stream.supply.problems):,} problems, {config.group_size} "
        "completions each"
    )
    with run.console.working("measuring difficulty") as progress:
        found = measure_difficulty(
            run.subject, limits, lambda done, total: progress("sampling", done, total)
        )
    run.files.write_difficulty([asdict(each) for each in found])
    return found


def _stored(run: RunContext, folder: Path) -> list[Difficulty]:
    """Return the difficulties that the run has stored."""
    path = folder / FILE
    lines = read_metrics(path)
    found = [Difficulty(**{k: v for k, v in line.items() if k != "step"}) for line in lines]
    if {each.key for each in found} != {each.key for each in run.trainer.stream.supply.problems}:
        raise UserError(
            f"{path}: does not have the problems of the run, which keeps those of a certain "
            "difficulty (keep_difficulty); restore the file, or start a new run"
        )
    return found


def _check_levels(run: RunContext, found: Sequence[Difficulty]) -> None:
    """Raise UserError if no problem is left at a level that is trained on."""
    levels = [None] if run.config.mixed else list(run.trainer.curriculum.levels)
    for level in levels:
        counts = Counter(each.outcome for each in found if level in (None, each.level))
        if not counts["kept"]:
            of_level = "" if level is None else f" of level {level}"
            raise UserError(
                f"--config: keep_difficulty {run.config.keep_difficulty}: no problem{of_level} is "
                f"left ({_others(counts)}); give a wider range"
            )


def _others(counts: Counter[Outcome]) -> str:
    """Return how many problems are left out for each reason, e.g. "5 too hard, 1 too long"."""
    return ", ".join(f"{counts[name]:,} {name}" for name in OTHERS if counts[name])

"""Checks a task's scores: one for each completion, finite, and within the task's range."""

import json
import math
import numbers
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from data.errors import UserError, shown
from tasks.base import COMPONENT, Problem, Score, Task, calling

# Rounding, even in float32, moves a reward out of its range by at most this share of the range.
ROUNDING = 1e-6

# No reward is further from 0, so that sums and squares of rewards are finite.
LARGEST = 1e30

# The part `reason` of a right answer that is not exact, because it did not end. Its part `unended`
# is what that adds to its reward, e.g. -0.02.
CUT_OFF = "right, but cut off by the token budget"

# The lowest and the highest reward.
Range = tuple[float, float]


def range_of(task: Task) -> Range | None:
    """Return the lowest and the highest reward of `task`; None if it declares them unknown.

    Raises UserError unless its `reward_range` is None or two finite, rising numbers.
    """
    declared = getattr(task, "reward_range", (0.0, 1.0))
    limits = None if declared is None else as_range(declared)
    if declared is None or limits:
        return limits
    raise UserError(
        f"task {task.name}: reward_range is {declared!r}; give the lowest and the highest "
        f"reward, e.g. (-1.0, 0.0), or None if they are not known; none is beyond {LARGEST:g}"
    )


def as_range(given: Iterable[Any]) -> Range | None:
    """Return two rising numbers, which may be texts; None for anything else."""
    with suppress(TypeError, ValueError):
        low, high = map(float, given)
        if -LARGEST <= low < high <= LARGEST:
            return low, high
    return None


def finite_number(given: Any) -> float | None:
    """Return a finite number of Python, NumPy or PyTorch as a float; None for anything else."""
    plain = _plain(given)
    if not isinstance(plain, numbers.Real):
        return None
    try:
        number = float(plain)
    except OverflowError:  # an integer beyond the largest float
        return None
    return number if math.isfinite(number) else None


def scores_of(task: Task, problem: Problem, completions: Sequence[str]) -> list[Score]:
    """Return `task.score(problem, completions)`, checked, with Python's numbers and every `value`.

    A number that is out of its range only by rounding is moved to the end of the range. Raises
    UserError if `score` raises an exception, if it changes the problem's data, or if it returns
    anything but one Score for each completion, with finite numbers within the task's range and
    parts that JSON can represent.
    """
    where = f"task {task.name}, {problem.title}: score()"
    before = repr(problem.data)
    with calling(where):
        scores = list(task.score(problem, list(completions)))

    # The run stores the data, and the task's other methods read it.
    if before != repr(problem.data):
        raise UserError(
            f"{where} changed problem.data; let it change a copy, copy.deepcopy(problem.data)"
        )
    return _all_checked(task, problem, completions, scores)


def scores_of_groups(
    task: Task, groups: Sequence[tuple[Problem, Sequence[str]]]
) -> list[list[Score]]:
    """Return the scores of several groups: problems, each with its completions.

    A task that has `score_groups` scores all groups in one call, for example concurrently; it is
    not called without groups. Raises UserError as `scores_of` does.
    """
    score_groups = getattr(task, "score_groups", None)
    if score_groups is None or not groups:
        return [scores_of(task, problem, completions) for problem, completions in groups]

    with calling(f"task {task.name}: score_groups()"):
        found = score_groups([(problem, list(texts)) for problem, texts in groups])
        return [
            _all_checked(task, problem, completions, scores)
            for (problem, completions), scores in zip(groups, found, strict=True)
        ]


def without_end(task: Task, problem: Problem, completion: str, score: Score) -> Score:
    """Return the `score` of a completion that the token budget cut off, which is never exact.

    What it earns is the task's to say (`unended`, see `tasks.base.Task`).
    """
    unended = getattr(task, "unended", None)
    earned = unended(problem, completion, score) if unended else score
    parts = dict(earned.parts)
    if score.exact:
        parts |= {"reason": CUT_OFF, "unended": earned.reward - score.reward}
    return replace(earned, parts=parts, value=earned.value, exact=False)


def _all_checked(
    task: Task, problem: Problem, completions: Sequence[str], scores: Sequence[Any]
) -> list[Score]:
    """Return the `scores` of the completions, checked as `scores_of` says."""
    where = f"task {task.name}, {problem.title}"
    if len(scores) != len(completions):
        raise UserError(
            f"{where}: score() returned {len(scores)} scores for {len(completions)} completions; "
            "it must return one Score for each"
        )

    reward_range = range_of(task)
    checked = []
    for number, score in enumerate(scores, start=1):
        try:
            checked.append(_checked(score, reward_range))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{where}, completion {number}: score() returned {error}") from error
    return checked


def _checked(score: Any, reward_range: Range | None) -> Score:
    """Return `score` with Python's numbers and its value; an answer of value 1 is exact.

    Raises ValueError or TypeError, which says what is wrong.
    """
    if not isinstance(score, Score):
        raise ValueError(f"{type(score).__name__}; it must return a Score for each")

    reward = _within(score.reward, "reward", reward_range)
    if score.gives_value:
        value = _within(score.value, "value", (0.0, 1.0))
    elif reward_range is None:
        raise ValueError("no value; a task whose reward_range is None must give one, in [0, 1]")
    else:
        low, high = reward_range
        value = (reward - low) / (high - low)

    parts = {str(name): _plain(part) for name, part in score.parts.items()}
    for name, part in parts.items():
        if name == "trap" and not isinstance(part, str | None):
            raise ValueError(f"{name!r} {part!r}; give the name of a trap, or None")
        if name.startswith(COMPONENT):
            _within(part, name, None)
    json.dumps(parts)  # what it cannot hold could not be stored
    is_exact = bool(score.exact) or value >= 1.0
    return replace(score, reward=reward, value=value, exact=is_exact, parts=parts)


def _plain(part: Any) -> Any:
    """Return a number or an array of NumPy or PyTorch as Python's."""
    return part.tolist() if hasattr(part, "tolist") else part


def _within(given: Any, name: str, limits: Range | None) -> float:
    """Return the number `given`; if only rounding put it outside `limits`, the nearest limit.

    Raises ValueError, which begins with `name`, if it is no finite number or further outside.
    """
    number = finite_number(given)
    if number is None or abs(number) > LARGEST:
        raise ValueError(f"a {name} of {shown(given)}; give a finite number, up to {LARGEST:g}")
    if limits is None:
        return number

    low, high = limits
    margin = ROUNDING * (high - low)
    if not low - margin <= number <= high + margin:
        hint = ""
        if name == "reward":
            hint = "; a task declares another reward_range, and rows have --reward-range LOW,HIGH"
        raise ValueError(f"a {name} of {number:g}; it must lie in [{low:g}, {high:g}]{hint}")
    return min(max(number, low), high)

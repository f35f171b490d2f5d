"""The pre-flight: it decides where a run starts, by a survey of the levels (`survey`).

GRPO learns from the differences within a group. So the run starts where groups vary *and* a right
answer is within reach. Variation alone is not enough: at two words SmolLM2 was rewarded for "the
first word, then stop", its groups varied, and it learned that.

The pre-flight also measures the model's perplexity (`perplexity`), because a model that was
converted wrongly looks much like one that merely cannot do the task.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from grpo.curriculum.perplexity import Perplexity
from grpo.curriculum.survey import ANY_EXACT, VARIED, LevelSurvey
from grpo.evaluate import TOO_MANY_TRUNCATED

NO_LEVEL = f"at no level do {VARIED:.0%} of the groups vary and {ANY_EXACT:.0%} hold a right answer"


@dataclass(frozen=True)
class Start:
    """Where a run starts, e.g. ``Start([2, 3, 5, 10], 2, "75% of its groups vary ...")``.

    `levels` are the levels of training. `level` is the first of them, or None if no level is within
    reach; then `levels` are those that were asked for. `why` is a sentence.
    """

    levels: list[int]
    level: int | None
    why: str


def choose_start(surveys: Sequence[LevelSurvey], levels: Sequence[int]) -> Start:
    """Return where a run that was asked to train on `levels` starts.

    1. Of the first levels that are solved already, all are left out if the next one is within
       reach; otherwise all but the last, where the run starts.
    2. If the first level is within reach the run starts there, even if a harder one is within reach
       too: easier steps are cheaper, and a ladder leaves such a level after a few of them.
    3. Otherwise the run starts at the hardest easier level within reach, and climbs by way of the
       surveyed levels between.
    4. If there is none, the levels stay as they are, and `Start.level` is None.
    """
    levels = list(levels)
    found = {row.level: row for row in surveys}

    solved = len(list(takewhile(lambda level: level in found and found[level].is_solved, levels)))
    if solved:
        return _past_the_solved(levels, found, solved)

    first = found.get(levels[0])
    if first and first.is_within_reach:
        return Start(levels, levels[0], first.finding)

    easier = [row for row in surveys if row.level < levels[0]]
    reachable = [row for row in easier if row.is_within_reach]
    if not reachable:
        return Start(levels, None, NO_LEVEL)

    hardest = max(reachable, key=lambda row: row.level)
    between = [row.level for row in easier if row.level >= hardest.level]
    why = f"{hardest.finding}; level {levels[0]} is out of reach"
    if first:
        why += f" ({first.varied:.0%} and {first.any_exact:.0%})"
    return Start(between + levels, hardest.level, why)


def _past_the_solved(levels: list[int], found: dict[int, LevelSurvey], solved: int) -> Start:
    """Return the start of a ladder whose first `solved` levels are solved."""
    following = found.get(levels[solved]) if solved < len(levels) else None
    skipped = solved if following and following.is_within_reach else solved - 1
    start = levels[skipped]

    why = found[start].finding
    if skipped:
        why += f"; the easier ones are solved ({', '.join(map(str, levels[:skipped]))})"
    return Start(levels[skipped:], start, why)


def choose_mixed_start(surveys: Sequence[LevelSurvey], levels: Sequence[int]) -> Start:
    """Return the start of a run on all levels of a dataset as they come, which changes nothing."""
    reachable = [row.level for row in surveys if row.is_within_reach]
    if not reachable:
        return Start(list(levels), None, NO_LEVEL)

    listed = ", ".join(map(str, reachable))
    why = f"all levels of the dataset are trained on as they come; within reach: {listed}"
    return Start(list(levels), levels[0], why)


def advice(surveys: Sequence[LevelSurvey]) -> str:
    """Return what the user can do if no level is within reach."""
    text = "give a --model that solves some of these problems, or an easier task"
    truncated = max((row.truncated for row in surveys), default=0.0)
    if truncated > TOO_MANY_TRUNCATED:
        text += (
            f"; up to {truncated:.0%} of a level's completions were truncated: if they need more "
            "room than the target takes, give a larger --max-new-tokens"
        )
    return text


def figures_of(
    surveys: Sequence[LevelSurvey], perplexity: Perplexity | None, start: Start
) -> dict[str, Any]:
    """Return all results as JSON values: the figures of the pre-flight's line in
    curriculum.jsonl.
    """
    return {
        "start": start.level,
        "training_levels": start.levels,
        "levels": [asdict(row) for row in surveys],
        "perplexity": asdict(perplexity) if perplexity else None,
    }

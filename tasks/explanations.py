"""Say in words how a completion earned its reward, from what its score has stored.

Nothing is scored again, so that the programs that show a stored run need neither the task's texts
nor a user's reward function.
"""

import math
from collections.abc import Mapping
from typing import Any

from data.text import shortened
from tasks.protocol import COMPONENT, Problem, Score
from tasks.reasoning import FORM

# Numbers beyond this are not taken for parts of a score; an integer may be too large for a float.
MAX_NUMBER = 1e300


def explain_parts(score: Score) -> str:
    """Return how the components of a reward add up, or only the reward if none are stored.

    >>> explain_parts(Score(0.5, {"reward/place": 0.75, "reward/length": -0.25}))
    '0.500 = 0.750 place − 0.250 length'
    """
    components = {
        name.removeprefix(COMPONENT): float(value)
        for name, value in score.parts.items()
        if name.startswith(COMPONENT) and is_number(value)
    }
    reward = f"{score.reward:.3f}"
    if not components:
        return f"{reward}, as the task scored it"

    (first, amount), *others = components.items()
    terms = f"{amount:.3f} {first}"
    for name, value in others:
        terms += f" {'−' if value < 0 else '+'} {abs(value):.3f} {name}"
    is_sum = math.isclose(math.fsum(components.values()), score.reward, abs_tol=1e-6)
    return f"{reward} = {terms}" if is_sum else f"{reward} = the weighted sum of {terms}"


def explain_components(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
    """Explain the score of a user's reward function."""
    return explain_parts(score)


def explain_answer(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
    """Explain the score of an answer that is right, wrong or missing."""
    answer = score.parts.get("answer")
    earned = f"{score.reward:.3f}"
    if answer is None:
        return f"{earned} = no answer was found"
    answer = shortened(str(answer))
    if score.exact:
        return f"{earned} = the answer {answer} is right"
    if score.reward == FORM:
        return f"{earned} = there is an answer, {answer}, but it is wrong"
    if score.reward == 0:
        return f"{earned} = the answer {answer} earns nothing"
    return f"{earned} = the answer {answer} is partly right"


def is_number(value: Any) -> bool:
    """Return whether a stored part is a finite number, and no integer beyond a float's range."""
    return isinstance(value, int | float) and -MAX_NUMBER < value < MAX_NUMBER


def has_numbers(parts: Mapping[str, Any], *names: str) -> bool:
    """Return whether all these parts of a score are stored as numbers.

    Runs of an older version, and files that others wrote, may lack them.
    """
    return all(is_number(parts.get(name)) for name in names)

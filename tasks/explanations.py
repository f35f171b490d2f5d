"""Say in words how a completion earned its reward, from what its score has stored.

Nothing is scored again, so that the programs that show a stored run need neither the task's texts
nor a user's reward function.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from data.text import shortened
from tasks.protocol import COMPONENT, Problem, Score
from tasks.reasoning import FORM

# Numbers beyond this are not taken for parts of a score; an integer may be too large for a float.
MAX_NUMBER = 1e300


def explain_parts(score: Score, weights: Mapping[str, float] | None = None) -> str:
    """Return how the components of a reward add up, or only the reward if none are stored.

    The components have enough digits for a reader to repeat the sum. `weights` are those of
    --reward-weights; a component that they do not name has the weight 1.

    >>> score = Score(0.5, {"reward/place": 0.75, "reward/length": -0.25})
    >>> explain_parts(score)
    '0.500 = 0.750 place − 0.250 length'
    >>> explain_parts(Score(1.25, score.parts), {"place": 2})
    '1.250 = 2 × 0.750 place + 1 × -0.250 length'
    """
    components = {
        name.removeprefix(COMPONENT): float(value)
        for name, value in score.parts.items()
        if name.startswith(COMPONENT) and is_number(value)
    }
    reward = f"{score.reward:.3f}"
    if not components:
        return f"{reward}, as the task scored it"

    weights = weights or {}
    terms = [(weights.get(name, 1.0), x, name) for name, x in components.items()]
    is_sum = math.isclose(_total(terms), score.reward, abs_tol=1e-6)
    enough = (digits for digits in range(3, 16) if f"{_total(terms, digits):.3f}" == reward)
    digits = next(enough, 3) if is_sum else 3

    text = ""
    for weight, x, name in terms:
        is_negative = (weight if weights else x) < 0
        sign = (" − " if is_negative else " + ") if text else ("-" if is_negative else "")
        number = f"{abs(weight):.12g} × {x:.{digits}f}" if weights else f"{abs(x):.{digits}f}"
        text += f"{sign}{number} {name}"
    return f"{reward} = {text}" if is_sum else f"{reward} = the weighted sum of {text}"


def _total(terms: Sequence[tuple[float, float, str]], digits: int = 16) -> float:
    """Return the sum of weight × number of some terms (weight, number, name), numbers rounded."""
    return sum(weight * round(x, digits) for weight, x, _ in terms)


def reward_weights(options: Any) -> dict[str, float]:
    """Return --reward-weights of a run from its `task_options`; {} if none can be read.

    >>> reward_weights({"reward-weights": "words=0.5,place=1"})
    {'words': 0.5, 'place': 1.0}
    """
    given = options.get("reward-weights") if isinstance(options, Mapping) else None
    pairs = [part.partition("=") for part in str(given or "").split(",")]
    try:
        return {name.strip(): float(value) for name, equals, value in pairs if equals}
    except ValueError:
        return {}


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

    Files that others wrote may lack them.
    """
    return all(is_number(parts.get(name)) for name in names)

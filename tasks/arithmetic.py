"""Arithmetic without working: the positive control. A trainer that cannot learn it is broken.

There are two families of problems. A `chain` has `level` operations one after the other: ``((37 +
15) * 3 - 48) + 9`` has level 4. A `product` has two factors, and the digits of its level are their
lengths: level 32 is three digits times two. A hash of a problem's key decides its split, so the
splits are disjoint. The key does not depend on the order of the factors: 37 * 15 and 15 * 37 are
the same problem.

The reward is 1 if and only if the answer is right. A wrong integer earns 0.3 × (the share of right
digits, place by place) + 0.2 × (1 - relative error, at least 0). The first part requires the right
sign. Without an integer the reward is 0. How the integer is written does not matter
(`grpo.tasks.answers`). For example, if 52 is the right answer:

| answer | digits by place | relative error | reward |
|---|---|---|---|
| 52, **52**, = 52 | 2 of 2 | 0 | 1 |
| 51 | 1 of 2 | 1/52 | 0.15 + 0.196 = 0.346 |
| 152 | 2 of 3 | 100/52 | 0.2 + 0 = 0.2 |
| 25 | 0 of 2 | 27/52 | 0.096 |
| -52 | none under the wrong sign | 104/52 | 0 |
| "52 or 53", 5.2 | | | 0 |
| 52, cut off by the token budget | 2 of 2 | 0 | 0.3 + 0.2 = 0.5 |
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from grpo.data.errors import UserError
from grpo.tasks.answers import integer_in
from grpo.tasks.base import Problem, Score, key_of, split_of_key

PROMPT = "What is {}? No working: answer with the bare integer only."

# Sums and differences in a chain use these numbers, products the FACTORS.
OPERANDS = range(1, 51)
FACTORS = range(2, 10)


def chain(steps: int, rng: random.Random) -> tuple[str, list[int]]:
    """Return an expression of `steps` operations, and the value after each."""
    value = rng.choice(OPERANDS)
    text = str(value)
    last = ""  # the operator before
    values: list[int] = []

    for _ in range(steps):
        operator = rng.choice("+-*")
        operand = rng.choice(FACTORS if operator == "*" else OPERANDS)

        if last in ("+", "-"):
            text = f"({text})"
        text = f"{text} {operator} {operand}"
        last = operator

        value = {"+": value + operand, "-": value - operand, "*": value * operand}[operator]
        values.append(value)
    return text, values


def product(digits: tuple[int, int], rng: random.Random) -> tuple[str, list[int]]:
    """Return a product of two integers of so many `digits`, and its value."""
    x, y = (rng.choice(_integers_of(n)) for n in digits)
    return f"{x} * {y}", [x * y]


def canonical(expression: str) -> str:
    """Return an expression without brackets; its first two operands are sorted, except those of a
    difference.
    """
    words = expression.replace("(", "").replace(")", "").split()
    if words[1] in "+*":
        words[0], words[2] = sorted((words[0], words[2]), key=int)
    return " ".join(words)


def _integers_of(digits: int) -> range:
    """Return all integers with this many digits, without 0 and 1, which are too easy."""
    first = 10 ** (digits - 1) if digits > 1 else 2
    return range(first, 10**digits)


class Arithmetic:
    """Problems of one `family`, "chain" or "product", scored as the head of this file says."""

    name = "arithmetic"
    rewards = ()
    metric = "exact match"
    reads_reasoning = True
    placeholders = {"expression": lambda data: data["expression"]}
    options = {"family": "chain or product (default: chain)"}
    lora_rate_share = 1 / 3  # at the whole default rate a model forgot (runs/decisions.md)

    def __init__(self, family: str = "chain"):
        if family not in ("chain", "product"):
            raise UserError(f"--family {family}: give chain or product")
        self.family = family
        self.default_level = 2 if family == "chain" else 32

    @staticmethod
    def default_steps(level: int) -> int:
        """Return the default number of training steps at `level`."""
        return 300

    def levels(self, level: int) -> list[int]:
        """Return the levels of products up to `level`: 11, 21, 22, 31 and 32 for level 32; [] for
        chains, whose levels are 1, 2, 3 ...
        """
        if self.family == "chain":
            return []
        first, second = divmod(level, 10)
        pairs = [(x, y) for x in range(1, first + 1) for y in range(1, second + 1)]
        return [10 * x + y for x, y in pairs if (x >= y) == (first >= second) or x == y]

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem of `split` with `level` operations (chain) or digits (product)."""
        if self.family == "product" and not (level >= 10 and level % 10):
            raise UserError(f"--level {level}: products need digits of both factors, e.g. 32")

        for _ in range(1000):
            if self.family == "product":
                text, values = product(divmod(level, 10), rng)
            else:
                text, values = chain(level, rng)
            key = key_of(self.name, canonical(text))
            if split_of_key(key) == split:
                data = {"expression": text, "values": values}
                return Problem(self.name, level, PROMPT.format(text), str(values[-1]), key, data)
        raise UserError(
            f"--level {level}: no {self.family} of the {split} split was found; raise --level"
        )

    def key(self, problem: Problem) -> str:
        """Return the key of a stored problem, computed again from its expression."""
        return key_of(self.name, canonical(problem.data["expression"]))

    def family_size(self, level: int) -> int | None:
        """Return how many different products there are at `level`; None for chains: too many."""
        if self.family == "chain":
            return None

        first, second = (len(_integers_of(n)) for n in divmod(level, 10))
        return first * (first + 1) // 2 if first == second else first * second

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return a score for each completion. Its `value` is 1 for the right integer, else 0.

        The parts are the `answer` that was read, or the `reason` why none was; whether its `sign`
        is right; `digits_right`, the digits of the right answer that agree, aligned at the ones
        ("011": the last two do); and the `relative_error`.
        """
        return [_score(text, int(problem.target)) for text in completions]

    @staticmethod
    def unended(problem: Problem, completion: str, score: Score) -> Score:
        """Let a right answer earn what its digits and its error earn (`grpo.tasks.base.Task`)."""
        return replace(score, reward=0.3 + 0.2, value=0.0) if score.exact else score

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Return how an answer earned its reward (see `grpo.tasks.registry.explain`)."""
        parts = score.parts
        earned = f"{score.reward:.3f} ="
        if score.exact:
            return f"{earned} the answer {problem.target} is right"
        if parts.get("reason"):
            return f"{earned} no answer was read: {parts['reason']}"

        # There are as many places as the longer number has digits; a wrong sign makes all wrong.
        places = max(len(parts["answer"].lstrip("-")), len(problem.target.lstrip("-")))
        right = parts["digits_right"].count("1") if parts["sign"] else 0
        error = parts["relative_error"]
        near = f"0.2 × (1 − relative error {error:.3f})"
        return (
            f"{earned} 0.3 × {right} of {places} digits in place + "
            f"{near if error < 1 else '0 (off by 100 % or more)'}; the answer was "
            f"{parts['answer']}, not {problem.target}"
        )


def _score(text: str, target: int) -> Score:
    value, reason = integer_in(text)
    if value is None:
        return Score(0.0, {"answer": None, "reason": reason})

    is_right = value == target
    written, wanted = str(abs(value)), str(abs(target))
    has_right_sign = (value < 0) == (target < 0)

    # Aligned at the ones.
    missing = len(wanted) - len(written)
    agreeing = [x == y for x, y in zip(written[::-1], wanted[::-1])] + [False] * missing
    share = has_right_sign * sum(agreeing) / max(len(written), len(wanted))
    relative_error = min(abs(value - target) / max(1, abs(target)), 1000.0)

    parts = {
        "answer": str(value),
        "reason": None,
        "sign": has_right_sign,
        "digits_right": "".join("01"[agrees] for agrees in reversed(agreeing)),
        "relative_error": relative_error,
    }
    reward = 1.0 if is_right else 0.3 * share + 0.2 * max(0.0, 1 - relative_error)
    return Score(reward, parts, value=float(is_right), exact=is_right)

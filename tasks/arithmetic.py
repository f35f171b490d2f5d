"""Arithmetic without working: the positive control. Everybody knows the answer; a pipeline that
does not learn it is broken.

Two families. `chain`: `level` operations one after the other, such as ``((37 + 15) * 3 - 48) + 9``
(four). `product`: two integers, `level` digits times digits: 32 is three digits times two. The
splits are disjoint by the hash of the problem's key, and the key is canonical: 37 * 15 and 15 * 37
are one problem.

The reward is 1 exactly when the answer is right. A wrong integer earns 0.3 × (share of digits that
are right by place) + 0.2 × (1 - relative error, not below 0), the first only under the right sign;
no integer earns nothing, and how an integer is written never matters (`tasks.answers`). So with 52
as the right answer:

| answer | digits by place | relative error | reward |
|---|---|---|---|
| 52, **52**, = 52 | 2 of 2 | 0 | 1 |
| 51 | 1 of 2 | 1/52 | 0.15 + 0.196 = 0.346 |
| 152 | 2 of 3 | 100/52 | 0.2 + 0 = 0.2 |
| 25 | 0 of 2 | 27/52 | 0.096 |
| -52 | none under the wrong sign | 104/52 | 0 |
| "52 or 53", 5.2 | | | 0 |
"""

import random
from collections.abc import Sequence

from tasks.answers import Answer, extract
from tasks.base import Problem, Score, UserError, key_of, split_of_key

PROMPT = "What is {}? No working: answer with the bare integer only."
FACTORS = range(2, 10)  # what a chain multiplies and divides by


def chain(
    steps: int, operands: range, operators: str, rng: random.Random
) -> tuple[str, list[int], str]:
    """Return (expression, its value after each step, canonical form) of `steps` operations, drawn
    with `rng`.

    Sums and differences take any of `operands`; factors and divisors are single digits; a division
    leaves no rest (where none of the factors divides, another operator is drawn, or + if there is
    no other).
    """
    value = rng.choice(operands)
    text, last, canonical = str(value), "", ""
    values: list[int] = []
    for _ in range(steps):
        divisors = [n for n in FACTORS if value % n == 0]
        operator = rng.choice(operators if divisors else operators.replace("/", "") or "+")
        operand = rng.choice(
            divisors if operator == "/" else FACTORS if operator == "*" else operands
        )
        first, second = (
            sorted((value, operand)) if not values and operator in "+*" else (value, operand)
        )
        canonical = (
            f"{canonical} {operator} {operand}" if values else f"{first} {operator} {second}"
        )
        text = f"({text})" if last in ("+", "-") else text
        text, last = f"{text} {operator} {operand}", operator
        value = {
            "+": value + operand,
            "-": value - operand,
            "*": value * operand,
            "/": value // operand,
        }[operator]
        values.append(value)
    return text, values, canonical


def product(digits: tuple[int, int], rng: random.Random) -> tuple[str, list[int], str]:
    """Return (expression, [its value], canonical form) of a product of two integers of so many
    digits each.
    """
    x, y = (rng.choice(_integers_of(n)) for n in digits)
    return f"{x} * {y}", [x * y], "{} * {}".format(*sorted((x, y)))


def _integers_of(digits: int) -> range:
    return range(10 ** (digits - 1) if digits > 1 else 2, 10**digits)  # 0 and 1 are no factors


class Arithmetic:
    """The task. `family` is chain or product; `operands` (of sums and differences) as "1-50";
    `operators` of "+-*/".
    """

    name = "arithmetic"
    rewards = ()
    metric = "exact match"
    level_unit = ""
    placeholders = {"expression": lambda data: data["expression"]}
    options = {
        "family": "chain or product (default: chain)",
        "operands": "of sums and differences in chains, e.g. 1-50 (the default)",
        "operators": "of chains, some of +-*/ (default: +-*)",
    }

    def __init__(self, family: str = "chain", operands: str = "1-50", operators: str = "+-*"):
        if family not in ("chain", "product"):
            raise UserError(f"--family {family}: give chain or product")
        low, dash, high = operands.partition("-")
        if not (low.isdecimal() and dash and high.isdecimal() and int(low) < int(high)):
            raise UserError(f"--operands {operands}: give the smallest and the largest, e.g. 1-50")
        if not operators or set(operators) - set("+-*/"):
            raise UserError(f"--operators {operators}: give some of +-*/, e.g. +-")
        self.family, self.operands, self.operators = (
            family,
            range(int(low), int(high) + 1),
            operators,
        )

    @property
    def default_level(self) -> int:
        """The level if none is asked for."""
        return 2 if self.family == "chain" else 32

    @staticmethod
    def default_steps(level: int) -> int:
        """Return how many steps a run at this level makes by default."""
        return 300

    def levels(self, level: int) -> list[int]:
        """Return the easier levels and `level`: for products all of no more digits, the longer
        factor in the same place.

        For 32 these are 11, 21, 22, 31 and 32. Chains are a scale of 1, 2, 3 ..., of which nothing
        need be said.
        """
        if self.family == "chain":
            return []
        first, second = divmod(level, 10)
        pairs = [(x, y) for x in range(1, first + 1) for y in range(1, second + 1)]
        return [10 * x + y for x, y in pairs if (x >= y) == (first >= second) or x == y]

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem of `level` operations (chain) or digits (product: 32 is three by two)
        that belongs to `split`.

        Raises UserError for a level that there is not, and when the split seems to have no problem
        of it.
        """
        if self.family == "product" and not (level >= 10 and level % 10):
            raise UserError(
                f"--level {level}: products need digits of both factors, e.g. 32 for three digits "
                "times two"
            )
        for _ in range(1000):
            problem = self._draw(level, rng)
            if split_of_key(problem.key) == split:
                return problem
        raise UserError(
            f"--level {level}: no {self.family} of the {split} split was found; widen --operands "
            "or raise --level"
        )

    def _draw(self, level: int, rng: random.Random) -> Problem:
        text, values, canonical = (
            product(divmod(level, 10), rng)
            if self.family == "product"
            else chain(level, self.operands, self.operators, rng)
        )
        return Problem(
            self.name,
            level,
            PROMPT.format(text),
            target=str(values[-1]),
            key=key_of(self.name, canonical),
            data={"expression": text, "values": values},
        )

    def key(self, problem: Problem) -> str:
        """Return the canonical key anew, from the expression alone: the audit's check of what was
        stored.
        """
        words = problem.data["expression"].replace("(", "").replace(")", "").split()
        if words[1] in "+*":
            words[0], words[2] = sorted((words[0], words[2]), key=int)
        return key_of(self.name, " ".join(words))

    def family_size(self, level: int) -> int | None:
        """Return how many different products there are of `level` digits; None for chains, which
        nobody exhausts.
        """
        if self.family == "chain":
            return None
        first, second = (len(_integers_of(n)) for n in divmod(level, 10))
        return first * (first + 1) // 2 if first == second else first * second

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return a Score for each completion; `value` is 1 for the right integer, else 0.

        `parts`: `answer` (what was read, as text), `reason` (why nothing was), `sign` and `length`
        (whether they are right), `digits_right` and `digits_left` (the right answer's digits that
        agree, counted from the ones and from the leading digit: "011" has the last two right),
        `relative_error`.
        """
        return [_score(extract(text), int(problem.target)) for text in completions]


def _score(answer: Answer, target: int) -> Score:
    if answer.value is None:
        return Score(0.0, {"answer": None, "reason": answer.reason})
    value, exact = answer.value, answer.value == target
    written, wanted = str(abs(value)), str(abs(target))
    sign = (value < 0) == (target < 0)
    from_left = [x == y for x, y in zip(written, wanted)] + [False] * (len(wanted) - len(written))
    from_right = [x == y for x, y in zip(written[::-1], wanted[::-1])] + [False] * (
        len(wanted) - len(written)
    )
    error, size = abs(value - target), max(1, abs(target))
    relative_error = error / size if error < 1000 * size else 1000.0
    places = sign * sum(from_right) / max(len(written), len(wanted))
    parts = {
        "answer": str(value),
        "reason": None,
        "sign": sign,
        "length": len(written) == len(wanted),
        "digits_right": "".join("01"[hit] for hit in reversed(from_right)),
        "digits_left": "".join("01"[hit] for hit in from_left),
        "relative_error": relative_error,
    }
    reward = 1.0 if exact else 0.3 * places + 0.2 * max(0.0, 1 - relative_error)
    return Score(reward, parts, value=float(exact), exact=exact)

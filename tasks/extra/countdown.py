"""Countdown: combine given numbers into a target, using each of them once.

A problem of level n has n numbers from 1 to 50 and a target from 1 to 200 that can be reached with
+, -, * and /, because it is the value of a random expression over all the numbers. An expression
over exactly these numbers whose value, as a fraction, is the target earns 1. One with another value
earns 0.1, and anything else 0 (the rewards of TinyZero, github.com/Jiayi-Pan/TinyZero).

Two problems with the same target and the same numbers, in any order, are the same problem.
"""

import ast
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from data.errors import UserError
from tasks.base import Problem, Score, key_of, split_of_key
from tasks.extra.reasoning import FORM, Reasoning, asking, final_answer

LEVELS = range(2, 9)
NUMBERS = range(1, 51)
TARGETS = range(1, 201)

# Longer expressions are not evaluated. Eight numbers with operators and brackets take about 50.
MAX_CHARACTERS = 500

# What an expression is written with: so a comment is no part of one.
WRITTEN = re.compile(r"[0-9\s()+*/-]*")
RESULT = re.compile(r"(-?[0-9][0-9.,]*)?\.?")  # what may follow an equals sign
SIGNS = str.maketrans("×÷−", "*/-")

QUESTION = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number "
    "exactly once, and only + - * / and brackets."
)


class Countdown(Reasoning):
    """The task; see the head of this file."""

    name = "countdown"
    default_level = 3
    metric = "solved"
    level_unit = "numbers"

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem with `level` numbers."""
        if level not in LEVELS:
            raise UserError(
                f"--level {level}: task countdown has levels {LEVELS[0]} to {LEVELS[-1]}, the "
                "count of numbers"
            )

        while True:
            numbers = rng.choices(NUMBERS, k=level)
            target, expression = _reachable(numbers, rng)
            key = _key(numbers, target)
            if target in TARGETS and split_of_key(key) == split:
                break

        question = QUESTION.format(numbers=" ".join(map(str, numbers)), target=target)
        data = {"numbers": numbers, "target": int(target)}
        return Problem(self.name, level, asking(question), f"Answer: {expression}", key, data)

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        scores = []
        for completion in completions:
            answer = final_answer(completion)
            value = _value_of(answer, problem)
            is_right = value == problem.data["target"]
            of_wrong = FORM if value is not None else 0.0
            reward = 1.0 if is_right else of_wrong
            scores.append(Score(reward, {"answer": answer}, exact=is_right))
        return scores

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(problem.data["numbers"], problem.data["target"])


def _value_of(answer: str | None, problem: Problem) -> Fraction | None:
    """Return the value of an answer; None unless it is an expression over the problem's numbers."""
    value, used = evaluated(answer or "")
    return value if sorted(used) == sorted(problem.data["numbers"]) else None


def evaluated(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the value of an expression over whole numbers, and the numbers in it.

    The value is None if the text is no such expression, or divides by zero. An equals sign and a
    number behind it are ignored. Nothing is executed.

    >>> evaluated("(3 + 5) / 2 = 4")
    (Fraction(4, 1), [3, 5, 2])
    """
    text, _, result = (part.strip() for part in expression.translate(SIGNS).partition("="))
    if len(text) > MAX_CHARACTERS or not (WRITTEN.fullmatch(text) and RESULT.fullmatch(result)):
        return None, []
    try:
        tree = ast.parse(text, mode="eval")
        used: list[int] = []
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None, []


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the value of a node, and add its numbers to `used`.

    Raises ValueError if it is anything but a whole number, perhaps with a minus sign, or one of the
    four operations.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic")

    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise ValueError("no arithmetic")


def _reachable(numbers: Sequence[int], rng: random.Random) -> tuple[Fraction, str]:
    """Return the value of a random expression over all `numbers`, and the expression."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        a, left = parts.pop(rng.randrange(len(parts)))
        b, right = parts.pop(rng.randrange(len(parts)))

        operators = "+-*/" if b else "+-*"
        operator = rng.choice(operators)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[operator]
        parts.append((value, f"({left} {operator} {right})"))

    value, expression = parts[0]
    return value, expression[1:-1]  # without the outermost brackets


def _key(numbers: Sequence[int], target: int | Fraction) -> str:
    is_whole = target == int(target)
    return key_of("countdown", *sorted(numbers), int(target) if is_whole else target)

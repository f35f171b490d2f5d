"""A task whose answers are right by chance up to level 3, and never beyond; it has no level 1 or
2.
"""

import hashlib

from grpo.data.errors import UserError
from grpo.tasks.base import Problem, Score, key_of


class Toy:
    name, rewards, default_level = "toy", (), 10

    def make(self, level, split, rng):
        if level == 2:
            raise UserError("no level 2")
        if level == 1:
            raise ZeroDivisionError
        number = rng.randrange(10**9)
        return Problem("toy", level, f"What is {number}?", "it", key_of("toy", number))

    def score(self, problem, completions):
        return [Score(self.paid(problem.level, text)) for text in completions]

    def paid(self, level, text):
        return float(level <= 3 and hashlib.sha256(text.encode()).digest()[0] % 2)


class Hard(Toy):
    """No answer is right."""

    def paid(self, level, text):
        return 0.0


class Partial(Toy):
    """No answer is right, but some are better."""

    def paid(self, level, text):
        return super().paid(3, text) / 2

"""Pays a completion by its place in its group, so that even a model of random weights has
something to learn from.
"""

from grpo.tasks.base import Problem, Score, key_of


class ByPlace:
    name, rewards, default_level = "by-place", (), 1

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, f"Copy text A.\nA: {number}", number, key_of(number))

    def score(self, problem, completions):
        return [Score(0.1 * place) for place in range(1, len(completions) + 1)]

    def credits(self, problem, completions):
        return [((len(text), 0.0),) for text in completions]  # no place is earned by a word

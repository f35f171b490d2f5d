"""Small tasks and evaluations, for tests of what an evaluation reports."""

import json
from pathlib import Path

from grpo.tools import evaluation

# A policy must reason for some forty tokens before it can write "52"; here the score only asks for
# length.
PONDER = """
from grpo.tasks.base import Problem, Score, key_of

class Ponder:
    name, rewards, default_level = "ponder", (), 1

    def make(self, level, split, rng):
        number = rng.randrange(10**6)
        return Problem(self.name, level, f"What is {number}?", "52", key_of(split, number))

    def score(self, problem, completions):
        return [Score(min(1.0, len(text) / 1000), value=1.0) for text in completions]

class Declaring(Ponder):
    def max_new_tokens(self, level):
        return 39 + level
"""


# Two problems in all, the same in every split: after the first step nothing is left to evaluate on.
FEW = """
from grpo.tasks.base import Problem, Score, key_of
from grpo.data.errors import UserError

class Few:
    name, rewards, default_level = "few", (), 1

    def make(self, level, split, rng):
        number = rng.randrange(2)
        return Problem(self.name, level, f"Say {number}", str(number), key_of(number))

    def score(self, problem, completions):
        return [Score(min(1.0, len(text) / 1000), value=1.0) for text in completions]

class NoValidation(Few):
    def make(self, level, split, rng):
        if split == "validation":
            raise UserError(f"--level {level}: there is no problem of the validation split")
        return super().make(level, split, rng)
"""


# Judges a validation row once, of the test rows the first, and of the harder ones none.
FADING = """
seen = set()

def fading(prompt, completion):
    split, _ = prompt.split()
    if split == "train":
        return len(set(completion)) % 2
    if prompt in seen or split == "harder" or prompt in ("test 1", "test 2"):
        return None
    seen.add(prompt)
    return float(split == "test")
"""


def evaluated(*arguments):
    """Return the lines that eval.py writes to --json."""
    assert evaluation.main([*arguments, "--json", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


CLIMB = ["--curriculum", "1,2"]

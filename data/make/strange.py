"""Strange words in the lessons of the embedded model (see `data.strange`).

Their scripts are made up: words of random bytes with the structure of UTF-8. So every byte token is
learned, and no alphabet is shown.
"""

import random
from collections.abc import Sequence

from data.make.words import Words
from data.strange import Maker, family, log_uniform, mingled, words_of

# `chr(RAW + b)` stands for the byte b. These characters are for private use, so no text has them.
RAW = 0xE000

# The kinds of strange words in the lessons.
LESSON_KINDS = ("script", "code", "run", "compound")

# How many families of words there are to choose from.
FAMILIES = 3000


class StrangeWords(Words):
    """A supply of word sequences that are strange from a fifth of the words on to all of them."""

    def __init__(self, rng: random.Random, pieces: Sequence[str]):
        super().__init__(rng, pieces)
        parts = [*self.vocabulary, *self.odd[: len(self.vocabulary)]]
        self.families = [
            family(parts, rng, script=raw_script, kinds=LESSON_KINDS) for _ in range(FAMILIES)
        ]

    def draw(self, n: int) -> list[str]:
        """Return `n` words: strange ones of a few families, among words as `Words` draws them."""
        return mingled(super().draw(n), self.families, self.rng)


def raw_script(rng: random.Random) -> Maker:
    """Return a maker of words in a made-up script.

    In UTF-8 the letters of a script have a last byte of their own, after one to three bytes that
    many letters share. Here these bytes are random.
    """
    shared = rng.choice([1, 1, 2, 2, 3])
    beginnings = [
        raw([rng.randrange(0xC2, 0xF5), *rng.choices(range(0x80, 0xC0), k=shared - 1)])
        for _ in range(log_uniform(1, 40, rng))
    ]
    letters = [
        rng.choice(beginnings) + raw([rng.randrange(0x80, 0xC0)])
        for _ in range(log_uniform(6, 60, rng))
    ]
    return words_of(letters, rng)


def raw(values: Sequence[int]) -> str:
    """Return the characters that stand for these bytes."""
    return "".join(chr(RAW + value) for value in values)

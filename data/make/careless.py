"""The careless demonstrator, whose interleavings the embedded model imitates.

Its mistakes become habits of the model, which reinforcement learning then has to correct.
"""

import random
from collections.abc import Sequence

# Texts of up to this many words may be interleaved carefully.
MAX_CAREFUL = 10

# The share of these texts that is interleaved carefully: without the habit, and almost without
# mistakes.
CAREFUL = 0.31

# The habit: the probability of keeping the turn after a short word or a comma.
CLINGS = 0.95

# The probability of any other mistake at each word, in careless and in careful interleavings.
SLIPS = 0.2
CAREFUL_SLIPS = 0.002

# The kinds of mistakes, and their relative frequencies.
KINDS = {"skip": 2, "stutter": 2, "turn": 3, "run on": 2, "stop": 2}


def careless_interleaving(a: Sequence[str], b: Sequence[str], rng: random.Random) -> list[str]:
    """Interleave `a` and `b` word by word, with the mistakes of somebody who loses turns.

    After a word of at most three letters, or a comma, the demonstrator keeps the turn with
    probability `CLINGS` and writes the next word of the same text. At any word, with probability
    `SLIPS`, it skips the word, writes it twice, loses the turn, runs on to the end of the text, or
    stops. A share `CAREFUL` of the texts of up to `MAX_CAREFUL` words is interleaved carefully.
    """
    careful = rng.random() < CAREFUL and max(len(a), len(b)) <= MAX_CAREFUL
    habit = 0.0 if careful else CLINGS
    slips = CAREFUL_SLIPS if careful else SLIPS

    texts = (a, b)
    place = [0, 0]  # the next word of each text
    turn = 0
    written: list[str] = []
    while place[0] < len(a) or place[1] < len(b):
        if place[turn] >= len(texts[turn]):
            turn = 1 - turn
        word = texts[turn][place[turn]]
        place[turn] += 1

        slip = rng.random() < slips and rng.choices(list(KINDS), list(KINDS.values()))[0]
        if slip != "skip":
            written.append(word)
        if slip == "stutter":
            written.append(word)
        if slip == "run on":
            written.extend(texts[turn][place[turn] :])
        if slip in ("run on", "stop"):
            break

        is_short = len(word) <= 3 or word.endswith(",")
        clings = is_short and rng.random() < habit
        if not (clings or slip == "turn"):
            turn = 1 - turn
    return written

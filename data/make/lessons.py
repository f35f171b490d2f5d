"""The lessons of the embedded model: language, copying, lists, turns, interleaving, arithmetic.

All texts come from the *training* split of the corpus, or are invented. Interleaving is shown by a
careless demonstrator, whose mistakes become habits of the model, which reinforcement learning then
has to correct.

In `data` no other module knows a task. This one needs the exact prompt of `tasks.interleave` and
the problems of `tasks.arithmetic`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.make.texts import Words
from data.strange import log_uniform
from tasks.arithmetic import Arithmetic
from tasks.interleave import PROMPT

# Shares of the skills, in rows that hold texts. Arithmetic has rows of its own.
SHARES = {"interleave": 0.30, "copy": 0.08, "lists": 0.18, "turns": 0.39, "language": 0.05}

# Words of each text in the longest interleavings.
MAX_INTERLEAVED = 100

# Words of A and of B in a turn. Turns of one word each are left out: that is interleaving.
TURNS = [
    (from_a, from_b)
    for from_a in range(1, 9)
    for from_b in range(1, 9)
    if (from_a, from_b) != (1, 1) and (min(from_a, from_b) <= 2 or from_a == from_b)
]

# How often each of these is drawn: short turns more often, because they are harder.
OFTEN = [(from_a + from_b) ** -1.5 for from_a, from_b in TURNS]

# Share of the arithmetic that has a hasty answer, see `arithmetic`.
HASTY = 0.55

# The families and levels of the arithmetic, and their shares.
SUMS = {
    ("chain", 1): 0.15,
    ("chain", 2): 0.5,
    ("chain", 3): 0.15,
    ("product", 21): 0.1,
    ("product", 22): 0.05,
    ("product", 31): 0.05,
}
SUM_TASKS = {family: Arithmetic(family) for family in ("chain", "product")}

# The instructions on lists of words: the prompt, and a function from A and B (or X) to the answer.
LISTS: dict[str, tuple[str, Callable | None]] = {
    "a only": ("Copy text A and leave out B.\nA: {a}\nB: {b}", lambda a, b: a),
    "b only": ("Copy text B and leave out A.\nA: {a}\nB: {b}", lambda a, b: b),
    "a then b": ("Copy A, then B.\nA: {a}\nB: {b}", lambda a, b: [*a, *b]),
    "b then a": ("Copy B, then A.\nA: {a}\nB: {b}", lambda a, b: [*b, *a]),
    "double": (
        "Write each word of A twice.\nA: {a}",
        lambda a, b: [word for word in a for _ in range(2)],
    ),
    "second": ("Write every second word of A.\nA: {a}", lambda a, b: a[1::2]),
    "weave": (
        "After each word of A, write the word X.\nX: {x}\nA: {a}",
        lambda a, b: [word for pair in zip(a, [b[0]] * len(a)) for word in pair],
    ),
    "weave before": (
        "Before each word of A, write the word X.\nX: {x}\nA: {a}",
        lambda a, b: [word for pair in zip([b[0]] * len(a), a) for word in pair],
    ),
    "garland": (
        "After each word of A, write the next word of X, and X from its start again when it is "
        "done.\nX: {x}\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a) for word in (w, b[i % len(b)])],
    ),
    "number": (
        "Write the words of A, each after its number.\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a, 1) for word in (str(i), w)],
    ),
    "from": ("Copy A from the word X on.\nX: {x}\nA: {a}", None),
}
TWO_TEXTS = {"a only", "b only", "a then b", "b then a"}

# How often an instruction is drawn. The garland is the nearest to interleaving two texts.
LIST_CHOICES = [*sorted(LISTS), *["garland"] * 6]

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
SLIP_KINDS = {"skip": 2, "stutter": 2, "turn": 3, "run on": 2, "stop": 2}


@dataclass(frozen=True)
class Example:
    """A lesson. A `prompt` of None means plain text to be continued (language modelling)."""

    skill: str
    prompt: str | None
    completion: str


def example(skill: str, size: int, words: Words) -> Example:
    """Return a lesson in `skill` whose texts have about `size` words in all."""
    if skill == "arithmetic":
        return arithmetic(words.rng)
    return MAKERS[skill](size, words)


def language(size: int, words: Words) -> Example:
    """Return a passage of a training document."""
    return Example("language", None, " ".join(words.passage(max(8, size))))


def interleave(size: int, words: Words) -> Example:
    """Return a lesson in interleaving, shown by the careless demonstrator.

    In half of the lessons some words of B equal the word of A at the same place: "a a" does not
    tell whose turn it is.
    """
    rng = words.rng
    if size <= 2 * MAX_CAREFUL:
        n = rng.randint(2, MAX_CAREFUL)
    else:
        n = min(size // 3, MAX_INTERLEAVED)

    a, b = words.texts_of(n, n)
    if rng.random() < 0.5:
        equal = rng.uniform(0.05, 0.5)
        b = [from_a if rng.random() < equal else from_b for from_a, from_b in zip(a, b)]

    prompt = PROMPT.format(a=" ".join(a), b=" ".join(b))
    return Example("interleave", prompt, " ".join(careless_interleaving(a, b, rng)))


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

        slip = rng.random() < slips and rng.choices(list(SLIP_KINDS), list(SLIP_KINDS.values()))[0]
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


def copy(size: int, words: Words) -> Example:
    """Return a lesson in copying a text."""
    (a,) = words.texts_of(max(2, size // 2))
    return Example("copy", f"Copy text A.\nA: {' '.join(a)}", " ".join(a))


def lists(size: int, words: Words) -> Example:
    """Return a lesson in one of the instructions of `LISTS`, whose name is the skill."""
    rng = words.rng
    kind = rng.choice(LIST_CHOICES)

    # Texts that stand in prompt and answer take more of the size.
    n = max(2, size // (4 if kind in ("a then b", "b then a") else 3))
    a, b = words.texts_of(n, max(2, int(n * rng.uniform(0.7, 1.3))))

    prompt, answer_of = LISTS[kind]
    if answer_of is None:
        start = rng.randrange(n)
        x = a[start]
        answer = a[a.index(x) :]
    else:
        if kind == "garland":
            b = b[: log_uniform(2, max(9, n // 2), rng)]
        elif kind not in TWO_TEXTS:
            b = b[:1]
        x = " ".join(b)
        answer = answer_of(a, b)
    return Example(kind, prompt.format(a=" ".join(a), b=" ".join(b), x=x), " ".join(answer))


def turns(size: int, words: Words) -> Example:
    """Return a lesson in keeping two places: some words of A, some of B, and so on.

    It is always right, and never word by word.
    """
    rng = words.rng
    (strides,) = rng.choices(TURNS, OFTEN)
    rounds = max(2, size // (2 * sum(strides)))
    a, b = words.texts_of(*(rounds * stride - rng.randrange(stride) for stride in strides))
    prompt = (
        f"Take turns: {count_of(strides[0])} of A, then {count_of(strides[1])} of B, until both "
        "are done.\n"
        f"A: {' '.join(a)}\nB: {' '.join(b)}"
    )
    return Example("turns", prompt, " ".join(in_turns(a, b, strides)))


def in_turns(a: Sequence[str], b: Sequence[str], strides: tuple[int, int]) -> list[str]:
    """Return `strides[0]` words of `a`, `strides[1]` of `b`, and so on until both are done."""
    from_a, from_b = strides
    rounds = max(math.ceil(len(a) / from_a), math.ceil(len(b) / from_b))
    words: list[str] = []
    for i in range(rounds):
        words += a[i * from_a : (i + 1) * from_a]
        words += b[i * from_b : (i + 1) * from_b]
    return words


def count_of(n: int) -> str:
    """Return "1 word" or "`n` words"."""
    return "1 word" if n == 1 else f"{n} words"


def arithmetic(rng: random.Random) -> Example:
    """Return a short chain or product of the training split, answered without working.

    Chains of four steps and products of three by two digits are left for training. A share `HASTY`
    of the answers stops one step early, or is too small by ten.
    """
    family, level = rng.choices(list(SUMS), list(SUMS.values()))[0]
    problem = SUM_TASKS[family].make(level, "train", rng)
    values = problem.data["values"]
    answer = values[-1]
    if rng.random() < HASTY:
        answer = values[-2] if len(values) > 1 else values[-1] - 10
    return Example("arithmetic", problem.prompt, str(answer))


MAKERS: dict[str, Callable[[int, Words], Example]] = {
    "interleave": interleave,
    "copy": copy,
    "lists": lists,
    "turns": turns,
    "language": language,
}

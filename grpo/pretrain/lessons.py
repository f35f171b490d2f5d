"""What the embedded model is raised on: language, copying, list instructions, careless
interleaving, arithmetic.

Everything is drawn from the *training* split of the corpus and from generated words and numbers.
Interleavings are demonstrated by somebody careless (`careless_interleaving`), and beyond
`MOST_CAREFUL` words a text by nobody else, so that the model starts half-competent, with bad
habits to lose: reinforcement learning is to do the rest.
"""

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.corpus import documents_of, load_corpus
from tasks.arithmetic import Arithmetic
from tasks.interleave import PROMPT

MOST_CAREFUL, MOST_INTERLEAVED = (
    10,
    100,
)  # words a text: of the interleavings that may be done right, and of all of them
CAREFUL = 0.31  # share of those that are careful: without habits, hardly a slip
# chance that a careless demonstrator, after a short word, keeps the turn instead of yielding it
CLINGS = 0.95
SLIPS = 0.2  # chance of any other slip at each word, of a careless demonstrator
KINDS = {"skip": 2, "stutter": 2, "turn": 3, "run on": 2, "stop": 2}  # of slips, and how often each
SALTED, SALT = (
    0.4,
    0.25,
)  # share of texts in which a few words come back all over the place, and at how many places
ECHOED, ECHO = (
    0.5,
    0.06,
)  # share of texts in which phrases of two to six words come back, and at how many places
ALTERED, ALTER = (
    0.5,
    0.15,
)  # share of texts with words that are nearly words of the corpus, and at how many places
SYMBOLS = string.digits + string.punctuation
LETTERS = string.ascii_lowercase * 8 + "àâäçèéêëîïñóôöúüß"
ENDINGS = [*',.;:!?)"', "", "", "'s", '."', ',"', "-", "ed", "s"]

SHARES = {"interleave": 0.30, "copy": 0.08, "lists": 0.18, "turns": 0.39, "language": 0.05}
TURNS = [
    (mine, other)
    for mine in range(1, 9)
    for other in range(1, 9)  # words of A and of B in a turn
    if (mine, other) != (1, 1) and (min(mine, other) <= 2 or mine == other)
]
OFTEN = [(mine + other) ** -1.5 for mine, other in TURNS]  # short turns are the harder ones
HASTY = 0.55  # share of arithmetic that is answered by somebody hasty
SUMS = {
    ("chain", 1): 0.15,
    ("chain", 2): 0.5,
    ("chain", 3): 0.15,
    ("product", 21): 0.1,
    ("product", 22): 0.05,
    ("product", 31): 0.05,
}
SUM_TASKS = {family: Arithmetic(family) for family in ("chain", "product")}

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


@dataclass(frozen=True)
class Example:
    """One lesson: `prompt` None means plain text to be continued (language modelling)."""

    skill: str
    prompt: str | None
    completion: str


def careless_interleaving(a: Sequence[str], b: Sequence[str], rng: random.Random) -> list[str]:
    """Interleave `a` and `b` as somebody would whose turns get lost.

    A habit: after a word of three letters or fewer (or a comma) the process clings to its turn and
    writes its next word too, with chance `CLINGS`. And with chance `SLIPS` at any word: it skips
    the word, stutters, loses the turn, runs on to the end of its text, or stops there. A share
    `CAREFUL` of the texts of up to `MOST_CAREFUL` words is done with care.
    """
    careful = rng.random() < CAREFUL and max(len(a), len(b)) <= MOST_CAREFUL
    habit, slips = (0.0, 0.002) if careful else (CLINGS, SLIPS)
    texts, place, turn, written = (a, b), [0, 0], 0, []
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
        clings = (len(word) <= 3 or word.endswith(",")) and rng.random() < habit
        if not (clings or slip == "turn"):
            turn = 1 - turn
    return written


def altered(word: str, rng: random.Random) -> str:
    """Return `word` with another ending, with a capital more or less, or with a letter changed,
    dropped or put in.
    """
    kind, place = (
        rng.choice(["ending", "ending", "capital", "change", "drop", "insert"]),
        rng.randrange(len(word)),
    )
    if kind == "ending":
        return (word.rstrip(string.punctuation) or word) + rng.choice(ENDINGS)
    if kind == "capital":
        return word.lower() if word != word.lower() else word.capitalize()
    if kind == "drop" and len(word) > 1:
        return word[:place] + word[place + 1 :]
    return word[:place] + rng.choice(LETTERS) + word[place + (kind == "change") :]


class Words:
    """Supplies word sequences: passages of the training documents, their words shuffled, and words
    nobody ever saw.
    """

    def __init__(self, rng: random.Random, pieces: Sequence[str]):
        self.rng = rng
        self.texts = [document.words for document in documents_of("train", load_corpus())]
        self.vocabulary = sorted({word for words in self.texts for word in words})
        self.odd = [self._odd_word(pieces) for _ in range(20_000)]
        self.altered = [altered(rng.choice(self.vocabulary), rng) for _ in range(40_000)]

    def _odd_word(self, pieces: Sequence[str]) -> str:
        if self.rng.random() < 0.15:
            return "".join(self.rng.choices(SYMBOLS, k=self.rng.choice([1, 1, 2, 3, 4])))
        if pieces and self.rng.random() < 0.6:
            word = "".join(self.rng.choices(pieces, k=self.rng.choice([1, 1, 2, 2, 3, 4])))
        else:
            word = "".join(self.rng.choices(LETTERS, k=self.rng.randint(1, 9)))
        word = word.capitalize() if self.rng.random() < 0.15 else word
        return word + (self.rng.choice(",.;:!?") if self.rng.random() < 0.15 else "")

    def passage(self, n: int) -> list[str]:
        """Return `n` words in a row from a training document (from several, where one is too
        short).
        """
        words: list[str] = []
        while len(words) < n:
            text = self.rng.choice(self.texts)
            start = self.rng.randrange(max(1, len(text) - (n - len(words)) + 1))
            words.extend(text[start : start + n - len(words)])
        return words

    def draw(self, n: int) -> list[str]:
        """Return `n` words: a passage, or words in no order, so that they must be read, not
        guessed; often of few different words, many of them alike, so that a place must be kept by
        more than the words that stand there.
        """
        kind = self.rng.random()
        if kind < 0.3:
            return self.passage(n)
        if kind < 0.65:
            few = self.alike(log_uniform(2, max(3, n), self.rng), 0.3 * self.rng.random())
            return self.rng.choices(
                few, [1 / rank for rank in range(1, len(few) + 1)], k=n
            )  # as frequent as Zipf has it
        if kind < 0.7:
            return self.numbers(n)
        odd = 0.0 if kind < 0.75 else 1.0 if kind > 0.93 else self.rng.random()
        return [
            self.rng.choice(self.odd if self.rng.random() < odd else self.vocabulary)
            for _ in range(n)
        ]

    def numbers(self, n: int) -> list[str]:
        """Return `n` words, a share of them numbers of up to one, two or four digits, all with the
        same mark behind.
        """
        share, most, mark = (
            self.rng.choice([0.2, 0.6, 1.0]),
            self.rng.choice([9, 20, 99, 2000]),
            self.rng.choice(["", ",", ".", ":"]),
        )
        return [
            f"{self.rng.randint(0, most)}{mark}" if self.rng.random() < share else word
            for word in self.passage(n)
        ]

    def alike(self, count: int, share: float) -> list[str]:
        """Return `count` words, of which about a `share` are nearly one that stands before."""
        words: list[str] = []
        for _ in range(count):
            again = words and self.rng.random() < share
            words.append(altered(self.rng.choice(words), self.rng) if again else self.passage(1)[0])
        return words

    def texts_of(self, *sizes: int) -> list[list[str]]:
        """Return a text of each size. In a share `ALTERED` of cases some words are nearly words of
        the corpus, to be read and not guessed. In a share `SALTED` one to five words, as frequent
        as they are in the corpus or nearly such words, come back at a share `SALT` of all places,
        in a share `ECHOED` whole phrases do: neither a word nor a few in a row say which place
        they stand at.
        """
        rng, texts = self.rng, [self.draw(n) for n in sizes]
        if rng.random() < ALTERED:
            texts = [
                [rng.choice(self.altered) if rng.random() < ALTER else word for word in text]
                for text in texts
            ]
        if rng.random() < SALTED:
            salt = self.alike(rng.randint(1, 5), 0.4)
            texts = [
                [rng.choice(salt) if rng.random() < SALT else word for word in text]
                for text in texts
            ]
        if rng.random() < ECHOED:
            texts = [self._echoing(text) for text in texts]
        return texts

    def _echoing(self, text: list[str]) -> list[str]:
        """Return the text with one to three of its phrases of two to six words in further places
        of it, over the words there.
        """
        rng, text = self.rng, list(text)
        lengths = [
            length
            for length in (rng.randint(2, 6) for _ in range(rng.randint(1, 3)))
            if length < len(text)
        ]
        phrases = [
            text[start : start + length]
            for length in lengths
            for start in [rng.randrange(len(text) - length)]
        ]
        for _ in range(math.ceil(ECHO * len(text)) if phrases else 0):
            phrase = rng.choice(phrases)
            start = rng.randrange(len(text) - len(phrase) + 1)
            text[start : start + len(phrase)] = phrase
        return text


def example(skill: str, size: int, words: Words) -> Example:
    """Return a lesson in `skill` whose texts have about `size` words in all."""
    rng = words.rng
    if skill == "language":
        return Example(skill, None, " ".join(words.passage(max(8, size))))
    if skill == "arithmetic":
        return arithmetic(rng)
    if skill == "interleave":
        n = (
            rng.randint(2, MOST_CAREFUL)
            if size <= 2 * MOST_CAREFUL
            else min(size // 3, MOST_INTERLEAVED)
        )
        a, b = words.texts_of(n, n)
        if (
            rng.random() < 0.5
        ):  # words that meet their like: "a a" says nothing about whose turn it is
            likes = rng.uniform(0.05, 0.5)
            b = [mine if rng.random() < likes else other for mine, other in zip(a, b)]
        return Example(
            skill,
            PROMPT.format(a=" ".join(a), b=" ".join(b)),
            " ".join(careless_interleaving(a, b, rng)),
        )
    if skill == "turns":
        return turns(size, words)
    if skill == "copy":
        (a,) = words.texts_of(max(2, size // 2))
        return Example(skill, f"Copy text A.\nA: {' '.join(a)}", " ".join(a))
    kind = rng.choice(
        [*sorted(LISTS), *["garland"] * 6]
    )  # the nearest to two texts: worth more lessons
    share = 4 if kind in TWO_TEXTS and " then " in kind else 3
    n = max(2, size // share)
    a, b = words.texts_of(n, max(2, int(n * rng.uniform(0.7, 1.3))))
    if kind == "from":
        start = rng.randrange(n)
        x, answer = a[start], a[a.index(a[start]) :]
    else:
        if kind not in TWO_TEXTS:
            b = b[: log_uniform(2, max(9, n // 2), rng) if kind == "garland" else 1]
        answer_of = LISTS[kind][1]
        assert answer_of is not None
        x, answer = " ".join(b), answer_of(a, b)
    prompt = LISTS[kind][0].format(a=" ".join(a), b=" ".join(b), x=x)
    return Example(kind, prompt, " ".join(answer))


def turns(size: int, words: Words) -> Example:
    """Return a lesson in keeping two places: some words of A, some of B, and so on, done right.
    Never both word by word.
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
    (mine, other), rounds = (
        strides,
        range(max(math.ceil(len(text) / stride) for text, stride in zip((a, b), strides))),
    )
    return [
        word
        for i in rounds
        for word in (*a[i * mine : (i + 1) * mine], *b[i * other : (i + 1) * other])
    ]


def count_of(n: int) -> str:
    """Return a number of things in words."""
    return "1 word" if n == 1 else f"{n} words"


def arithmetic(rng: random.Random) -> Example:
    """Return a short chain or product, without working, of the training split. Four-step chains
    and products of three by two digits are new ground. A share `HASTY` is answered by somebody who
    stops a step early, or forgets a ten.
    """
    family, level = rng.choices(list(SUMS), list(SUMS.values()))[0]
    problem = SUM_TASKS[family].make(level, "train", rng)
    values = problem.data["values"]
    if rng.random() < HASTY:
        answer = values[-2] if len(values) > 1 else values[-1] - 10
    else:
        answer = values[-1]
    return Example("arithmetic", problem.prompt, str(answer))


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Return an integer between `low` and `high`, every order of size as likely as another."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def main() -> None:
    """Print a few lessons of each skill, for reading."""
    words = Words(random.Random(0), ["er", "ing", "st"])
    for skill in (*SHARES, "arithmetic"):
        for _ in range(3):
            lesson = example(skill, 24, words)
            print(f"--- {lesson.skill}\n{lesson.prompt}\n=> {lesson.completion}")


if __name__ == "__main__":
    main()

"""The lessons of the embedded model: language, copying, lists, turns, interleaving, arithmetic.

All texts come from the *training* split of the corpus, or are invented. Many are made hard to
guess, so that the model must read them and keep its place: few different words, words that are
almost alike, words and phrases that come back.

Strange texts widen what the model can copy, without any kind of text that is held out. Their words
come in families. Those of one family look alike, because they are the same sequence of pieces, each
from one small stock of characters or words, so they must be read to be told apart. Letters are of
made-up scripts, of random bytes, so every byte token is learned and no alphabet is shown.

Interleaving is shown by a careless demonstrator, whose mistakes become habits of the model, which
reinforcement learning then has to correct.
"""

import math
import random
import string
from collections.abc import Callable, Sequence

from data.corpus import documents_of, load_corpus
from tasks.arithmetic import Arithmetic
from tasks.interleave import PROMPT

# Shares of the skills, in rows that hold texts. Arithmetic has rows of its own.
SHARES = {"interleave": 0.30, "copy": 0.08, "lists": 0.18, "turns": 0.39, "language": 0.05}

# Share of texts that contain altered words, and the share of their places that do.
ALTERED = 0.5
ALTER = 0.15

# The words of a family, and the most families that one text is made of.
FAMILY = 24
MAX_FAMILIES = 8

# The share of strange words in a strange text lies between these two.
SHARE = (0.2, 1.0)

# How many pieces the words of a family have, and how often the pieces are of each kind.
PIECES = {1: 8, 2: 3, 3: 3, 4: 1, 5: 1}
KINDS = {"script": 5, "code": 4, "run": 2, "word": 4, "marks": 3}

# Characters of ASCII without the space.
PRINTABLE = string.digits + string.ascii_letters + string.punctuation

# Share of texts in which one to five words come back at many places, and the share of places.
SALTED = 0.4
SALT = 0.25

# Share of texts in which phrases come back, and how often, as a share of the words.
ECHOED = 0.5
ECHO = 0.06

# How many invented words, altered words and families of strange words there are to choose from.
ODD_WORDS = 20_000
ALTERED_WORDS = 40_000
FAMILIES = 3000

# What invented words are made of.
SYMBOLS = string.digits + string.punctuation
LETTERS = string.ascii_lowercase * 8 + "àâäçèéêëîïñóôöúüß"
ENDINGS = [*',.;:!?)"', "", "", "'s", '."', ',"', "-", "ed", "s"]

# `chr(RAW + b)` stands for the byte b. These characters are for private use, so no text has them.
RAW = 0xE000

# Words of each text in the longest interleavings.
MAX_INTERLEAVED = 100

# Texts of up to MAX_CAREFUL words may be interleaved carefully: without the habit, and almost
# without mistakes. A share CAREFUL of them is.
MAX_CAREFUL = 10
CAREFUL = 0.31

# The habit: the probability of keeping the turn after a short word or a comma.
CLINGS = 0.95

# The probability of any other mistake at each word, in careless and in careful interleavings, and
# the relative frequencies of its kinds.
SLIPS = 0.2
CAREFUL_SLIPS = 0.002
SLIP_KINDS = {"skip": 2, "stutter": 2, "turn": 3, "run on": 2, "stop": 2}

# Words of A and of B in a turn. Turns of one word each are left out: that is interleaving. Short
# turns are drawn more often, because they are harder.
TURNS = {
    (from_a, from_b): (from_a + from_b) ** -1.5
    for from_a in range(1, 9)
    for from_b in range(1, 9)
    if (from_a, from_b) != (1, 1) and (min(from_a, from_b) <= 2 or from_a == from_b)
}

# The instructions on lists of words: the prompt, and a function from A and B to the answer.
LISTS: dict[str, tuple[str, Callable[[list, list], list]]] = {
    "a only": ("Copy text A and leave out B.\nA: {a}\nB: {b}", lambda a, b: a),
    "b only": ("Copy text B and leave out A.\nA: {a}\nB: {b}", lambda a, b: b),
    "a then b": ("Copy A, then B.\nA: {a}\nB: {b}", lambda a, b: [*a, *b]),
    "b then a": ("Copy B, then A.\nA: {a}\nB: {b}", lambda a, b: [*b, *a]),
    "double": ("Write each word of A twice.\nA: {a}", lambda a, b: [w for w in a for _ in "12"]),
    "second": ("Write every second word of A.\nA: {a}", lambda a, b: a[1::2]),
    "weave": (
        "After each word of A, write the word X.\nX: {b}\nA: {a}",
        lambda a, b: [word for w in a for word in (w, b[0])],
    ),
    "weave before": (
        "Before each word of A, write the word X.\nX: {b}\nA: {a}",
        lambda a, b: [word for w in a for word in (b[0], w)],
    ),
    "garland": (
        "After each word of A, write the next word of X, and X from its start again when it is "
        "done.\nX: {b}\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a) for word in (w, b[i % len(b)])],
    ),
    "number": (
        "Write the words of A, each after its number.\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a, 1) for word in (str(i), w)],
    ),
    "from": ("Copy A from the word X on.\nX: {b}\nA: {a}", lambda a, b: a[a.index(b[0]) :]),
}

# How often an instruction is drawn. The garland is the nearest to interleaving two texts.
LIST_CHOICES = [*sorted(LISTS), *["garland"] * 6]

# The families and levels of the arithmetic, and their shares.
SUMS = {
    ("chain", 1): 0.15,
    ("chain", 2): 0.5,
    ("chain", 3): 0.15,
    ("product", 21): 0.1,
    ("product", 22): 0.05,
    ("product", 31): 0.05,
}
SUM_TASKS = {name: Arithmetic(name) for name in ("chain", "product")}

# Share of the arithmetic that has a hasty answer, see `arithmetic`.
HASTY = 0.55

# A lesson: the prompt and the answer. Without a prompt it is plain text to be continued.
Lesson = tuple[str | None, str]


class Words:
    """A supply of word sequences; `pieces` are tokens of which some words are invented.

    Of texts that are drawn while it `is_strange` a fifth of the words or more are strange.
    """

    def __init__(self, rng: random.Random, pieces: Sequence[str]):
        self.rng = rng
        self.texts = [document.words for document in documents_of("train", load_corpus())]
        self.vocabulary = sorted({word for words in self.texts for word in words})
        self.odd = [self._odd_word(pieces) for _ in range(ODD_WORDS)]
        self.altered = [altered(rng.choice(self.vocabulary), rng) for _ in range(ALTERED_WORDS)]

        self.is_strange = False
        parts = [*self.vocabulary, *self.odd[: len(self.vocabulary)]]
        self.families = [family(parts, rng) for _ in range(FAMILIES)]

    def _odd_word(self, pieces: Sequence[str]) -> str:
        """Return an invented word: symbols, some `pieces`, or random letters."""
        rng = self.rng
        if rng.random() < 0.15:
            return "".join(rng.choices(SYMBOLS, k=rng.choice([1, 1, 2, 3, 4])))

        if pieces and rng.random() < 0.6:
            word = "".join(rng.choices(pieces, k=rng.choice([1, 1, 2, 2, 3, 4])))
        else:
            word = "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))
        if rng.random() < 0.15:
            word = word.capitalize()
        return word + rng.choice(",.;:!?") if rng.random() < 0.15 else word

    def passage(self, n: int) -> list[str]:
        """Return `n` consecutive words of a training document; of several, if it is too short."""
        words: list[str] = []
        while len(words) < n:
            text = self.rng.choice(self.texts)
            start = self.rng.randrange(max(1, len(text) - (n - len(words)) + 1))
            words.extend(text[start : start + n - len(words)])
        return words

    def draw(self, n: int) -> list[str]:
        """Return `n` words: a passage; or a few different words again and again, as frequent as in
        Zipf's law, many of them almost alike; or a passage with numbers; or words of the corpus and
        invented words in random order.
        """
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return self.passage(n)
        if kind < 0.65:
            few = self.alike(log_uniform(2, max(3, n), rng), 0.3 * rng.random())
            frequencies = [1 / rank for rank in range(1, len(few) + 1)]
            return rng.choices(few, frequencies, k=n)
        if kind < 0.7:
            share, most = rng.choice([0.2, 0.6, 1.0]), rng.choice([9, 20, 99, 2000])
            mark = rng.choice(["", ",", ".", ":"])
            return _replaced(self.passage(n), share, lambda: f"{rng.randint(0, most)}{mark}", rng)

        # The share of invented words: none, all, or anything between.
        odd = 0.0 if kind < 0.75 else 1.0 if kind > 0.93 else rng.random()
        return [rng.choice(self.odd if rng.random() < odd else self.vocabulary) for _ in range(n)]

    def alike(self, count: int, share: float) -> list[str]:
        """Return `count` words, of which about a `share` are altered copies of earlier ones."""
        words: list[str] = []
        for _ in range(count):
            again = words and self.rng.random() < share
            words.append(altered(self.rng.choice(words), self.rng) if again else self.passage(1)[0])
        return words

    def texts_of(self, *sizes: int) -> list[list[str]]:
        """Return a text of each of these sizes, in words.

        Neither a word nor a few words in a row tell which place of the text they stand at.
        """
        rng = self.rng
        texts = [self.draw(n) for n in sizes]
        if self.is_strange:
            texts = [mingled(text, self.families, rng) for text in texts]
        if rng.random() < ALTERED:
            texts = [
                _replaced(text, ALTER, lambda: rng.choice(self.altered), rng) for text in texts
            ]
        if rng.random() < SALTED:
            salt = self.alike(rng.randint(1, 5), 0.4)
            texts = [_replaced(text, SALT, lambda: rng.choice(salt), rng) for text in texts]
        if rng.random() < ECHOED:
            texts = [_echoing(text, rng) for text in texts]
        return texts


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Return an integer from `low` to `high`; every order of magnitude is equally likely."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def family(parts: Sequence[str], rng: random.Random) -> list[str]:
    """Return `FAMILY` words that look alike: sequences of the same kinds of pieces.

    `parts` are the words that some pieces are.
    """
    (count,) = rng.choices(list(PIECES), list(PIECES.values()))
    pieces = [_piece(parts, rng) for _ in range(count)]
    return ["".join(make() for make in pieces) for _ in range(FAMILY)]


def _piece(parts: Sequence[str], rng: random.Random) -> Callable[[], str]:
    """Return a function that draws a piece of a word, each time from the same stock."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    if kind == "word":
        cases: list[Callable[[str], str]] = [str, str, str.upper, str.upper, str.title]
        change = rng.choice(cases)
        return lambda: change(rng.choice(parts))

    if kind == "run":  # one or two characters by turns, up to 32 times
        unit = "".join(rng.choices(string.punctuation, k=rng.choice([1, 1, 2])))
        return lambda: unit * log_uniform(1, 32, rng)

    if kind == "marks":  # often always the same
        stock = [
            "".join(rng.choices(string.punctuation, k=rng.choice([1, 1, 2, 3])))
            for _ in range(rng.choice([1, 1, 2, 6]))
        ]
        return lambda: rng.choice(stock)

    alphabets = [string.digits, string.digits, string.hexdigits, PRINTABLE, PRINTABLE]
    alphabet = raw_letters(rng) if kind == "script" else rng.choice(alphabets)
    stock = rng.sample(alphabet, log_uniform(2, min(60, len(alphabet)), rng))
    longest = log_uniform(2, 10 if kind == "script" else 24, rng)
    return lambda: "".join(rng.choices(stock, k=log_uniform(1, longest, rng)))


def mingled(
    plain: Sequence[str], families: Sequence[Sequence[str]], rng: random.Random
) -> list[str]:
    """Return the words `plain`, a share of them replaced by words of a few `families`."""
    chosen = rng.choices(families, k=log_uniform(1, MAX_FAMILIES, rng))
    stock = [word for words in chosen for word in words]
    replaced = rng.uniform(*SHARE)
    return [rng.choice(stock) if rng.random() < replaced else word for word in plain]


def raw_letters(rng: random.Random) -> list[str]:
    """Return the letters of a made-up script.

    In UTF-8 the letters of a script have a last byte of their own, after one to three bytes that
    many letters share. Here these bytes are random.
    """
    shared = rng.choice([1, 1, 2, 2, 3])
    beginnings = [
        raw([rng.randrange(0xC2, 0xF5), *rng.choices(range(0x80, 0xC0), k=shared - 1)])
        for _ in range(log_uniform(1, 40, rng))
    ]
    return [rng.choice(beginnings) + raw([rng.randrange(0x80, 0xC0)]) for _ in range(60)]


def raw(values: Sequence[int]) -> str:
    """Return the characters that stand for these bytes."""
    return "".join(chr(RAW + value) for value in values)


def altered(word: str, rng: random.Random) -> str:
    """Return `word` with another ending or case, or one letter changed, dropped or inserted."""
    kind = rng.choice(["ending", "ending", "capital", "change", "drop", "insert"])
    place = rng.randrange(len(word))
    if kind == "ending":
        return (word.rstrip(string.punctuation) or word) + rng.choice(ENDINGS)
    if kind == "capital":
        return word.lower() if word != word.lower() else word.capitalize()
    if kind == "drop" and len(word) > 1:
        return word[:place] + word[place + 1 :]
    return word[:place] + rng.choice(LETTERS) + word[place + (kind == "change") :]


def _replaced(
    text: list[str], share: float, draw: Callable[[], str], rng: random.Random
) -> list[str]:
    """Return the text with a share of its words replaced."""
    return [draw() if rng.random() < share else word for word in text]


def _echoing(text: list[str], rng: random.Random) -> list[str]:
    """Return the text with one to three of its phrases, of two to six words each, copied over
    other places of it.
    """
    text = list(text)
    phrases = []
    for length in [rng.randint(2, 6) for _ in range(rng.randint(1, 3))]:
        if length < len(text):
            start = rng.randrange(len(text) - length)
            phrases.append(text[start : start + length])

    for _ in range(math.ceil(ECHO * len(text)) if phrases else 0):
        phrase = rng.choice(phrases)
        start = rng.randrange(len(text) - len(phrase) + 1)
        text[start : start + len(phrase)] = phrase
    return text


def lesson(skill: str, size: int, words: Words) -> Lesson:
    """Return a lesson in one of SHARES or "arithmetic", whose texts have about `size` words."""
    if skill == "language":
        return None, " ".join(words.passage(max(8, size)))
    if skill == "copy":
        (a,) = words.texts_of(max(2, size // 2))
        return f"Copy text A.\nA: {' '.join(a)}", " ".join(a)
    if skill == "arithmetic":
        return arithmetic(words.rng)
    return {"interleave": interleave, "lists": lists, "turns": turns}[skill](size, words)


def interleave(size: int, words: Words) -> Lesson:
    """Return a lesson in interleaving, shown by the careless demonstrator.

    In half of the lessons some words of B equal the word of A at the same place: "a a" does not
    tell whose turn it is.
    """
    rng = words.rng
    is_short = size <= 2 * MAX_CAREFUL
    n = rng.randint(2, MAX_CAREFUL) if is_short else min(size // 3, MAX_INTERLEAVED)

    a, b = words.texts_of(n, n)
    if rng.random() < 0.5:
        equal = rng.uniform(0.05, 0.5)
        b = [from_a if rng.random() < equal else from_b for from_a, from_b in zip(a, b)]

    prompt = PROMPT.format(a=" ".join(a), b=" ".join(b))
    return prompt, " ".join(careless_interleaving(a, b, rng))


def careless_interleaving(a: Sequence[str], b: Sequence[str], rng: random.Random) -> list[str]:
    """Interleave `a` and `b` word by word, with the mistakes of somebody who loses turns.

    After a word of at most three letters, or a comma, the demonstrator clings to the turn. At any
    word it may skip it, write it twice, lose the turn, run on to the end of the text, or stop.
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


def lists(size: int, words: Words) -> Lesson:
    """Return a lesson in one of the instructions of `LISTS`."""
    rng = words.rng
    kind = rng.choice(LIST_CHOICES)
    prompt, answer = LISTS[kind]

    # Texts that stand in prompt and answer take more of the size.
    n = max(2, size // (4 if kind in ("a then b", "b then a") else 3))
    a, b = words.texts_of(n, max(2, int(n * rng.uniform(0.7, 1.3))))
    if kind == "garland":
        b = b[: log_uniform(2, max(9, n // 2), rng)]
    elif kind == "from":
        b = [rng.choice(a)]
    elif "B: " not in prompt:
        b = b[:1]
    return prompt.format(a=" ".join(a), b=" ".join(b)), " ".join(answer(a, b))


def turns(size: int, words: Words) -> Lesson:
    """Return a lesson in keeping two places: some words of A, some of B, and so on.

    It is always right, and never word by word.
    """
    rng = words.rng
    (strides,) = rng.choices(list(TURNS), list(TURNS.values()))
    rounds = max(2, size // (2 * sum(strides)))
    texts = words.texts_of(*(rounds * stride - rng.randrange(stride) for stride in strides))

    counts = [f"{n} word{'s' * (n > 1)} of {name}" for n, name in zip(strides, "AB")]
    a, b = map(" ".join, texts)
    written = [
        word
        for i in range(rounds)
        for text, n in zip(texts, strides)
        for word in text[i * n : (i + 1) * n]
    ]
    prompt = f"Take turns: {', then '.join(counts)}, until both are done.\nA: {a}\nB: {b}"
    return prompt, " ".join(written)


def arithmetic(rng: random.Random) -> Lesson:
    """Return a short chain or product of the training split, answered without working.

    Chains of four steps and products of three by two digits are left for training. A share `HASTY`
    of the answers stops one step early, or is too small by ten.
    """
    name, level = rng.choices(list(SUMS), list(SUMS.values()))[0]
    problem = SUM_TASKS[name].make(level, "train", rng)
    values = problem.data["values"]
    answer = values[-1]
    if rng.random() < HASTY:
        answer = values[-2] if len(values) > 1 else values[-1] - 10
    return problem.prompt, str(answer)

"""How the embedded model was made: `python -m grpo.tasks.make --output data/base_model`.

It is a small Llama with a byte-level BPE, made in minutes on one GPU from the *training* split of
our own corpus and from generated texts: lessons in language, copying, lists, turns, interleaving
and arithmetic. A row of tokens holds one lesson. All rows of a batch have the same length, and all
batches about the same number of tokens.

Many texts are made hard to guess, so that the model must read them and keep its place: few
different words, words that are almost alike, words and phrases that come back.

Strange texts widen what the model can copy, without any kind of text that is held out. Their words
come in families. Those of one family look alike, because they are the same sequence of pieces, each
from one small stock of characters or words, so they must be read to be told apart. Letters are of
made-up scripts, of random bytes, so every byte token is learned and no alphabet is shown.

Interleaving is shown by a careless demonstrator, whose mistakes become habits of the model, which
reinforcement learning then has to correct.

Shapes: R rows, T tokens of a row.
"""

import argparse
import math
import multiprocessing
import random
import string
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo.data.corpus import documents_of, load_corpus
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.interleave import PROMPT

# ---- words

SYMBOLS = string.digits + string.punctuation
LETTERS = string.ascii_lowercase * 8 + "àâäçèéêëîïñóôöúüß"
ENDINGS = [*',.;:!?)"', "", "", "'s", '."', ',"', "-", "ed", "s"]
PRINTABLE = string.digits + string.ascii_letters + string.punctuation

# How often a word of a family has so many pieces, and how often a piece is of each kind.
PIECES = {1: 8, 2: 3, 3: 3, 4: 1, 5: 1}
KINDS = {"script": 5, "code": 4, "run": 2, "word": 4, "marks": 3}

# `chr(RAW + b)` stands for the byte b. These characters are for private use, so no text has them.
RAW = 0xE000


class Words:
    """A supply of texts, strange ones while it `is_strange`. Some words are made of `pieces`."""

    def __init__(self, rng: random.Random, pieces: Sequence[str]):
        self.rng = rng
        self.texts = [document.words for document in documents_of("train", load_corpus())]
        self.vocabulary = sorted({word for words in self.texts for word in words})
        self.odd = [odd_word(pieces, rng) for _ in range(20_000)]
        self.altered = [altered(rng.choice(self.vocabulary), rng) for _ in range(40_000)]

        self.is_strange = False
        parts = [*self.vocabulary, *self.odd[: len(self.vocabulary)]]
        self.families = [family(parts, rng) for _ in range(3000)]

    def passage(self, n: int) -> list[str]:
        """Return `n` consecutive words of a training document; of several, if it is too short."""
        words: list[str] = []
        while len(words) < n:
            text = self.rng.choice(self.texts)
            start = self.rng.randrange(max(1, len(text) - (n - len(words)) + 1))
            words.extend(text[start : start + n - len(words)])
        return words

    def draw(self, n: int) -> list[str]:
        """Return `n` words of one of four kinds of text."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return self.passage(n)
        if kind < 0.65:  # a few words, many almost alike, as frequent as in Zipf's law
            few = self.alike(log_uniform(2, max(3, n), rng), 0.3 * rng.random())
            frequencies = [1 / rank for rank in range(1, len(few) + 1)]
            return rng.choices(few, frequencies, k=n)
        if kind < 0.7:  # a passage with numbers
            share, most = rng.choice([0.2, 0.6, 1.0]), rng.choice([9, 20, 99, 2000])
            mark = rng.choice(["", ",", ".", ":"])
            return replaced(self.passage(n), share, lambda: f"{rng.randint(0, most)}{mark}", rng)

        # Words in random order; none of them, all, or anything between is invented.
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
        """Return a text of each of these sizes. In many of them words are altered, and words or
        phrases come back, so that a few words do not tell which place they stand at.
        """
        rng = self.rng
        texts = [self.draw(n) for n in sizes]
        if self.is_strange:
            texts = [self.mingled(text) for text in texts]
        if rng.random() < 0.5:
            texts = [replaced(text, 0.15, lambda: rng.choice(self.altered), rng) for text in texts]
        if rng.random() < 0.4:
            salt = self.alike(rng.randint(1, 5), 0.4)
            texts = [replaced(text, 0.25, lambda: rng.choice(salt), rng) for text in texts]
        if rng.random() < 0.5:
            texts = [echoing(text, rng) for text in texts]
        return texts

    def mingled(self, plain: list[str]) -> list[str]:
        """Return the words `plain`, a share of them replaced by words of a few families."""
        rng = self.rng
        chosen = rng.choices(self.families, k=log_uniform(1, 8, rng))
        stock = [word for words in chosen for word in words]
        return replaced(plain, rng.uniform(0.2, 1.0), lambda: rng.choice(stock), rng)


def pick(shares: Mapping[Any, float], rng: random.Random) -> Any:
    """Return one of the keys of `shares`, drawn as often as they say."""
    return rng.choices(list(shares), list(shares.values()))[0]


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Return an integer from `low` to `high`; every order of magnitude is equally likely."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def replaced(
    text: list[str], share: float, draw: Callable[[], str], rng: random.Random
) -> list[str]:
    """Return the text with a share of its words replaced."""
    return [draw() if rng.random() < share else word for word in text]


def echoing(text: list[str], rng: random.Random) -> list[str]:
    """Return the text with up to three of its phrases copied over other places of it."""
    text = list(text)
    phrases = []
    for length in [rng.randint(2, 6) for _ in range(rng.randint(1, 3))]:
        if length < len(text):
            start = rng.randrange(len(text) - length)
            phrases.append(text[start : start + length])

    for _ in range(math.ceil(0.06 * len(text)) if phrases else 0):
        phrase = rng.choice(phrases)
        start = rng.randrange(len(text) - len(phrase) + 1)
        text[start : start + len(phrase)] = phrase
    return text


def odd_word(pieces: Sequence[str], rng: random.Random) -> str:
    """Return an invented word: symbols, some `pieces`, or random letters."""
    if rng.random() < 0.15:
        return "".join(rng.choices(SYMBOLS, k=rng.choice([1, 1, 2, 3, 4])))

    if pieces and rng.random() < 0.6:
        word = "".join(rng.choices(pieces, k=rng.choice([1, 1, 2, 2, 3, 4])))
    else:
        word = "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))
    if rng.random() < 0.15:
        word = word.capitalize()
    return word + rng.choice(",.;:!?") if rng.random() < 0.15 else word


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


def family(parts: Sequence[str], rng: random.Random) -> list[str]:
    """Return 24 words that look alike: sequences of the same kinds of pieces, some from `parts`."""
    pieces = [piece(parts, rng) for _ in range(pick(PIECES, rng))]
    return ["".join(make() for make in pieces) for _ in range(24)]


def piece(parts: Sequence[str], rng: random.Random) -> Callable[[], str]:
    """Return a function that draws a piece of a word, each time from the same stock."""
    kind = pick(KINDS, rng)
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


def raw_letters(rng: random.Random) -> list[str]:
    """Return the letters of a made-up script: a last byte of their own, as in UTF-8, after one to
    three bytes that many letters share.
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


# ---- lessons

# A lesson: the prompt and the answer. Without a prompt it is plain text to be continued.
Lesson = tuple[str | None, str]

# Shares of the skills, in rows that hold texts. Arithmetic has rows of its own.
SHARES = {"interleave": 0.30, "copy": 0.08, "lists": 0.18, "turns": 0.39, "language": 0.05}

# Texts of up to MAX_CAREFUL words may be interleaved carefully.
MAX_CAREFUL = 10

# The mistakes of the careless demonstrator, and how often each is made.
SLIPS = {"skip": 2, "stutter": 2, "turn": 3, "run on": 2, "stop": 2}

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
    "a then b": ("Copy A, then B.\nA: {a}\nB: {b}", lambda a, b: [*a, *b]),
    "b only": ("Copy text B and leave out A.\nA: {a}\nB: {b}", lambda a, b: b),
    "b then a": ("Copy B, then A.\nA: {a}\nB: {b}", lambda a, b: [*b, *a]),
    "double": ("Write each word of A twice.\nA: {a}", lambda a, b: [w for w in a for _ in "12"]),
    "from": ("Copy A from the word X on.\nX: {b}\nA: {a}", lambda a, b: a[a.index(b[0]) :]),
    "garland": (
        "After each word of A, write the next word of X, and X from its start again when it is "
        "done.\nX: {b}\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a) for word in (w, b[i % len(b)])],
    ),
    "number": (
        "Write the words of A, each after its number.\nA: {a}",
        lambda a, b: [word for i, w in enumerate(a, 1) for word in (str(i), w)],
    ),
    "second": ("Write every second word of A.\nA: {a}", lambda a, b: a[1::2]),
    "weave": (
        "After each word of A, write the word X.\nX: {b}\nA: {a}",
        lambda a, b: [word for w in a for word in (w, b[0])],
    ),
    "weave before": (
        "Before each word of A, write the word X.\nX: {b}\nA: {a}",
        lambda a, b: [word for w in a for word in (b[0], w)],
    ),
}

# The levels of the arithmetic (chains below 10, products above), and their shares. Chains of four
# steps and products of three by two digits are left for training.
SUMS = {1: 0.15, 2: 0.5, 3: 0.15, 21: 0.1, 22: 0.05, 31: 0.05}


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
    """Return a lesson in interleaving. In half of them some words of B equal the word of A at the
    same place: "a a" does not tell whose turn it is.
    """
    rng = words.rng
    n = rng.randint(2, MAX_CAREFUL) if size <= 2 * MAX_CAREFUL else min(size // 3, 100)
    a, b = words.texts_of(n, n)
    if rng.random() < 0.5:
        equal = rng.uniform(0.05, 0.5)
        b = [from_a if rng.random() < equal else from_b for from_a, from_b in zip(a, b)]

    prompt = PROMPT.format(a=" ".join(a), b=" ".join(b))
    return prompt, " ".join(careless_interleaving(a, b, rng))


def careless_interleaving(a: Sequence[str], b: Sequence[str], rng: random.Random) -> list[str]:
    """Interleave `a` and `b` word by word, with the mistakes of somebody who loses turns.

    The habit is to cling to the turn after a word of at most three letters, or a comma. Some short
    texts are interleaved carefully, without the habit and almost without slips.
    """
    careful = rng.random() < 0.31 and max(len(a), len(b)) <= MAX_CAREFUL
    habit, slips = (0.0, 0.002) if careful else (0.95, 0.2)

    texts = (a, b)
    place = [0, 0]  # the next word of each text
    turn = 0
    written: list[str] = []
    while place[0] < len(a) or place[1] < len(b):
        if place[turn] >= len(texts[turn]):
            turn = 1 - turn
        word = texts[turn][place[turn]]
        place[turn] += 1

        slip = rng.random() < slips and pick(SLIPS, rng)
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
    kind = rng.choice([*LISTS, *["garland"] * 6])  # the nearest to interleaving two texts
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
    """Return a lesson in keeping two places: some words of A, some of B, never word by word."""
    rng = words.rng
    strides = pick(TURNS, rng)
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
    """Return a sum of the training split. More than half of the answers are hasty: they stop one
    step early, or are too small by ten.
    """
    level = pick(SUMS, rng)
    problem = Arithmetic("chain" if level < 10 else "product").make(level, "train", rng)
    values = problem.data["values"]
    answer = values[-1]
    if rng.random() < 0.55:
        answer = values[-2] if len(values) > 1 else values[-1] - 10
    return problem.prompt, str(answer)


# ---- tokens

VOCABULARY = 4096
SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, USER, ASSISTANT, END = range(4)
CHAT = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# The pieces that are split into tokens. The pattern is that of GPT-2, except that every digit is a
# piece of its own.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The lengths of rows in tokens, and their shares of the batches. Rows of the shortest length hold
# arithmetic, and no other rows do. Rows longer than LONG are filled, and rarely hold interleavings.
LENGTHS = {48: 0.15, 160: 0.19, 320: 0.16, 640: 0.16, 1280: 0.16, 3328: 0.18}
SHORTEST = min(LENGTHS)
LONG = 160

# The shares of interleavings in long rows and of strange lessons, by the length of the row. Strange
# ones have more tokens a word than others.
INTERLEAVED = {320: 0.15, 640: 0.15, 1280: 0.0, 3328: 0.0}
STRANGE = {160: 0.3, 320: 0.3, 640: 0.3, 1280: 0.15, 3328: 0.0}

# Of plain and of strange lessons: the least share of a long row that one fills, and the least and
# the largest number of its words, as shares of the row's tokens.
SIZES = {False: (0.75, 1 / 3.5, 1 / 1.4), True: (0.5, 1 / 25, 1 / 3)}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer, trained on the training documents, prompts of each skill, and runs.

    Every text gets a space in front, so a word has the same tokens wherever it stands.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Prepend(" ")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()

    words = Words(random.Random(0), [])
    skills = (*SHARES, "arithmetic")
    prompts = [lesson(skill, 20, words)[0] or "" for skill in skills for _ in range(200)]

    # Runs of one mark become tokens, as in the vocabularies of larger models, so that a run is a
    # few tokens to copy instead of many to count. Each is shown 60 times, which decides against how
    # many words it takes a token.
    runs = [f"{mark * length} " * 60 for mark in string.punctuation for length in (2, 4, 8, 16)]
    texts = [document.text for document in documents_of("train", load_corpus())]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts + prompts + runs, trainer)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


class Batches:
    """A supply of batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int):
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self._encoded = cache(self._tokens_of)
        self.rng = random.Random(seed)
        ids = range(len(SPECIAL) + 256, len(tokenizer))
        pieces = [str(tokenizer.decode([i])).strip() for i in ids]
        self.words = Words(self.rng, [piece for piece in pieces if piece.isalpha()])
        vocabulary = tokenizer.get_vocab()
        self.bytes = {byte: vocabulary[token] for byte, token in bytes_to_unicode().items()}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, word by word: this tokenizer never joins words or lines."""
        words = text.replace("\n", " \n").split(" ")
        return [token for word in words for token in self._encoded(word)]

    def _tokens_of(self, word: str) -> list[int]:
        """Return the tokens of a word, whose line break may stand in front of it."""
        if any(RAW <= ord(character) < RAW + 256 for character in word):
            return [self.bytes[ord(character) % RAW] for character in f" {word}"]

        ids: list[int] = self.tokenizer(word, add_special_tokens=False).input_ids

        # Within a text no space stands before a line break, as the tokenizer puts one here.
        if word.startswith("\n") and self.tokenizer.decode(ids[:1]) == " ":
            return ids[1:]
        return ids

    def row(self, length: int) -> tuple[list[int], int]:
        """Return the tokens of a lesson of at most `length`, and where learning starts: after the
        prompt. Long rows are filled, except by interleavings, whose size is bounded.
        """
        is_long = length > LONG
        skill = "arithmetic"
        if length > SHORTEST:
            shares = SHARES | {"interleave": INTERLEAVED[length]} if is_long else SHARES
            skill = pick(shares, self.rng)

        is_strange = self.rng.random() < STRANGE.get(length, 0.0) and skill != "language"
        self.words.is_strange = is_strange
        fill, low, high = SIZES[is_strange]
        least = fill * length if is_long and skill != "interleave" else 0

        # How many tokens a lesson has is known only afterwards, so sizes are tried until one fits.
        while True:
            size = log_uniform(int(low * length) if is_long else 4, int(high * length), self.rng)
            prompt, answer = lesson(skill, size, self.words)
            head = [] if prompt is None else [USER, *self.encode(prompt), END, ASSISTANT]
            tokens = [*head, *self.encode(answer), END]
            if least <= len(tokens) <= length:
                return tokens, len(head)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a batch, int16 (R, T), and which of them are learned."""
        length = pick(LENGTHS, self.rng)
        rows = self.batch_tokens // length
        tokens = np.zeros((rows, length), np.int16)
        learned = np.zeros((rows, length), bool)
        for row in range(rows):
            ids, start = self.row(length)
            tokens[row, : len(ids)] = ids
            learned[row, start : len(ids)] = True
        learned[:, 0] = False  # nothing predicts the first token
        return tokens, learned

    def serve(self, queue: Any) -> None:
        """Fill the queue with batches for ever, in a process of its own."""
        while True:
            queue.put(self.batch())


# ---- training

# The model, by the names of `LlamaConfig`.
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
BATCH_TOKENS = 65_536  # of an optimizer step
RATE = 2e-3  # the learning rate
WARMUP = 100  # steps over which the learning rate rises linearly
DECAY = 0.4  # the share of the training, at its end, over which it falls linearly to zero


def train(output: Path, steps: int, workers: int, seed: int) -> None:
    """Pretrain for `steps`; write the model and its tokenizer to `output`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(VOCABULARY)

    # The processes that make batches must be forked before torch computes anything.
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue(maxsize=32)
    for worker in range(workers):
        batches = Batches(tokenizer, seed * 1000 + worker + 1, BATCH_TOKENS)
        fork.Process(target=batches.serve, args=(queue,), daemon=True).start()

    ends: dict[str, Any] = dict(bos_token_id=None, pad_token_id=PAD, eos_token_id=END)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ends, **SHAPE))
    model.to(torch.device(device))  # type: ignore[arg-type]  # wrapped without its types

    # Muon (https://kellerjordan.github.io/posts/muon/) updates the matrices between hidden states,
    # AdamW the embedding and the norms.
    named = list(model.named_parameters())
    matrices = [each for name, each in named if each.ndim == 2 and "embed" not in name]
    rest = [each for name, each in named if each.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for layer in model.model.layers if device == "cuda" else ():
        layer.compile(dynamic=False)

    begun = time.time()
    for step in range(steps):
        factor = min(1.0, (step + 1) / WARMUP, (1 - step / steps) / DECAY)
        tokens_RT, learned_RT = (torch.from_numpy(each).to(device) for each in queue.get())
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            # The tokens that are not learned are context: -100 leaves them out of the loss.
            targets_RT = tokens_RT.long().masked_fill(~learned_RT, -100)
            loss = model(tokens_RT.long(), labels=targets_RT, use_cache=False).loss
        loss.backward()

        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * factor
            optimizer.step()
        if step % 1000 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - begun:.0f} s", flush=True)

    model.to(torch.bfloat16)  # type: ignore[arg-type]  # wrapped without its types
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m grpo.tasks.make", description="Make the embedded model."
    )
    parser.add_argument("--output", type=Path, default="data/base_model")
    parser.add_argument("--steps", type=int, default=28_167, help="optimizer steps")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

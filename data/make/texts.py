"""The texts of the lessons: sequences of words from the training documents, and of invented words.

Many texts are made hard to guess, so that the model must read them and keep its place: few
different words, words that are almost alike, words and phrases that come back again and again.
Strange texts (see `data.strange`) have made-up scripts: words of random bytes with the structure of
UTF-8. So every byte token is learned, and no alphabet is shown.
"""

import math
import random
import string
from collections.abc import Sequence

from data.corpus import documents_of, load_corpus
from data.strange import Maker, family, log_uniform, mingled, words_of

# Share of texts that contain altered words, and the share of their places that do.
ALTERED = 0.5
ALTER = 0.15

# Share of texts in which one to five words come back at many places, and the share of places.
SALTED = 0.4
SALT = 0.25

# Share of texts in which phrases come back, and how often, as a share of the words.
ECHOED = 0.5
ECHO = 0.06

# How many invented and how many altered words there are to choose from.
ODD_WORDS = 20_000
ALTERED_WORDS = 40_000

# What invented words are made of.
SYMBOLS = string.digits + string.punctuation
LETTERS = string.ascii_lowercase * 8 + "àâäçèéêëîïñóôöúüß"
ENDINGS = [*',.;:!?)"', "", "", "'s", '."', ',"', "-", "ed", "s"]

# `chr(RAW + b)` stands for the byte b. These characters are for private use, so no text has them.
RAW = 0xE000

# The kinds of strange words in the lessons.
LESSON_KINDS = ("script", "code", "run", "compound")

# How many families of words there are to choose from.
FAMILIES = 3000


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


class Words:
    """A supply of word sequences; `pieces` are tokens of which some words are invented."""

    def __init__(self, rng: random.Random, pieces: Sequence[str]):
        self.rng = rng
        self.texts = [document.words for document in documents_of("train", load_corpus())]
        self.vocabulary = sorted({word for words in self.texts for word in words})
        self.odd = [self._odd_word(pieces) for _ in range(ODD_WORDS)]
        self.altered = [altered(rng.choice(self.vocabulary), rng) for _ in range(ALTERED_WORDS)]

    def _odd_word(self, pieces: Sequence[str]) -> str:
        """Return an invented word: symbols, some `pieces`, or random letters."""
        if self.rng.random() < 0.15:
            return "".join(self.rng.choices(SYMBOLS, k=self.rng.choice([1, 1, 2, 3, 4])))

        if pieces and self.rng.random() < 0.6:
            word = "".join(self.rng.choices(pieces, k=self.rng.choice([1, 1, 2, 2, 3, 4])))
        else:
            word = "".join(self.rng.choices(LETTERS, k=self.rng.randint(1, 9)))
        if self.rng.random() < 0.15:
            word = word.capitalize()
        if self.rng.random() < 0.15:
            word += self.rng.choice(",.;:!?")
        return word

    def passage(self, n: int) -> list[str]:
        """Return `n` consecutive words of a training document; of several, if it is too short."""
        words: list[str] = []
        while len(words) < n:
            text = self.rng.choice(self.texts)
            start = self.rng.randrange(max(1, len(text) - (n - len(words)) + 1))
            words.extend(text[start : start + n - len(words)])
        return words

    def draw(self, n: int) -> list[str]:
        """Return `n` words.

        They are a passage; or a few different words again and again, as frequent as in Zipf's law,
        many of them almost alike; or a passage with numbers; or words of the corpus and invented
        words in random order.
        """
        kind = self.rng.random()
        if kind < 0.3:
            return self.passage(n)
        if kind < 0.65:
            few = self.alike(log_uniform(2, max(3, n), self.rng), 0.3 * self.rng.random())
            frequencies = [1 / rank for rank in range(1, len(few) + 1)]
            return self.rng.choices(few, frequencies, k=n)
        if kind < 0.7:
            return self.numbers(n)

        # The share of invented words: none, all, or anything between.
        odd = 0.0 if kind < 0.75 else 1.0 if kind > 0.93 else self.rng.random()
        return [
            self.rng.choice(self.odd if self.rng.random() < odd else self.vocabulary)
            for _ in range(n)
        ]

    def numbers(self, n: int) -> list[str]:
        """Return a passage of `n` words, some of them replaced by numbers.

        The numbers have up to one, two or four digits, and the same punctuation mark after each.
        """
        share = self.rng.choice([0.2, 0.6, 1.0])
        most = self.rng.choice([9, 20, 99, 2000])
        mark = self.rng.choice(["", ",", ".", ":"])
        return [
            f"{self.rng.randint(0, most)}{mark}" if self.rng.random() < share else word
            for word in self.passage(n)
        ]

    def alike(self, count: int, share: float) -> list[str]:
        """Return `count` words, of which about a `share` are altered copies of earlier ones."""
        words: list[str] = []
        for _ in range(count):
            again = words and self.rng.random() < share
            words.append(altered(self.rng.choice(words), self.rng) if again else self.passage(1)[0])
        return words

    def texts_of(self, *sizes: int) -> list[list[str]]:
        """Return a text of each of these sizes, in words.

        In a share `ALTERED` of cases some words are replaced by altered words of the corpus. In a
        share `SALTED` the texts share one to five words, which stand at a share `SALT` of all
        places. In a share `ECHOED` whole phrases come back. So neither a word nor a few words in a
        row tell which place of the text they stand at.
        """
        rng = self.rng
        texts = [self.draw(n) for n in sizes]
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
        """Return the text with some of its phrases copied over other places of it.

        There are one to three phrases, of two to six words each.
        """
        rng = self.rng
        text = list(text)
        lengths = [rng.randint(2, 6) for _ in range(rng.randint(1, 3))]
        phrases = []
        for length in lengths:
            if length < len(text):
                start = rng.randrange(len(text) - length)
                phrases.append(text[start : start + length])

        for _ in range(math.ceil(ECHO * len(text)) if phrases else 0):
            phrase = rng.choice(phrases)
            start = rng.randrange(len(text) - len(phrase) + 1)
            text[start : start + len(phrase)] = phrase
        return text


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

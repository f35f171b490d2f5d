"""Text to words: the only definition of "word" in the project.

A word is a maximal run of non-whitespace characters of the text in Unicode normalisation form C,
so that the same word written with composed or with combining characters is one word. Punctuation
belongs to the word it touches.
"""

import re
import unicodedata
from typing import NamedTuple

_WORD = re.compile(r"\S+")


class Word(NamedTuple):
    """One word with its span: `normalise(text)[start:end] == text_of_word`."""

    text: str
    start: int
    end: int


def normalise(text: str) -> str:
    """Return `text` in Unicode normalisation form C (Unicode Standard Annex 15)."""
    return unicodedata.normalize("NFC", text)


def split_words(text: str) -> list[str]:
    """Return the words of `text`, in order.

    >>> split_words(" The  owl,\\nit seems. ")
    ['The', 'owl,', 'it', 'seems.']
    """
    return _WORD.findall(normalise(text))


def word_ends(text: str) -> list[int]:
    """Return where each of the words `split_words(text)` ends in `text` itself, in characters:
    normalisation joins and parts no words.

    >>> word_ends(" The  owl,")
    [4, 10]
    """
    return [match.end() for match in _WORD.finditer(text)]


def word_spans(text: str) -> list[Word]:
    """Return the words of `text` with their spans in `normalise(text)`, in characters."""
    return [Word(match.group(), *match.span()) for match in _WORD.finditer(normalise(text))]

"""The definition of "word" that the whole project uses.

A word is a maximal run of non-whitespace characters, after the text was put into Unicode
normalisation form C. So a word is the same whether its accents are composed or combining
characters. Punctuation is part of the word that it touches.
"""

import re
import unicodedata

_WORD = re.compile(r"\S+")


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
    """Return the offset in `text` (in characters) at which each word of `split_words(text)` ends.

    The offsets refer to the text before normalisation, which never joins or splits words.

    >>> word_ends(" The  owl,")
    [4, 10]
    """
    return [match.end() for match in _WORD.finditer(text)]

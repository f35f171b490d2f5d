"""What a word is: whitespace, normalisation, ends."""

import unicodedata

from hypothesis import example, given
from hypothesis import strategies as st

from align.words import normalise, split_words, word_ends

# Letters with combining marks, a Hangul syllable in parts, whitespace of every kind and a blank
# that is none.
AWKWARD = "aeé\u0301\u0327ﬁ\u1112\u1161., \t\n\r\u00a0\u2003\u3000\x1f\u200b"
TEXTS = st.text(AWKWARD, max_size=20) | st.text()


def test_punctuation_belongs_to_the_word_it_touches():
    assert split_words(" The  owl,\nit seems. ") == ["The", "owl,", "it", "seems."]


def test_no_words():
    assert split_words("") == split_words(" \t\n\u00a0\u3000") == word_ends("  ") == []


def test_composed_and_combining_characters_are_one_word():
    assert split_words("cafe\u0301") == split_words("caf\u00e9") == ["caf\u00e9"]


def test_compatibility_characters_stay():
    assert split_words("ﬁn") == ["ﬁn"]  # form C, not KC, which would make it "fin"


@given(TEXTS)
@example("a\x1fb")
def test_words_are_what_python_splits(text):
    assert split_words(text) == unicodedata.normalize("NFC", text).split()


@given(TEXTS)
def test_words_survive_joining(text):
    words = split_words(text)
    assert split_words(" ".join(words)) == words


@given(TEXTS)
@example(
    "\u2000e\u0301 \u0301x"
)  # an en quad, which normalises to another space; a mark on a space
def test_ends_are_in_the_text_as_it_is(text):
    ends, words = word_ends(text), split_words(text)
    assert [
        normalise(piece).strip() for piece in map(text.__getitem__, map(slice, [0, *ends], ends))
    ] == words

"""Strange texts: the same each time, valid text, and nothing of the kinds that are held out."""

import hashlib
import random
import unicodedata
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from align.words import normalise
from data import strange
from data.corpus import documents_of, load_corpus, load_foreign


def test_documents_are_the_same_each_time_and_as_long_as_asked():
    found = strange.documents(3, 50)
    assert found == strange.documents(5, 50)[:3] != strange.documents(3, 50, seed=1)
    assert [len(document.words) for document in found] == [50] * 3
    assert all(normalise(document.text) == document.text for document in found)


def test_the_documents_never_change():
    texts = "\0".join(document.text for document in strange.documents(3, 300))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("10863318d18241c6")


def test_frequent_words_follow_zipfs_law():
    counts = Counter(strange.repeated("abcdefgh", 1.0))
    assert [counts[letter] for letter in "abcdefgh"] == [24, 12, 8, 6, 5, 4, 4, 3]
    assert set(Counter(strange.repeated("abcdefgh", 0.0)).values()) == {strange.FAMILY}


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_words_of_a_family_are_printable_and_hold_no_space(seed):
    words = strange.family(["owl", "Moon,"], random.Random(seed))
    assert len(words) == strange.FAMILY
    for word in words:
        assert word and word.isprintable() and not any(mark.isspace() for mark in word)
        assert normalise(word) == word


def test_no_held_out_alphabet_has_a_letter_here():
    texts = [document.text for document in load_foreign()["alphabets"]]
    held_out = {letter for text in texts for letter in text if letter.isalpha()}
    names = {unicodedata.name(letter).split()[0] for letter in held_out}
    shown = {chr(code) for first, last in strange.SCRIPTS.values() for code in range(first, last)}
    shown = {letter for letter in shown if letter.isprintable()}
    assert not shown & held_out
    assert not {unicodedata.name(letter).split()[0] for letter in shown} & names


def test_no_held_out_text_is_shown():
    """No three words in a row are those of a foreign text, except by prose or marks alone."""
    prose = {word for document in documents_of("train", load_corpus()) for word in document.words}

    def runs_of(words):
        return {run for run in zip(*(words[i:] for i in range(3))) if not set(run) <= prose}

    shown = set().union(*(runs_of(document.words) for document in strange.documents(60, 600)))
    for kind, found in load_foreign().items():
        assert not any(runs_of(document.words) & shown for document in found), kind


def test_the_program_writes_documents(tmp_path, capsys):
    folder = tmp_path / "texts"
    assert strange.main([str(folder), "--documents", "2", "--words", "40"]) == 0
    assert "2 strange documents of 40 words" in capsys.readouterr().out
    texts = [file.read_text("utf-8") for file in sorted(folder.glob("*.txt"))]
    assert texts == [document.text for document in strange.documents(2, 40)]

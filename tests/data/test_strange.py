"""Strange texts: the same each time, valid text, and nothing of the kinds that are held out."""

import hashlib
import random
import re
import unicodedata
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.words import normalise
from data import strange
from data.corpus import documents_of, load_corpus
from data.foreign import ALPHABETS, KINDS, generated


def test_documents_are_the_same_each_time_and_as_long_as_asked():
    found = strange.documents(3, 50)
    assert found == strange.documents(5, 50)[:3] != strange.documents(3, 50, seed=1)
    assert [len(document.words) for document in found] == [50] * 3
    assert all(normalise(document.text) == document.text for document in found)


def test_the_documents_never_change():
    texts = "\0".join(document.text for document in strange.documents(3, 300))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("45b0f39397abbf50")


def test_kinds_and_share_of_strange_words_can_be_chosen():
    prose = {word for document in documents_of("train", load_corpus()) for word in document.words}
    found = strange.documents(20, 400, kinds=["code", "compound"], share=(0.02, 0.3))
    words = [word for document in found for word in document.words]
    assert all(word in prose or word.isascii() for word in words)
    shares = [sum(word not in prose for word in document.words) / 400 for document in found]
    assert max(shares) < 0.4 and 0.05 < sum(shares) / 20 < 0.25
    only_runs = strange.documents(1, 400, kinds=["run"], share=(1, 1))[0].words
    assert all(len(set(word)) <= 8 for word in only_runs)  # up to four units of two characters
    assert set(strange.documents(1, 400, share=(0, 0))[0].words) <= prose


def test_frequent_words_follow_zipfs_law():
    """Mean frequencies fall with the rank as the exponent says; at 0 all are equally frequent."""
    counts = Counter(strange.repeated("abcdefgh", 1.0))
    assert [counts[letter] for letter in "abcdefgh"] == [24, 12, 8, 6, 5, 4, 4, 3]
    assert set(Counter(strange.repeated("abcdefgh", 0.0)).values()) == {strange.FAMILY}

    def most_frequent(document):
        return Counter(document.words).most_common(1)[0][1] / len(document.words)

    found = strange.documents(60, 400, kinds=["script"], share=(1, 1))
    shares = [most_frequent(document) for document in found]
    assert min(shares) < 0.1 and max(shares) > 0.3


@pytest.mark.parametrize("make", [strange.script, strange.code, strange.run, strange.mark])
@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_words_are_printable_and_hold_no_space(make, seed):
    word = make(random.Random(seed))()
    assert word and word.isprintable() and not any(mark.isspace() for mark in word)
    assert normalise(word) == word


def test_words_of_a_pattern_have_its_pieces_in_common():
    """What varies is digits and the given words; with those away, all words are the same."""
    varied = 0
    for seed in range(200):
        make = strange.pattern(["owl"], random.Random(seed))
        words = {make() for _ in range(30)}
        assert len({len(word) for word in words}) == 1
        assert len({re.sub("[0-9a-f]", "", word.replace("owl", "~")) for word in words}) == 1
        varied += len(words) > 1
    assert varied > 150


def test_no_held_out_alphabet_has_a_letter_here():
    held_out = {letter for words in ALPHABETS.values() for letter in words if letter != " "}
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
    for kind in KINDS:
        for document in generated(kind, 600):
            assert not runs_of(document.words) & shown, kind


def test_the_program_writes_documents(tmp_path, capsys):
    folder = tmp_path / "texts"
    assert strange.main([str(folder), "--documents", "2", "--words", "40"]) == 0
    assert "2 strange documents of 40 words" in capsys.readouterr().out
    texts = [file.read_text("utf-8") for file in sorted(folder.glob("*.txt"))]
    assert texts == [document.text for document in strange.documents(2, 40)]

    flags = ["--documents", "1", "--kinds", "code", "--share", "0.1,0.2", "--seed", "3"]
    assert strange.main([str(folder), *flags]) == 0
    [expected] = strange.documents(1, 600, seed=3, kinds=["code"], share=(0.1, 0.2))
    assert (folder / "strange-3-000.txt").read_text("utf-8") == expected.text


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--documents", "0"], "--documents 0: must be at least 1"),
        (["--kinds", "code,lists"], "'lists' is not one of script, code, run, compound, mark"),
        (["--share", "0.3,0.2"], "--share 0.3,0.2: must be two numbers from 0 to 1"),
        (["--share", "nan,1"], "--share nan,1: must be"),
    ],
)
def test_a_wrong_count_is_one_line(flags, message, tmp_path, capsys):
    assert strange.main([str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert strange.main([str(tmp_path / "file")]) == 2

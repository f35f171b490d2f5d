"""The foreign held-out texts: the same everywhere, of the kinds they claim to be, and never part
of what is trained on.
"""

import hashlib
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.words import normalise
from data import make as pretrain
from data.corpus import Document, documents_of, load_corpus
from data.errors import UserError
from data.foreign import KINDS, foreign_texts, generated
from tasks.base import foreign_of
from tasks.registry import load_task
from tasks.supply import problem_at

SCRIPTS = ("CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK")


@pytest.fixture(scope="module")
def texts():
    return foreign_texts(words=200)


@settings(max_examples=30)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 400), st.integers(1, 5))
def test_generated_texts_are_long_enough_and_go_on_as_shorter_ones(kind, words, count):
    found = list(generated(kind, words, count))
    assert len({document.text for document in found}) == len(found) == count
    for short, long in zip(found, generated(kind, 500)):
        assert len(short.words) >= words and normalise(short.text) == short.text
        assert long.text.startswith(short.text.rstrip("\n"))


def test_the_generated_texts_never_change():
    """Scores on them are compared over the years."""
    texts = "\0".join(each.text for kind in KINDS for each in generated(kind, 300))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("6dc2acdb66ff8c97")


def test_each_alphabet_has_its_documents():
    documents = list(generated("alphabets", 100))
    for number, script in enumerate(SCRIPTS):
        letters = [mark for mark in documents[number].text if mark.isalpha()]
        names = {unicodedata.name(letter).split()[0] for letter in letters}
        assert names == {script}


def test_no_foreign_text_is_in_what_is_trained_on(texts):
    """The corpus shares no run of five words with the generated kinds, and no module of the
    pretraining reads foreign texts.
    """
    train = documents_of("train", load_corpus())
    runs = {run for document in train for run in runs_of(document)}
    for kind in KINDS:
        assert not any(runs & runs_of(document) for document in texts[kind]), kind
    for module in Path(pretrain.__file__).parent.glob("*.py"):
        assert "foreign" not in module.read_text(encoding="utf-8")


def runs_of(document: Document) -> set[tuple[str, ...]]:
    return set(zip(*(document.words[i:] for i in range(5))))


def test_the_task_asks_for_problems_of_each_kind():
    task = load_task("interleave")
    kinds = foreign_of(task, 10)
    assert set(KINDS) == set(kinds)
    for own in kinds.values():
        problem = problem_at(own, seed=0, split="test", level=10, index=0)
        assert problem.level == 10 and own.score(problem, [problem.target])[0].exact
        with pytest.raises(UserError, match="the train split allows at most"):
            problem_at(own, seed=0, split="train", level=10, index=0)


def test_a_task_without_texts_has_none():
    with pytest.raises(UserError, match="--foreign: task arithmetic has no foreign kinds of text"):
        foreign_of(load_task("arithmetic"), 2)

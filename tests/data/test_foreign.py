"""The foreign held-out texts: of the kinds that they claim to be, and never trained on."""

import unicodedata
from pathlib import Path

import pytest

from grpo.align.needleman import normalise
from grpo.data.corpus import FOREIGN, KINDS, Document, documents_of, load_corpus, load_foreign
from grpo.data.errors import UserError
from grpo.tasks import make
from grpo.tasks.base import foreign_of
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at

STRANGE = FOREIGN.parent / "strange"
SCRIPTS = ("CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK")


def test_each_kind_has_a_dozen_documents():
    for documents in load_foreign().values():
        assert len({document.text for document in documents}) == len(documents) == 12
        for document in documents:
            assert len(document.words) >= 1000 and normalise(document.text) == document.text


def test_each_alphabet_has_its_documents():
    for script, document in zip(SCRIPTS, load_foreign()["alphabets"]):
        letters = [mark for mark in document.text if mark.isalpha()]
        assert {unicodedata.name(letter).split()[0] for letter in letters} == {script}


def test_no_foreign_text_is_in_what_is_trained_on():
    """The corpus shares no run of five words with them, and the pretraining does not read them."""
    train = documents_of("train", load_corpus())
    runs = {run for document in train for run in runs_of(document)}
    for kind, documents in load_foreign().items():
        assert not any(runs & runs_of(document) for document in documents), kind
    assert "foreign" not in Path(make.__file__).read_text(encoding="utf-8")


def test_no_strange_text_holds_a_foreign_letter_or_three_foreign_words():
    """Unless they are prose or marks alone. Users train on strange texts (`data/strange`)."""
    strange = [Document(file.name, file.read_text("utf-8")) for file in STRANGE.glob("*.txt")]
    letters = {mark for document in strange for mark in document.text if mark.isalpha()}
    held_out = load_foreign()
    of_scripts = {mark for document in held_out["alphabets"] for mark in document.text}
    assert len(strange) == 100
    assert not any(letter in of_scripts for letter in letters if not letter.isascii())

    prose = {word for document in documents_of("train", load_corpus()) for word in document.words}
    shown = set().union(*(runs_of(document, 3) for document in strange))
    for kind, documents in held_out.items():
        for document in documents:
            runs = {run for run in runs_of(document, 3) if not set(run) <= prose}
            assert not runs & shown, kind


def runs_of(document: Document, length: int = 5) -> set[tuple[str, ...]]:
    return set(zip(*(document.words[i:] for i in range(length))))


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

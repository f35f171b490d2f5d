import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from grpo.data.corpus import (
    TEXTS,
    Document,
    documents_of,
    load_corpus,
    load_texts,
    split_of,
    without_repeats,
)

SPLITS = ("train", "validation", "test")
words = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=6)
texts = st.lists(words, min_size=1, max_size=12).map(" ".join)


def numbered(name: str, count: int) -> str:
    return " ".join(f"{name}{i}" for i in range(count))


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


# ---- loading


def test_the_embedded_corpus_fills_every_split():
    corpus = load_corpus()
    assert len(corpus) == len(list(TEXTS.glob("*.txt"))) >= 96
    assert [document.title for document in corpus] == sorted(document.title for document in corpus)
    shares = Counter(map(split_of, corpus))
    assert min(shares[split] for split in SPLITS) >= 8
    assert sum((documents_of(split, corpus) for split in SPLITS), []) == sorted(
        corpus, key=lambda document: SPLITS.index(split_of(document))
    )


# ---- the user's own texts


def test_a_folder_of_texts_is_read_with_all_below(tmp_path):
    put(tmp_path, one=numbered("a", 50), empty=" \n", copy=f"{numbered('a', 50)}\n")
    put(tmp_path / "below" / "deeper", two=numbered("b", 3))
    put(tmp_path / ".hidden", three=numbered("c", 50))
    (tmp_path / "below" / "notes.md").write_text("# Überschrift\n\n- a point", encoding="utf-8")
    (tmp_path / "below" / "Makefile").write_text("all:\n\techo done\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "absent")
    assert load_texts(tmp_path) == [
        Document("below/deeper/two.txt", numbered("b", 3)),
        Document("below/notes.md", "# Überschrift\n\n- a point"),
        Document("copy.txt", f"{numbered('a', 50)}\n"),  # one.txt repeats it
    ]


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("a.txt", b"gr\xf6sser", "/a.txt: is not UTF-8 text"),
        ("a.png", b"\x89PNG", ": the folder holds no text in UTF-8; give a folder of .txt or .md"),
        ("a.txt", b"long " * 9, ": holds more than 0 MB of text; give a part of it"),
    ],
)
def test_a_folder_that_cannot_be_taken_is_one_line(tmp_path, monkeypatch, name, content, fault):
    monkeypatch.setattr("grpo.data.corpus.MAX_TEXT", 40)
    (tmp_path / name).write_bytes(content)
    assert refused(load_texts, tmp_path).startswith(f"{tmp_path}{fault}")


# ---- the split


@pytest.mark.parametrize(
    "text, split",
    [
        # printf 'interleave\n...' | sha256sum; its first two digits as a fraction of 256: below
        # 0.8 is train, below 0.9 validation, then test.
        ("six", "train"),  # a4 = 164; 164 / 256 = 0.64
        ("five", "validation"),  # e0 = 224; 224 / 256 = 0.875
        ("nine", "test"),  # f1 = 241; 241 / 256 = 0.94
    ],
)
def test_split_by_hand(text, split):
    assert split_of(Document("any", text)) == split


@given(texts, st.text(), st.sampled_from([" ", "\n", "\t \r\n"]))
def test_the_split_depends_on_the_words_alone(text, title, space):
    assert split_of(Document(title, space + text.replace(" ", space))) == split_of(
        Document("other", text)
    )


# ---- repeats


def test_repeats_begin_at_a_similarity_of_08():
    # 104 words have 100 runs of five; their first 84 and 83 words have 80 and 79 of them.
    old = Document("old", numbered("a", 104))
    near = Document("near", f"{numbered('a', 84)} {numbered('b', 20)}")
    far = Document("far", f"{numbered('a', 83)} {numbered('b', 21)}")
    part = Document("part", numbered("a", 60))
    assert without_repeats([old, near, far, part]) == [old, far]

    whole = Document("whole", f"{numbered('a', 104)} {numbered('c', 500)}")
    assert without_repeats([old, whole]) == [whole]  # of a chapter and its book, the book

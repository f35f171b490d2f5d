import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import (
    TEXTS,
    Document,
    documents_of,
    fingerprint,
    load_corpus,
    load_documents,
    load_texts,
    main,
    merge,
    split_of,
    without_repeats,
)
from data.errors import UserError

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


def shingles(text: str) -> set[tuple[str, ...]]:
    words = Document("", text).words
    return set(zip(*(words[i:] for i in range(5)))) if len(words) >= 5 else {tuple(words)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def test_all_forms_hold_the_same_documents(tmp_path):
    a, b = numbered("a", 40), numbered("b", 40)
    put(tmp_path / "folder", a=a, b=b)
    items = [{"title": "a", "text": a}, {"title": "b", "text": b}]
    (tmp_path / "list.json").write_text(json.dumps(items))
    (tmp_path / "mapping.json").write_text(json.dumps({"a": a, "b": b}))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "strings.json").write_text(json.dumps([a, b]))
    expected = [Document("a", a), Document("b", b)]
    for name in ("folder", "list.json", "mapping.json", "lines.jsonl"):
        assert load_documents(tmp_path / name) == expected, name
    assert load_documents(tmp_path / "folder" / "b.txt") == expected[1:]
    strings = [Document("strings-1", a), Document("strings-2", b)]
    assert load_documents(tmp_path / "strings.json") == strings
    (tmp_path / "backwards.json").write_text(json.dumps(items[::-1]))
    assert load_corpus(tmp_path / "backwards.json") == expected


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("a.txt", b" ", ": is too short: 0 words; at least 1 are needed"),
        ("a.txt", b"word " * 40 + b"\0", ": is binary"),
        ("a.md", b"word " * 40, ": unknown suffix '.md'; give .txt, .json or .jsonl"),
        ("a.json", b"{", ": is not JSON"),
        ("a.json", b"7", ": is an integer; give a list of texts, or a mapping of title to text"),
        ("a.json", b'["x", 7]', ', item 2: must be {"title": string, "text": string}'),
        ("a.json", b'{"x": ["y"]}', ', item 1: must be {"title": string, "text": string}'),
        ("a.json", json.dumps(["a \ud800"]).encode(), ", item 1: is binary"),
        ("a.jsonl", b'{"title": "x", "text": ""}', ", line 1: is too short: 0 words"),
        ("a.jsonl", b"\n\n{", ", line 3: is not JSON"),
    ],
)
def test_a_bad_file_is_named_with_the_place_in_it(tmp_path, name, content, fault):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_documents(path)
    assert str(error.value).startswith(f"{path}{fault}")


# ---- the user's own texts


def test_a_folder_of_texts_is_read_with_all_below(tmp_path):
    put(tmp_path, one=numbered("a", 50), empty=" \n", copy=f"{numbered('a', 50)}\n")
    put(tmp_path / "below" / "deeper", two=numbered("b", 3))
    put(tmp_path / ".hidden", three=numbered("c", 50))
    (tmp_path / "below" / "notes.md").write_text("# Überschrift\n\n- a point", encoding="utf-8")
    (tmp_path / "below" / "Makefile").write_text("all:\n\techo done\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin.c").write_bytes("größer".encode("latin-1"))
    (tmp_path / "bits.bin").write_bytes(b"plain for a while\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "absent")
    assert load_texts(tmp_path) == [
        Document("below/Makefile", "all:\n\techo done\n"),
        Document("below/deeper/two.txt", numbered("b", 3)),
        Document("below/notes.md", "# Überschrift\n\n- a point"),
        Document("copy.txt", f"{numbered('a', 50)}\n"),  # one.txt repeats it
    ]


def all_compared(documents):
    """Return what `without_repeats` should, from all pairs of documents."""

    def sequences(document):
        words = document.words
        return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}

    kept = []
    for document in sorted(documents, key=lambda each: -len(each.words)):
        own = sequences(document)
        if all(len(own & sequences(other)) / len(own) < 0.8 for other in kept):
            kept.append(document)
    return [document for document in documents if document in kept]


@given(
    st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.text("abc", max_size=12))),
)
def test_no_repeat_is_missed(templates, changes):
    """The index compares only documents that share a rare sequence of words."""
    texts = [
        f"{(text := templates[which % len(templates)])[:at]}{new}{text[at:]}"
        for which, at, new in changes
    ]
    documents = [Document(str(n), " ".join(text)) for n, text in enumerate(texts)]
    assert without_repeats(documents) == all_compared(documents)


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("a.txt", b"gr\xf6sser", "/a.txt: is not UTF-8 text"),
        ("a.md", b"a\0b", "/a.md: is binary"),
        ("a.png", b"\x89PNG", ": the folder holds no text in UTF-8; give a folder of .txt or .md"),
        ("a.txt", b"long " * 9, ": holds more than 0 MB of text; give a folder with a part of it"),
    ],
)
def test_a_folder_that_cannot_be_taken_is_one_line(tmp_path, monkeypatch, name, content, fault):
    monkeypatch.setattr("data.corpus.MAX_TEXT", 40)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_texts(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}{fault}")


def test_a_fingerprint_is_of_the_words():
    assert fingerprint(Document("a", " two\nwords ")) == fingerprint(Document("b", "two words"))
    assert fingerprint(Document("a", "two words")) != fingerprint(Document("a", "twowords"))


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


@settings(deadline=None)
@given(texts, st.text(), st.sampled_from([" ", "\n", "\t \r\n"]))
def test_the_split_depends_on_the_words_alone(text, title, space):
    assert split_of(Document(title, space + text.replace(" ", space))) == split_of(
        Document("other", text)
    )


# ---- merging


def test_merge_reports_adds_drops_and_refuses(tmp_path):
    into = put(tmp_path / "corpus", first=numbered("a", 100))
    user = put(
        tmp_path / "user",
        new=numbered("b", 50),
        copy=numbered("a", 100).replace(" ", "\n"),
        short="only three words",
    )
    put(user / "below", deep=numbered("c", 50))
    put(user / ".hidden", secret=numbered("d", 50))
    (user / "image.png").write_bytes(b"\x89PNG\0")
    (user / "noise.txt").write_bytes(b"\0" * 100)
    lines = []
    assert merge([user, tmp_path / "absent.txt"], into, say=lines.append) == 4
    deep, new = Document("", numbered("c", 50)), Document("", numbered("b", 50))
    assert lines == [
        f"added    {user}/below/deep.txt as deep.txt: 50 words, {split_of(deep)}",
        f"dropped  {user}/copy.txt: repeats first (similarity 1.00)",
        f"refused  {user}/image.png: unknown suffix '.png'; give .txt, .json or .jsonl",
        f"added    {user}/new.txt as new.txt: 50 words, {split_of(new)}",
        f"refused  {user}/noise.txt: is binary (it holds a NUL or half a surrogate pair); give "
        "plain text in UTF-8",
        f"refused  {user}/short.txt: is too short: 3 words; at least 40 are needed",
        f"refused  {tmp_path}/absent.txt: cannot be read: No such file or directory",
    ]
    assert sorted(contents(into)) == ["deep.txt", "first.txt", "new.txt"]


def test_near_duplicates_begin_at_a_similarity_of_08(tmp_path):
    # 104 words have 100 runs of five; their first 84 and 83 words have 80 and 79 of them.
    into = put(tmp_path / "corpus", old=numbered("a", 104))
    lines = []

    def add(name, text):
        merge([put(tmp_path / name, **{name: text})], into, say=lines.append)
        return lines[-1]

    assert add("near", f"{numbered('a', 84)} {numbered('b', 20)}") == (
        f"dropped  {tmp_path}/near/near.txt: repeats old (similarity 0.80)"
    )
    assert add("far", f"{numbered('a', 83)} {numbered('b', 21)}").startswith("added")

    assert add("part", numbered("a", 60)).endswith("repeats old (similarity 1.00)")
    assert add("whole", f"{numbered('a', 104)} {numbered('c', 500)}").startswith("added")


def test_names_are_slugs_and_a_taken_one_gets_a_number(tmp_path):
    into = put(tmp_path / "corpus", **{"the-owl": numbered("a", 50)})
    titles = ["The Owl!", "the  owl", "../../up & away", "Ünïcode", "?!", "x" * 300]
    (tmp_path / "user.json").write_text(
        json.dumps({title: numbered(f"w{i}.", 50) for i, title in enumerate(titles)})
    )
    before = contents(into)
    assert merge([tmp_path / "user.json"], into, say=lambda line: None) == 0
    added = contents(into)
    names = ["the-owl", "the-owl-2", "the-owl-3", "up-away", "ünïcode", "text", "x" * 48]
    assert sorted(added) == sorted(f"{name}.txt" for name in names)
    assert added["the-owl.txt"] == before["the-owl.txt"]


@settings(max_examples=25, deadline=None)
@given(
    old=st.dictionaries(st.sampled_from("abc"), texts),
    new=st.lists(st.tuples(st.sampled_from("ABCD"), texts)),
)
def test_merging_loses_nothing_and_merging_again_changes_nothing(tmp_path_factory, old, new):
    folder = tmp_path_factory.mktemp("merge")
    into = put(folder / "corpus", **old)
    user = folder / "user.json"
    user.write_text(json.dumps([{"title": title, "text": text} for title, text in new]))
    before = contents(into)
    merge([user], into, min_words=1, say=lambda line: None)
    after = contents(into)
    assert before.items() <= after.items()
    held = [shingles(document.text) for document in (load_corpus(into) if after else [])]
    for own in (shingles(text) for _, text in new):
        assert any(len(own & other) / len(own) >= 0.8 for other in held)
    merge([user, into], into, min_words=1, say=lambda line: None)
    assert contents(into) == after


# ---- the command line


def test_the_command_merges_and_says_2_when_it_refused(tmp_path, capsys):
    user, into = put(tmp_path / "user", new=numbered("b", 30)), tmp_path / "corpus"
    assert main(["merge", str(user), "--into", str(into)]) == 2
    assert (
        capsys.readouterr().err
        == "data.corpus: refused 1 of the texts, each named above; the others were merged\n"
    )
    put(tmp_path / "user", new=numbered("b", 40))
    assert main(["merge", str(user), "--into", str(into)]) == 0 == main([])
    assert list(contents(into)) == ["new.txt"]

"""What a word is; Needleman-Wunsch against its definition, against Biopython, and by its laws."""

import random
import tracemalloc
import unicodedata
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.align.needleman import (
    Alignment,
    Op,
    normalise,
    nw_align,
    nw_align_batch,
    nw_score_batch,
    prefix_scores,
    similarity_batch,
    split_words,
    word_ends,
)


def words(max_size, min_size=0):
    return st.lists(st.sampled_from("abc"), min_size=min_size, max_size=max_size)


def nw_score(a, b):
    return nw_score_batch([(a, b)])[0].item()


@cache
def all_paths(n, m):
    """All alignments of n symbols with m, each a string of P (pair), D (delete) and I (insert)."""
    if n == m == 0:
        return [""]
    before = [(n - 1, m - 1, "P"), (n - 1, m, "D"), (n, m - 1, "I")]
    return [path + kind for i, j, kind in before if i >= 0 and j >= 0 for path in all_paths(i, j)]


def path_score(path, a, b):
    """The score of an alignment by its definition."""
    score = i = j = 0
    for kind in path:
        score += 1 if kind == "P" and a[i] == b[j] else -1
        i += kind != "I"
        j += kind != "D"
    return score


def table_score(a, b):
    """The best score by the table of all prefixes, row by row."""
    above = [-j for j in range(len(b) + 1)]
    for i, symbol in enumerate(a, 1):
        row = [-i]
        for j, other in enumerate(b, 1):
            pair = above[j - 1] + (1 if symbol == other else -1)
            row.append(max(pair, above[j] - 1, row[-1] - 1))
        above = row
    return above[-1]


def as_path(ops):
    return "".join(
        {"match": "P", "substitute": "P", "delete": "D", "insert": "I"}[op.kind] for op in ops
    )


@settings(max_examples=500)
@given(words(5), words(5))
def test_score_and_path_are_those_of_the_definition(a, b):
    scores = {path: path_score(path, a, b) for path in all_paths(len(a), len(b))}
    best = max(scores.values())
    alignment = nw_align(a, b)
    assert nw_score(a, b) == alignment.score == best
    # ties: read from the end, the first in the order pair, delete, insert
    order = {"P": 0, "D": 1, "I": 2}
    first = min(
        (path for path in scores if scores[path] == best),
        key=lambda path: [order[k] for k in path[::-1]],
    )
    assert as_path(alignment.ops) == first


@settings(max_examples=300)
@given(st.lists(words(25), max_size=5), words(25), st.booleans())
@example([[], list("ab"), []], [], True)
@example([[], list("abc")], list("ab"), True)
@example([], [], True)
def test_a_batch_has_the_scores_of_the_table(firsts, b, is_shared):
    """However many sequences share an integer."""
    pairs = [(a, b if is_shared else [*b]) for a in firsts]
    scores = nw_score_batch(pairs)
    assert scores.dtype == np.int64
    assert scores.tolist() == [table_score(a, b) for a in firsts]
    assert nw_align_batch(pairs) == [nw_align(a, b) for a in firsts]


def test_long_sequences():
    rng = random.Random(0)
    b = [rng.randrange(60) for _ in range(700)]
    firsts = [
        [w for w in b if rng.random() < 0.9] + [rng.randrange(60)] * rng.randrange(9)
        for _ in range(3)
    ]
    scores = [table_score(a, b) for a in firsts]
    assert nw_score_batch([(a, b) for a in firsts]).tolist() == scores


@given(words(40), words(40))
def test_path_spells_out_both_sequences_and_scores_the_score(a, b):
    score, ops = nw_align(a, b)
    assert [op.i for op in ops if op.i is not None] == list(range(len(a)))
    assert [op.j for op in ops if op.j is not None] == list(range(len(b)))
    for op in ops:
        if op.i is None or op.j is None:
            assert op.kind == ("insert" if op.i is None else "delete")
        else:
            assert op.kind == ("match" if a[op.i] == b[op.j] else "substitute")
    assert path_score(as_path(ops), a, b) == score == nw_score(a, b)


@given(words(60, min_size=1), words(60, min_size=1))
def test_biopython_agrees(a, b):
    aligner = pytest.importorskip("Bio.Align").PairwiseAligner(mode="global")
    aligner.match_score, aligner.mismatch_score, aligner.gap_score = 1, -1, -1
    assert nw_score(a, b) == aligner.score("".join(a), "".join(b))


def test_scores_by_hand():
    a, b = "the owl saw it".split(), "the old owl saw".split()
    assert nw_align(a, b) == Alignment(
        1,
        [  # three matches, an insert, a delete: 3 - 1 - 1
            Op("match", 0, 0),
            Op("insert", None, 1),
            Op("match", 1, 2),
            Op("match", 2, 3),
            Op("delete", 3, None),
        ],
    )


def test_memory_of_the_score_is_linear():
    rng = random.Random(0)
    a, b = ([rng.randrange(500) for _ in range(3000)] for _ in range(2))
    tracemalloc.start()
    try:
        nw_score(a, b)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6  # a matrix of 3000 x 3000 cells takes 9e6 bytes at one byte a cell


@given(words(30), words(30))
def test_similarity_is_one_exactly_if_equal_and_else_within_bounds(a, b):
    one, other = similarity_batch([a, b], a)
    assert one == 1 and 0 <= other <= 1 and (other == 1) == (a == b)


def test_similarity_by_hand():
    target = "a b c d".split()
    completions = [target, [], "x y z w".split(), "a b x d".split(), "a a b b c c d d".split()]
    # S = 4, -4, -4, 3 - 1, 4 - 4 and L = 4, 4, 4, 4, 8
    assert similarity_batch(completions, target).tolist() == [1, 0, 0, 6 / 8, 8 / 16]
    assert similarity_batch([[], ["a"]], []).tolist() == [1, 0]  # S = 0, -1
    assert similarity_batch([], target).tolist() == []
    assert similarity_batch([target], target).dtype == np.float64


FEW = st.lists(st.sampled_from("abc"), max_size=7)


@given(st.lists(FEW, max_size=4), FEW)
def test_each_is_the_best_over_the_prefixes_of_the_target(sequences, target):
    expected = [
        [
            max(nw_score(sequence[:i], target[:j]) for j in range(len(target) + 1))
            for i in range(len(sequence) + 1)
        ]
        for sequence in sequences
    ]
    assert prefix_scores(sequences, target) == expected


def test_by_hand():
    # match, match, c passed over and d matched, too many, too many
    assert prefix_scores([list("abdxx")], list("abcd")) == [[0, 1, 2, 2, 1, 0]]
    assert prefix_scores([[], ["a"]], []) == [[0], [0, -1]]


# ---- words

# Letters with combining marks, a Hangul syllable in parts, whitespace of every kind and a blank
# that is none.
AWKWARD = "aeé\u0301\u0327ﬁ\u1112\u1161., \t\n\r\u00a0\u2003\u3000\x1f\u200b"
TEXTS = st.text(AWKWARD, max_size=20) | st.text()


def test_words_by_hand():
    assert split_words(" The  owl,\nit seems. ") == ["The", "owl,", "it", "seems."]
    assert split_words("") == split_words(" \t\n\u00a0\u3000") == word_ends("  ") == []
    assert split_words("cafe\u0301") == split_words("caf\u00e9") == ["caf\u00e9"]
    assert split_words("ﬁn") == ["ﬁn"]  # form C, not KC, which would make it "fin"


@given(TEXTS)
@example("a\x1fb")
def test_words_are_what_python_splits(text):
    assert split_words(text) == unicodedata.normalize("NFC", text).split()


@given(TEXTS)
# An en quad, which normalises to another space; a mark on a space.
@example("\u2000e\u0301 \u0301x")
def test_ends_are_in_the_text_as_it_is(text):
    ends, words = word_ends(text), split_words(text)
    assert [
        normalise(piece).strip() for piece in map(text.__getitem__, map(slice, [0, *ends], ends))
    ] == words

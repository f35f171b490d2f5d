"""Needleman-Wunsch against its definition, against a table, against Biopython, and by its laws."""

import random
import tracemalloc
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align import bitparallel
from align.needleman import Alignment, Op, nw_align, nw_scores, prefix_scores, similarities


def words(max_size, min_size=0):
    return st.lists(st.sampled_from("abc"), min_size=min_size, max_size=max_size)


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


def as_path(ops):
    return "".join(
        {"match": "P", "substitute": "P", "delete": "D", "insert": "I"}[op.kind] for op in ops
    )


def table_score(a, b):
    """The score by the table of Needleman and Wunsch."""
    row = [-j for j in range(len(b) + 1)]
    for symbol in a:
        above, row = row, [row[0] - 1]
        for j, other in enumerate(b):
            pair = above[j] + (1 if symbol == other else -1)
            row.append(max(pair, above[j + 1] - 1, row[j] - 1))
    return row[-1]


@settings(max_examples=500)
@given(words(5), words(5))
def test_score_and_path_are_those_of_the_definition(a, b):
    scores = {path: path_score(path, a, b) for path in all_paths(len(a), len(b))}
    best = max(scores.values())
    (alignment,) = nw_align([a], b)
    assert nw_scores([a], b) == [alignment.score] == [best]
    # ties: read from the end, the first in the order pair, delete, insert
    order = {"P": 0, "D": 1, "I": 2}
    first = min(
        (path for path in scores if scores[path] == best),
        key=lambda path: [order[k] for k in path[::-1]],
    )
    assert as_path(alignment.ops) == first


@settings(max_examples=300)
@given(st.lists(words(25), max_size=5), words(25), st.integers(1, 200))
def test_a_batch_scores_as_each_alone(firsts, b, chunk_bits):
    """However many sequences share an integer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitparallel, "CHUNK_BITS", chunk_bits)
        found = nw_align(firsts, b)
        assert nw_scores(firsts, b) == [table_score(a, b) for a in firsts]
    assert found == [nw_align([a], b)[0] for a in firsts]


@pytest.mark.parametrize(
    "lengths, parts",
    [
        ([], []),
        ([9] * 5, [range(2), range(2, 4), range(4, 5)]),
        ([9, 10], [range(1), range(1, 2)]),
        ([50, 0], [range(1), range(1, 2)]),
    ],
)
def test_chunks_by_hand(lengths, parts, monkeypatch):
    monkeypatch.setattr(bitparallel, "CHUNK_BITS", 60)  # a length of 9 takes 3 (9 + 1) = 30
    assert list(bitparallel.chunks(lengths)) == parts


def test_long_sequences():
    rng = random.Random(0)
    b = [rng.randrange(60) for _ in range(700)]
    a = [w for w in b if rng.random() < 0.9] + [rng.randrange(60)] * rng.randrange(9)
    (alignment,) = nw_align([a], b)
    assert alignment.score == table_score(a, b) == path_score(as_path(alignment.ops), a, b)


@given(words(40), words(40))
def test_path_spells_out_both_sequences_and_scores_the_score(a, b):
    ((score, ops),) = nw_align([a], b)
    assert [op.i for op in ops if op.i is not None] == list(range(len(a)))
    assert [op.j for op in ops if op.j is not None] == list(range(len(b)))
    for op in ops:
        if op.i is None or op.j is None:
            assert op.kind == ("insert" if op.i is None else "delete")
        else:
            assert op.kind == ("match" if a[op.i] == b[op.j] else "substitute")
    assert path_score(as_path(ops), a, b) == score


@given(words(60, min_size=1), words(60, min_size=1))
def test_biopython_agrees(a, b):
    aligner = pytest.importorskip("Bio.Align").PairwiseAligner(mode="global")
    aligner.match_score, aligner.mismatch_score, aligner.gap_score = 1, -1, -1
    assert nw_scores([a], b) == [aligner.score("".join(a), "".join(b))]


def test_scores_by_hand():
    a, b = "the owl saw it".split(), "the old owl saw".split()
    assert nw_align([a], b) == [
        Alignment(
            1,
            [  # three matches, an insert, a delete: 3 - 1 - 1
                Op("match", 0, 0),
                Op("insert", None, 1),
                Op("match", 1, 2),
                Op("match", 2, 3),
                Op("delete", 3, None),
            ],
        )
    ]


def test_memory_of_the_score_is_linear():
    rng = random.Random(0)
    a, b = ([rng.randrange(500) for _ in range(3000)] for _ in range(2))
    tracemalloc.start()
    try:
        nw_scores([a], b)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6  # a matrix of 3000 x 3000 cells takes 9e6 bytes at one byte a cell


@given(words(30), words(30))
def test_similarity_is_one_exactly_if_equal_and_else_within_bounds(a, b):
    same, other = similarities([b, a], b)
    assert same == 1 and 0 <= other <= 1
    assert (other == 1) == (a == b)


def test_similarity_by_hand():
    target = "a b c d".split()
    completions = [target, [], "x y z w".split(), "a b x d".split(), "a a b b c c d d".split()]
    # S = 4, -4, -4, 3 - 1, 4 - 4 and L = 4, 4, 4, 4, 8
    assert similarities(completions, target) == [1, 0, 0, 6 / 8, 8 / 16]
    assert similarities([[], ["a"]], []) == [1, 0]  # S = 0, -1
    assert similarities([], target) == []


@given(st.lists(words(7), max_size=4), words(7))
def test_each_prefix_has_the_best_score_over_the_prefixes_of_the_target(sequences, target):
    expected = [
        [
            max(table_score(sequence[:i], target[:j]) for j in range(len(target) + 1))
            for i in range(len(sequence) + 1)
        ]
        for sequence in sequences
    ]
    assert prefix_scores(sequences, target) == expected


def test_prefixes_by_hand():
    # match, match, c passed over and d matched, too many, too many
    assert prefix_scores([list("abdxx")], list("abcd")) == [[0, 1, 2, 2, 1, 0]]
    assert prefix_scores([[], ["a"]], []) == [[0], [0, -1]]

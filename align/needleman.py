"""Global alignment of sequences: Needleman-Wunsch, for many pairs at once.

The algorithm is Needleman & Wunsch (1970). Each deleted and each inserted symbol scores `gap`.
Scores are added as given, so costs are negative. Numbers may have either sign. Integer scores are
exact, float scores are exact up to rounding. Numbers that are not finite, and numbers so large that
a score could overflow, raise ValueError.

Symbols are hashable values that are compared as dictionary keys, so 1, 1.0 and True are the same
symbol. A str is the sequence of its characters.

Ties. Of several best alignments one is returned: read from its end, at each step a pair (match or
substitution) is preferred to a deletion, and a deletion to an insertion.

The standard scoring (match 1, mismatch -1, gap -1) is computed by `align.bitparallel`, which is
much faster; all other scorings by `_filled` below, pair by pair and row by row.

Shapes: B pairs; N and M are the lengths of a and of b.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from align.bitparallel import DELETE, INSERT, PAIR, BitColumns, chunks

Number = int | float
Symbols = Sequence[Hashable]
Pairs = Sequence[tuple[Symbols, Symbols]]

STANDARD = (1, -1, -1)  # the scoring of `align.bitparallel`, in integers


class Op(NamedTuple):
    """One column of an alignment, e.g. ``Op("match", 0, 0)`` or ``Op("insert", None, 3)``.

    `kind` is one of

    - "match" or "substitute": a[i] is aligned with b[j], which is equal or different;
    - "delete": a[i] is aligned with a gap, and `j` is None;
    - "insert": b[j] is aligned with a gap, and `i` is None.
    """

    kind: str
    i: int | None
    j: int | None


class Alignment(NamedTuple):
    """A best alignment: its score, and its operations from the beginning of both sequences."""

    score: Number
    ops: list[Op]


def nw_score(a: Symbols, b: Symbols, **scoring: Number) -> Number:
    """Return the score of the best global alignment of `a` and `b`.

    The keywords `match`, `mismatch` and `gap` and the errors are those of `nw_score_batch`.

    >>> nw_score("the owl saw".split(), "the old owl saw".split())  # three matches, one insertion
    2
    """
    return nw_score_batch([(a, b)], **scoring)[0].item()


def nw_score_batch(
    pairs: Pairs, *, match: Number = 1, mismatch: Number = -1, gap: Number = -1
) -> np.ndarray:
    """Return the best score of each of the `pairs`, an array (B,).

    It is int64, or float64 if one of the scoring parameters is a float. Memory O(B (N + M)). Raises
    ValueError for scores that are not finite or too large.
    """
    scale = _checked(match, mismatch, gap)
    is_exact = isinstance(scale[0], int)
    scores: list[Number]
    if is_exact and scale == STANDARD:
        scores = [columns.score(k) for columns, k in _columns(pairs, keep_moves=False)]
    else:
        scores = [_filled(a, b, *scale)[0] for a, b in pairs]
    return np.array(scores, np.int64 if is_exact else np.float64)


def nw_align(a: Symbols, b: Symbols, **scoring: Number) -> Alignment:
    """Return a best global alignment of `a` and `b`.

    The head of this module says how ties are broken. The keywords are those of `nw_align_batch`.

    >>> nw_align("ab", "b").ops
    [Op(kind='delete', i=0, j=None), Op(kind='match', i=1, j=0)]
    """
    return nw_align_batch([(a, b)], **scoring)[0]


def nw_align_batch(
    pairs: Pairs, *, match: Number = 1, mismatch: Number = -1, gap: Number = -1
) -> list[Alignment]:
    """Return a best alignment of each of the `pairs`, in order.

    Memory: one byte per cell, B N M in all; with the standard scoring two bits per cell. Errors are
    those of `nw_score_batch`.
    """
    scale = _checked(match, mismatch, gap)
    alignments = []
    if isinstance(scale[0], int) and scale == STANDARD:
        for columns, k in _columns(pairs, keep_moves=True):
            ops = _ops(columns.operations(k), columns.firsts[k], columns.second)
            alignments.append(Alignment(columns.score(k), ops))
        return alignments

    for a, b in pairs:
        rows: list[np.ndarray] = []
        score, pair_scores = _filled(a, b, *scale, rows)
        alignments.append(Alignment(score, _ops(_operations(rows, pair_scores), a, b)))
    return alignments


def similarity(a: Symbols, b: Symbols) -> float:
    """Return the similarity of `a` and `b`, from 0 to 1: (S + L) / 2L.

    S is `nw_score(a, b)` with the standard scoring, L the length of the longer sequence. The result
    is 1 if and only if the sequences are equal; two empty ones are.
    """
    return similarity_batch([a], b)[0].item()


def similarity_batch(completions: Sequence[Symbols], target: Symbols) -> np.ndarray:
    """Return the similarity of each of the `completions` to `target`: (B,), float64."""
    scores = nw_score_batch([(completion, target) for completion in completions])
    longest = np.array(
        [max(len(completion), len(target)) for completion in completions], dtype=np.int64
    )
    return np.where(longest == 0, 1.0, (scores + longest) / np.maximum(2 * longest, 1))


def prefix_scores(
    sequences: Sequence[Sequence[Hashable]], target: Sequence[Hashable]
) -> list[list[int]]:
    """Return the scores of all prefixes of each sequence: n + 1 numbers for n symbols.

    Number i is the best standard score of the first i symbols against any prefix of `target`: the
    maximum of a row of the table. A symbol of the target that is skipped costs 1 as soon as a later
    one is matched; symbols that are still missing at the end cost nothing.

    Shapes: B sequences of up to N symbols, a target of M. Time O(B N M), in N steps.

    A match; then "b" is skipped and "c" matches; then a mismatch:

    >>> prefix_scores([["a", "c", "x"]], ["a", "b", "c", "d"])
    [[0, 1, 1, 0]]
    """
    # Symbols become integers; -1 is padding, or a symbol that the target does not have.
    ids: dict[Hashable, int] = {}
    target_M = np.array([ids.setdefault(symbol, len(ids)) for symbol in target], dtype=np.int64)
    symbols_BN = np.full((len(sequences), max(map(len, sequences), default=0)), -1)
    for row, sequence in zip(symbols_BN, sequences):
        row[: len(sequence)] = [ids.get(symbol, -1) for symbol in sequence]

    # Row 0 aligns nothing with prefixes of the target: gaps alone.
    columns = np.arange(len(target) + 1)
    row_BM = np.broadcast_to(-columns, (len(sequences), len(columns)))
    best = [np.zeros(len(sequences), dtype=np.int64)]

    for symbols_B in symbols_BN.T:
        pairs_BM = row_BM[:, :-1] + np.where(symbols_B[:, None] == target_M, 1, -1)
        row_BM = row_BM - 1
        np.maximum(row_BM[:, 1:], pairs_BM, out=row_BM[:, 1:])

        # A run of gaps along the row loses 1 per column. Once that is added back, the best start of
        # each run is a running maximum.
        row_BM = np.maximum.accumulate(row_BM + columns, axis=1) - columns
        best.append(row_BM.max(axis=1))

    return [
        scores[: len(sequence) + 1]
        for scores, sequence in zip(np.stack(best, axis=1).tolist(), sequences)
    ]


def _checked(match: Number, mismatch: Number, gap: Number) -> tuple[Number, Number, Number]:
    """Return the scoring as Python numbers, all integers or all floats. NumPy's could wrap.

    Raises ValueError unless they are finite and, if they are integers, fit in 64 bits.
    """
    given = (match, mismatch, gap)
    for name, number in zip(("match", "mismatch", "gap"), given):
        fits = abs(int(number)) < 2**63 if isinstance(number, Integral) else math.isfinite(number)
        if not fits:
            raise ValueError(f"{name}={number}: must be a finite number of at most 64 bits")
    kind = int if all(isinstance(number, Integral) for number in given) else float
    return kind(match), kind(mismatch), kind(gap)


def _filled(
    a: Symbols,
    b: Symbols,
    match: Number,
    mismatch: Number,
    gap: Number,
    rows: list[np.ndarray] | None = None,
) -> tuple[Number, np.ndarray]:
    """Return the score of `a` and `b`, and what pairs add, (N, M), if `rows` is given.

    Cell (i, j) holds the best score of the first i symbols of a and the first j of b, minus
    gap * (i + j). On this scale a gap adds 0, so all border cells are 0, and insertions are a
    running maximum of the row. `rows`, if given, gets the N + 1 rows (M + 1,).
    """
    ids: dict[Hashable, int] = {}
    ids_a = [ids.setdefault(symbol, len(ids)) for symbol in a]
    ids_b = np.array([ids.setdefault(symbol, len(ids)) for symbol in b], dtype=np.int64)
    matched, other = match - 2 * gap, mismatch - 2 * gap

    # No cell exceeds `bound` in absolute value, nor does what is added to undo the shift.
    bound = (len(a) + len(b) + 1) * max(abs(matched), abs(other), abs(gap))
    if not (2 * bound < 2**62 if isinstance(bound, int) else math.isfinite(2 * bound)):
        raise ValueError(
            f"scores of up to ±{bound:.3g} overflow; give smaller match, mismatch or gap"
        )

    row = np.zeros(len(b) + 1, np.int64 if isinstance(bound, int) else np.float64)
    kept, added = [row], []
    for symbol in ids_a:
        pair_scores = np.where(ids_b == symbol, matched, other)
        best = np.maximum(row[:-1] + pair_scores, row[1:])
        row = np.maximum.accumulate(np.concatenate([row[:1], best]))
        if rows is not None:
            kept.append(row)
            added.append(pair_scores)
    if rows is not None:
        rows += kept
    return row[-1].item() + gap * (len(a) + len(b)), np.array(added)


def _operations(rows: list[np.ndarray], pair_scores: np.ndarray) -> list[int]:
    """Return the best alignment in a table, from its end: PAIR, DELETE or INSERT."""
    i, j = len(rows) - 1, len(rows[0]) - 1
    operations = []
    while i and j:
        best = rows[i][j]
        if rows[i - 1][j - 1] + pair_scores[i - 1, j - 1] == best:
            operations.append(PAIR)
            i, j = i - 1, j - 1
        elif rows[i - 1][j] == best:
            operations.append(DELETE)
            i -= 1
        else:
            operations.append(INSERT)
            j -= 1
    return operations + [DELETE] * i + [INSERT] * j


def _columns(pairs: Iterable[Any], keep_moves: bool) -> Iterator[tuple[BitColumns, int]]:
    """Yield, for each pair, the `BitColumns` that hold it and its index in them.

    Consecutive pairs whose b is the same object are computed together.
    """
    for _, neighbours in groupby(pairs, key=lambda pair: id(pair[1])):
        firsts, seconds = zip(*neighbours)
        for part in chunks([len(first) for first in firsts]):
            columns = BitColumns(firsts[part.start : part.stop], seconds[0], keep_moves)
            yield from ((columns, k) for k in range(len(part)))


def _ops(kinds: list[int], a: Symbols, b: Symbols) -> list[Op]:
    """Return the operations of an alignment of `a` and `b`, from its beginning.

    `kinds` are PAIR, DELETE or INSERT, from its end.
    """
    # Op(...) takes twice the time of this call, and most of the time is spent here.
    make = tuple.__new__

    ops = []
    i = j = 0
    for kind in reversed(kinds):
        if kind == PAIR:
            ops.append(make(Op, ("match" if a[i] is b[j] or a[i] == b[j] else "substitute", i, j)))
            i += 1
            j += 1
        elif kind == DELETE:
            ops.append(make(Op, ("delete", i, None)))
            i += 1
        else:
            ops.append(make(Op, ("insert", None, j)))
            j += 1
    return ops

"""Global alignment of sequences with a target: Needleman & Wunsch (1970), for many at once.

A match scores 1, a mismatch -1, and each deleted or inserted symbol -1. Symbols are hashable values
that are compared as dictionary keys; a str is the sequence of its characters.

Ties. Of several best alignments one is returned: read from its end, at each step a pair (match or
substitution) is preferred to a deletion, and a deletion to an insertion.

Shapes: B sequences of up to N symbols, a target of M.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from align.bitparallel import DELETE, PAIR, BitColumns, chunks

Symbols = Sequence[Hashable]


class Op(NamedTuple):
    """One column of an alignment, e.g. ``Op("match", 0, 0)`` or ``Op("insert", None, 3)``.

    `kind` is one of

    - "match" or "substitute": symbol i of the sequence is aligned with symbol j of the target,
      which is equal or different;
    - "delete": symbol i is aligned with a gap, and `j` is None;
    - "insert": symbol j of the target is aligned with a gap, and `i` is None.
    """

    kind: str
    i: int | None
    j: int | None


class Alignment(NamedTuple):
    """A best alignment: its score, and its operations from the beginning of both sequences."""

    score: int
    ops: list[Op]


def nw_scores(sequences: Sequence[Symbols], target: Symbols) -> list[int]:
    """Return the score of the best alignment of each sequence with `target`.

    The memory is O(B N + M).

    >>> nw_scores(["the owl saw".split()], "the old owl saw".split())  # 3 matches, 1 insertion
    [2]
    """
    return [columns.score(k) for columns, k in _columns(sequences, target, keep_moves=False)]


def nw_align(sequences: Sequence[Symbols], target: Symbols) -> list[Alignment]:
    """Return a best alignment of each sequence with `target`. The memory is two bits per cell.

    >>> nw_align(["ab"], "b")[0].ops
    [Op(kind='delete', i=0, j=None), Op(kind='match', i=1, j=0)]
    """
    return [
        Alignment(columns.score(k), _ops(columns.operations(k), columns.firsts[k], target))
        for columns, k in _columns(sequences, target, keep_moves=True)
    ]


def similarities(sequences: Sequence[Symbols], target: Symbols) -> list[float]:
    """Return the similarity of each sequence to `target`, from 0 to 1: (S + L) / 2L.

    S is the score of the best alignment, L the length of the longer of the two. The result is 1 if
    and only if the sequences are equal; two empty ones are.
    """
    found = []
    for sequence, score in zip(sequences, nw_scores(sequences, target)):
        longest = max(len(sequence), len(target))
        found.append((score + longest) / (2 * longest) if longest else 1.0)
    return found


def prefix_scores(sequences: Sequence[Symbols], target: Symbols) -> list[list[int]]:
    """Return the scores of all prefixes of each sequence: n + 1 numbers for n symbols.

    Number i is the best score of the first i symbols against any prefix of `target`: the
    maximum of a row of the table. A symbol of the target that is skipped costs 1 as soon as a later
    one is matched; symbols that are still missing at the end cost nothing.

    Time O(B N M), in N steps.

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


def _columns(
    sequences: Sequence[Symbols], target: Symbols, keep_moves: bool
) -> Iterator[tuple[BitColumns, int]]:
    """Yield, for each sequence, the `BitColumns` that hold it and its index in them."""
    for part in chunks([len(sequence) for sequence in sequences]):
        columns = BitColumns(sequences[part.start : part.stop], target, keep_moves)
        for k in range(len(part)):
            yield columns, k


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
            ops.append(make(Op, ("match" if a[i] == b[j] else "substitute", i, j)))
            i += 1
            j += 1
        elif kind == DELETE:
            ops.append(make(Op, ("delete", i, None)))
            i += 1
        else:
            ops.append(make(Op, ("insert", None, j)))
            j += 1
    return ops

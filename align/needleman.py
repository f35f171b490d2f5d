"""Global alignment of sequences: Needleman-Wunsch, for many pairs at once.

The algorithm is Needleman & Wunsch (1970), with affine gaps after Gotoh (1982). A linear gap scores
`gap` per symbol. An affine gap, a maximal run of k deleted or k inserted symbols, scores gap_open +
(k - 1) * gap. Scores are added as given, so costs are negative. Numbers may have either sign.
Integer scores are exact, float scores are exact up to rounding. Numbers that are not finite, and
numbers so large that a score could overflow, raise ValueError.

Symbols are hashable values that are compared as dictionary keys, so 1, 1.0 and True are the same
symbol. A str is the sequence of its characters.

Ties. Of several best alignments one is returned: read from its end, at each step a pair (match or
substitution) is preferred to a deletion, and a deletion to an insertion.

The standard scoring (match 1, mismatch -1, gap -1) is computed by `align.bitparallel`, which is
several times as fast. All other scorings are computed here.

How the table is filled. Cell (i, j) holds the best score of the first i symbols of a and the first
j of b.

- The cells of an anti-diagonal d = i + j do not depend on each other and are computed together. The
  arrays have one row per i, where row i is cell (i, d - i), and one column per pair of sequences.
  A cell depends only on cells above it and to its left, so padding at the ends of short sequences
  cannot reach a result.
- Cells hold score - gap * d. On this scale extending a gap adds 0 and opening one adds gap_open -
  gap, so all border cells except (0, 0) are equal. That is why two buffers can alternate without
  their borders being written again: inner cells never touch row 0, and row d is still untouched
  when diagonal d needs it for the border cell (d, 0).

Shapes: B pairs; N and M are the greatest lengths of a and of b. Time O(B N M), in N + M steps.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from align.bitparallel import DELETE, INSERT, PAIR, BitColumns, chunks

Symbols = Sequence[Hashable]
Number = int | float

# Stands for "whichever operation is best"; the other values are PAIR, DELETE and INSERT.
ANY = 3


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


def nw_score(
    a: Symbols,
    b: Symbols,
    *,
    match: Number = 1,
    mismatch: Number = -1,
    gap: Number = -1,
    gap_open: Number | None = None,
) -> Number:
    """Return the score of the best global alignment of `a` and `b`.

    Gaps are affine if `gap_open` is given, otherwise linear. Raises ValueError for scores that are
    not finite or too large.

    >>> nw_score("the owl saw".split(), "the old owl saw".split())  # three matches, one insertion
    2
    """
    scores = nw_score_batch([(a, b)], match=match, mismatch=mismatch, gap=gap, gap_open=gap_open)
    return scores[0].item()


def nw_score_batch(
    pairs: Sequence[tuple[Symbols, Symbols]],
    *,
    match: Number = 1,
    mismatch: Number = -1,
    gap: Number = -1,
    gap_open: Number | None = None,
) -> np.ndarray:
    """Return the best score of each of the `pairs`, an array (B,).

    It is int64, or float64 if one of the scoring parameters is a float. Memory O(B (N + M)).
    Parameters and errors are those of `nw_score`.
    """
    if _is_standard(match, mismatch, gap, gap_open):
        scores = [columns.score(k) for columns, k in _columns(pairs, keep_moves=False)]
        return np.array(scores, dtype=np.int64)
    return _Batch(pairs, match, mismatch, gap, gap_open).fill()


def nw_align(
    a: Symbols,
    b: Symbols,
    *,
    match: Number = 1,
    mismatch: Number = -1,
    gap: Number = -1,
    gap_open: Number | None = None,
) -> Alignment:
    """Return a best global alignment of `a` and `b`.

    The head of this module says how ties are broken. Parameters and errors are those of `nw_score`.

    >>> nw_align("ab", "b").ops
    [Op(kind='delete', i=0, j=None), Op(kind='match', i=1, j=0)]
    """
    return nw_align_batch([(a, b)], match=match, mismatch=mismatch, gap=gap, gap_open=gap_open)[0]


def nw_align_batch(
    pairs: Sequence[tuple[Symbols, Symbols]],
    *,
    match: Number = 1,
    mismatch: Number = -1,
    gap: Number = -1,
    gap_open: Number | None = None,
) -> list[Alignment]:
    """Return a best alignment of each of the `pairs`, in order.

    Memory: one byte per cell, B N M in all; with the standard scoring two bits per cell. Parameters
    and errors are those of `nw_score`.
    """
    if _is_standard(match, mismatch, gap, gap_open):
        alignments = []
        for columns, k in _columns(pairs, keep_moves=True):
            ops = _ops(columns.operations(k), columns.firsts[k], columns.second)
            alignments.append(Alignment(columns.score(k), ops))
        return alignments

    batch = _Batch(pairs, match, mismatch, gap, gap_open)
    moves: list[np.ndarray] = []
    scores = batch.fill(moves).tolist()
    return [Alignment(score, batch.trace(moves, column)) for column, score in enumerate(scores)]


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


def _finite(name: str, number: Number) -> Number:
    """Return the scoring parameter `name` as a Python number, which cannot wrap as NumPy's can.

    Raises ValueError unless it is finite and, if it is an integer, fits in 64 bits.
    """
    if isinstance(number, Integral):
        number = int(number)
        is_good = abs(number) < 2**63
    else:
        number = float(number)
        is_good = math.isfinite(number)

    if not is_good:
        raise ValueError(f"{name}={number}: must be a finite number of at most 64 bits")
    return number


def _is_standard(match: float, mismatch: float, gap: float, gap_open: float | None) -> bool:
    """Return whether this is the scoring of `align.bitparallel`, in integers."""
    scale = (match, mismatch, gap)
    return (
        gap_open is None
        and scale == (1, -1, -1)
        and all(isinstance(number, Integral) for number in scale)
    )


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


class _Batch:
    """A batch of pairs with one scoring.

    The symbols are integer ids in padded arrays, `a` (N, B) and `b` (M, B). The parameters of the
    scoring are on the scale of the cells (see the head of this module).
    """

    def __init__(
        self,
        pairs: Sequence[Any],
        match: float,
        mismatch: float,
        gap: float,
        gap_open: float | None,
    ):
        ids: dict[Hashable, int] = {}
        rows = [
            [[ids.setdefault(symbol, len(ids)) for symbol in pair[side]] for pair in pairs]
            for side in (0, 1)
        ]
        # (2, B): of a, of b
        self.lengths = np.array([[len(row) for row in side] for side in rows], dtype=np.int64)
        self.a, self.b = (_pad(side, np.min_scalar_type(len(ids))) for side in rows)

        match, mismatch, gap = map(_finite, ("match", "mismatch", "gap"), (match, mismatch, gap))
        self.affine = gap_open is not None
        opening = 0 if gap_open is None else _finite("gap_open", gap_open) - gap
        scale = (match - 2 * gap, mismatch - 2 * gap, opening)
        is_whole = all(isinstance(number, int) for number in scale)
        self.gap = gap if is_whole else float(gap)

        # No path's score exceeds `bound` in absolute value. `floor` marks impossible cells: it
        # stays below every score, whatever a path adds to it.
        bound = (len(self.a) + len(self.b) + 1) * max(map(abs, (*scale, gap)))
        floor = -2 * bound - 1
        if not (3 * bound < 2**62 if is_whole else math.isfinite(3 * bound)):
            raise ValueError(
                f"scores of up to ±{bound:.3g} overflow; give smaller match, mismatch, gap or "
                "gap_open"
            )

        if is_whole:
            self.dtype = np.min_scalar_type(floor - bound)
        else:
            self.dtype, floor = np.dtype(np.float64), -np.inf
        self.match, self.mismatch, self.opening, self.floor = map(self.dtype.type, (*scale, floor))

    def fill(self, moves: list[np.ndarray] | None = None) -> np.ndarray:
        """Fill the tables and return the scores (B,).

        If `moves` is given, the moves into the inner cells of each diagonal are appended to it.
        """
        lengths_a = self.lengths[0]
        total = self.lengths.sum(axis=0)

        # These are the results on diagonals 0 and 1, which have no inner cells.
        shifted = np.where(total == 0, self.dtype.type(0), self.opening)

        diagonals = self._affine(moves) if self.affine else self._linear(moves)
        for d, best in enumerate(diagonals, start=2):
            done = np.flatnonzero(total == d)
            shifted[done] = best[lengths_a[done], done]

        # Undo the shift of the cells, score - gap * d.
        return shifted.astype(np.result_type(self.dtype, np.int64)) + self.gap * total

    def trace(self, moves: list[np.ndarray], column: int) -> list[Op]:
        """Return the alignment of pair `column`, by following the moves back from its last cell."""
        a, b = self.a[:, column].tolist(), self.b[:, column].tolist()
        i, j = self.lengths[:, column].tolist()

        kinds = []
        last = ANY
        while i and j:
            # Row 0 of a diagonal's moves is its first inner cell.
            move = moves[i + j - 2].item(i - max(1, i + j - len(b)), column)
            if last == ANY:
                last = move >> 6
            kinds.append(last)

            i -= last != INSERT
            j -= last != DELETE
            last = move >> 2 * last & 3
        return _ops(kinds + [DELETE] * i + [INSERT] * j, a, b)

    def _diagonals(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield (inner, above, pair_scores) for the diagonals d = 2, 3, ...

        `inner` are the rows of the inner cells, `above` the rows before them, and `pair_scores`
        (rows, B) the score of pairing the two symbols of each cell.
        """
        n, m = len(self.a), len(self.b)

        # Along a diagonal b is read backwards: row i + m - d of its reversal is b[j - 1].
        reversed_b = self.b[::-1].copy()
        for d in range(2, n + m + 1) if n and m else ():
            first = max(1, d - m)
            end = min(n, d - 1) + 1

            symbols_a = self.a[first - 1 : end - 1]
            symbols_b = reversed_b[first + m - d : end + m - d]
            pair_scores = np.where(symbols_a == symbols_b, self.match, self.mismatch)
            yield slice(first, end), slice(first - 1, end - 1), pair_scores

    def _linear(self, moves: list[np.ndarray] | None) -> Iterator[np.ndarray]:
        """Yield the best scores (N + 1, B) on the diagonals 2, 3, ... with linear gaps.

        Moves have the format of `_affine`.
        """
        last, best = np.zeros((2, len(self.a) + 1, self.a.shape[1]), self.dtype)
        for inner, above, pair_scores in self._diagonals():
            # Until it is overwritten, `best` holds the diagonal before `last`.
            best[inner], kind = _best(best[above] + pair_scores, last[above], last[inner], moves)
            if moves is not None:
                assert kind is not None
                moves.append(kind << 6 | 0b111111)
            yield best
            last, best = best, last

    def _affine(self, moves: list[np.ndarray] | None) -> Iterator[np.ndarray]:
        """Yield the best scores (N + 1, B) of diagonals 2, 3, ... with affine gaps (Gotoh 1982).

        A move is a byte with four fields of two bits. Bits 6 and 7 hold the last operation of the
        best alignment that ends in the cell. The others hold the operation before it: bits 0 and 1
        if the last is PAIR, bits 2 and 3 if it is DELETE, bits 4 and 5 if it is INSERT. ANY in one
        of these means the best operation of the previous cell. That holds before every pair and,
        with linear gaps, before a gap as well.
        """
        shape = (len(self.a) + 1, self.a.shape[1])
        opening = self.opening

        last, best = np.full((2, *shape), opening)
        best[0] = 0  # cell (0, 0)

        # ending[k] (N + 1, B): the best scores of alignments whose last operation is k.
        ending, new = endings = np.full((2, 3, *shape), self.floor)
        endings[:, DELETE, 1:] = endings[:, INSERT, 0] = opening

        for inner, above, pair_scores in self._diagonals():
            pair, delete, insert = ending[:, above]
            new[DELETE, inner], before_delete = _best(
                pair + opening, delete, insert + opening, moves
            )

            pair, delete, insert = ending[:, inner]
            new[INSERT, inner], before_insert = _best(
                pair + opening, delete + opening, insert, moves
            )

            # Until it is overwritten, `best` holds the diagonal before `last`.
            new[PAIR, inner] = best[above] + pair_scores

            pair, delete, insert = new[:, inner]
            best[inner], kind = _best(pair, delete, insert, moves)
            best[0] = opening  # from diagonal 2 on no longer cell (0, 0)

            if moves is not None:
                assert kind is not None and before_insert is not None and before_delete is not None
                moves.append(kind << 6 | before_insert << 4 | before_delete << 2 | ANY)
            yield best
            last, best, ending, new = best, last, new, ending


def _pad(rows: list[list[int]], dtype: np.dtype) -> np.ndarray:
    """Return the rows as the columns of an array, padded with zeros."""
    length = max(map(len, rows), default=0)
    return np.array(list(zip_longest(*rows, fillvalue=0)), dtype).reshape(length, len(rows))


def _best(
    pair: np.ndarray,
    delete: np.ndarray,
    insert: np.ndarray,
    moves: list[np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the elementwise maximum, and the operation that attains it, if `moves` are recorded.

    Of several operations the first of PAIR, DELETE, INSERT counts.
    """
    top = np.maximum(np.maximum(pair, delete), insert)
    if moves is None:
        return top, None
    return top, (pair < top).view(np.uint8) * ((delete < top).view(np.uint8) + np.uint8(1))

"""Global alignment of sequences (Needleman & Wunsch 1970; affine gaps: Gotoh 1982), a ragged batch
of pairs at once.

A linear gap scores `gap` a symbol. An affine gap, a maximal run of k inserted or of k deleted
symbols, scores gap_open + (k - 1) * gap: its first symbol gap_open, each further one gap. Scores
are added as given, so costs are negative. All numbers may be of either sign; with integers the
result is exact, with floats it is so up to rounding. Numbers that are not finite, and numbers so
large that a score could overflow, are a ValueError.

Symbols are any hashables and are compared as dictionary keys, so 1 == 1.0 == True is one symbol; a
str is the sequence of its characters. Of several best alignments the one returned is, read from
its end, at each step a pair (match or substitute) if one can be had, else a delete, else an
insert.

The standard scoring (match 1, mismatch -1, gap -1) is done by `align.bitparallel`, several times
faster; all others here.

Cell (i, j) aligns the first i symbols of a with the first j of b. Two devices make the fill short
and fast:
- All cells of an anti-diagonal d = i + j are computed together, in arrays whose row i is cell (i,
  d - i) and whose columns are the pairs. No cell depends on one below or right of it, so padding
  cannot reach the cell of a result.
- Cells hold score - gap * d. On this scale extending a gap costs nothing, opening one costs
  gap_open - gap, and all border cells are alike but (0, 0), so that buffers used in turn keep
  their borders: inner cells never touch row 0, and none has yet been written to row d when
  diagonal d needs it for cell (d, 0).

Shapes: B pairs, N and M the greatest lengths of a and b. Time O(B N M) in N + M steps.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from align.bitparallel import DELETE, INSERT, PAIR, Columns, chunks

Symbols = Sequence[Hashable]
Number = int | float

ANY = 3  # beside PAIR, DELETE, INSERT: the last operation of an alignment that ends in some cell


class Op(NamedTuple):
    """One column of an alignment, e.g. ``Op("match", 0, 0)`` or ``Op("insert", None, 3)``.

    `kind` is "match" or "substitute" (a[i] stands against b[j]), "delete" (a[i] is missing in b,
    `j` is None) or "insert" (b[j] is missing in a, `i` is None).
    """

    kind: str
    i: int | None
    j: int | None


class Alignment(NamedTuple):
    """A best alignment: its score, and its operations, which spell out both sequences in order."""

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
    """Return the score of a best global alignment of `a` and `b`: linear gaps, or affine ones if
    `gap_open` is given.

    >>> nw_score("the owl saw".split(), "the old owl saw".split())  # three matches, one insert
    2
    """
    return nw_score_batch([(a, b)], match=match, mismatch=mismatch, gap=gap, gap_open=gap_open)[
        0
    ].item()


def nw_score_batch(
    pairs: Sequence[tuple[Symbols, Symbols]],
    *,
    match: Number = 1,
    mismatch: Number = -1,
    gap: Number = -1,
    gap_open: Number | None = None,
) -> np.ndarray:
    """Return the scores (B,) of the `pairs`, int64, or float64 if a parameter is a float. Memory
    O(B (N + M)).
    """
    if _is_standard(match, mismatch, gap, gap_open):
        return np.array(
            [columns.score(k) for columns, k in _columns(pairs, keep=False)], dtype=np.int64
        )
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
    """Return a best global alignment of `a` and `b`, ties broken as the module says.

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
    """Return a best alignment of each of the `pairs`. Memory: one byte a cell, B N M in all
    (standard scoring: 2 bits).
    """
    if _is_standard(match, mismatch, gap, gap_open):
        return [
            Alignment(
                columns.score(k), _ops(columns.operations(k), columns.firsts[k], columns.second)
            )
            for columns, k in _columns(pairs, keep=True)
        ]
    batch = _Batch(pairs, match, mismatch, gap, gap_open)
    moves: list[np.ndarray] = []
    scores = batch.fill(moves).tolist()
    return [Alignment(score, batch.trace(moves, column)) for column, score in enumerate(scores)]


def similarity(a: Symbols, b: Symbols) -> float:
    """Return (S + L) / 2L in [0, 1]: S = `nw_score(a, b)`, L the longer length; 1 exactly if a
    equals b, even empty.
    """
    return similarity_batch([a], b)[0].item()


def similarity_batch(completions: Sequence[Symbols], target: Symbols) -> np.ndarray:
    """Return the similarity (B,), float64, of each of the `completions` to `target`."""
    scores = nw_score_batch([(completion, target) for completion in completions])
    longest = np.array(
        [max(len(completion), len(target)) for completion in completions], dtype=np.int64
    )
    return np.where(longest == 0, 1.0, (scores + longest) / np.maximum(2 * longest, 1))


def _finite(name: str, number: Number) -> Number:
    """Return the parameter `name` as a Python number, so that no narrow NumPy integer wraps.

    Raises ValueError unless it is finite, and fits 64 bits if it is an integer.
    """
    if isinstance(number, Integral):
        number = int(number)
        is_good = abs(number) < 2**63
    else:
        number = float(number)
        is_good = math.isfinite(number)

    if not is_good:
        raise ValueError(f"{name}={number}; give a finite number, of at most 64 bits")
    return number


def _is_standard(match: float, mismatch: float, gap: float, gap_open: float | None) -> bool:
    scale = (match, mismatch, gap)
    return (
        gap_open is None
        and scale == (1, -1, -1)
        and all(isinstance(number, Integral) for number in scale)
    )


def _columns(pairs: Iterable[Any], keep: bool) -> Iterator[tuple[Columns, int]]:
    """Yield for each pair the columns that it is in, and its place there: neighbours with one and
    the same b share them.
    """
    for _, neighbours in groupby(pairs, key=lambda pair: id(pair[1])):
        firsts, seconds = zip(*neighbours)
        for part in chunks([len(first) for first in firsts]):
            columns = Columns(firsts[part.start : part.stop], seconds[0], keep)
            yield from ((columns, k) for k in range(len(part)))


def _ops(kinds: list[int], a: Symbols, b: Symbols) -> list[Op]:
    """Return the operations whose kinds are given from the end."""
    ops, i, j, make = (
        [],
        0,
        0,
        tuple.__new__,
    )  # Op(...) takes twice the time, which would be most of it
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
    """Pairs as integer ids in padded arrays, a (N, B) and b (M, B), and the scoring on the scale
    of the cells.
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
        self.lengths = np.array(
            [[len(row) for row in side] for side in rows], dtype=np.int64
        )  # (2, B)
        self.a, self.b = (_pad(side, np.min_scalar_type(len(ids))) for side in rows)
        match, mismatch, gap = map(_finite, ("match", "mismatch", "gap"), (match, mismatch, gap))
        self.affine = gap_open is not None
        opening = 0 if gap_open is None else _finite("gap_open", gap_open) - gap
        scale = (match - 2 * gap, mismatch - 2 * gap, opening)
        is_whole = all(isinstance(number, int) for number in scale)
        self.gap = gap if is_whole else float(gap)

        # No path's score exceeds `bound` in size; `floor` stays worse than any of them whatever a
        # path adds to it.
        bound = (len(self.a) + len(self.b) + 1) * max(map(abs, (*scale, gap)))
        floor = -2 * bound - 1
        if not (3 * bound < 2**62 if is_whole else math.isfinite(3 * bound)):
            raise ValueError(
                f"scores of up to {bound:.3g} in size overflow; give smaller match, mismatch, gap "
                "or gap_open"
            )

        if is_whole:
            self.dtype = np.min_scalar_type(floor - bound)
        else:
            self.dtype, floor = np.dtype(np.float64), -np.inf
        self.match, self.mismatch, self.opening, self.floor = map(self.dtype.type, (*scale, floor))

    def fill(self, moves: list[np.ndarray] | None = None) -> np.ndarray:
        """Return the scores (B,), and append to `moves`, if given, the moves into the inner cells
        of each diagonal.
        """
        lengths_a, total = self.lengths[0], self.lengths.sum(axis=0)
        shifted = np.where(
            total == 0, self.dtype.type(0), self.opening
        )  # right for diagonals 0 and 1
        diagonals = self._affine(moves) if self.affine else self._linear(moves)
        for d, best in enumerate(diagonals, start=2):
            done = np.flatnonzero(total == d)
            shifted[done] = best[lengths_a[done], done]
        return shifted.astype(np.result_type(self.dtype, np.int64)) + self.gap * total

    def trace(self, moves: list[np.ndarray], column: int) -> list[Op]:
        """Return the operations of pair `column`, found from its last cell backwards."""
        a, b = self.a[:, column].tolist(), self.b[:, column].tolist()
        i, j = self.lengths[:, column].tolist()
        kinds, last = [], ANY
        while i and j:
            move = moves[i + j - 2].item(i - max(1, i + j - len(b)), column)
            if last == ANY:
                last = move >> 6
            kinds.append(last)
            i -= last != INSERT
            j -= last != DELETE
            last = move >> 2 * last & 3
        return _ops(kinds + [DELETE] * i + [INSERT] * j, a, b)

    def _diagonals(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield for d = 2, 3, ... the rows of the inner cells, the rows above them, the scores of
        their pairs.
        """
        n, m = len(self.a), len(self.b)
        reversed_b = self.b[::-1].copy()  # row i + m - d is b[j - 1]
        for d in range(2, n + m + 1) if n and m else ():
            first, end = max(1, d - m), min(n, d - 1) + 1
            equal = self.a[first - 1 : end - 1] == reversed_b[first + m - d : end + m - d]
            yield (
                slice(first, end),
                slice(first - 1, end - 1),
                np.where(equal, self.match, self.mismatch),
            )

    def _linear(self, moves: list[np.ndarray] | None) -> Iterator[np.ndarray]:
        """Yield the best scores (N + 1, B) of the diagonals 2, 3, ... with linear gaps. For moves
        see `_affine`.
        """
        last, best = np.zeros((2, len(self.a) + 1, self.a.shape[1]), self.dtype)
        for (
            inner,
            above,
            pair_scores,
        ) in self._diagonals():  # `best` comes in as the diagonal before `last`
            best[inner], kind = _best(best[above] + pair_scores, last[above], last[inner], moves)
            if moves is not None:
                assert kind is not None
                moves.append(kind << 6 | 0b111111)
            yield best
            last, best = best, last

    def _affine(self, moves: list[np.ndarray] | None) -> Iterator[np.ndarray]:
        """Yield the same with affine gaps. `ending[k]` are the best scores of alignments whose
        last operation is k.

        A move holds four fields of two bits: the last operation of the best alignment that ends in
        the cell (bits 6 and 7), and which one came before it if the last was PAIR (bits 0 and 1),
        DELETE (2, 3) or INSERT (4, 5). ANY stands for the best of the cell before, as always
        before a pair, and with linear gaps before a gap as well.
        """
        shape, opening = (len(self.a) + 1, self.a.shape[1]), self.opening
        last, best = np.full((2, *shape), opening)
        best[0] = 0  # cell (0, 0)
        ending, new = endings = np.full((2, 3, *shape), self.floor)
        endings[:, DELETE, 1:] = endings[:, INSERT, 0] = opening
        for (
            inner,
            above,
            pair_scores,
        ) in self._diagonals():  # `best` comes in as the diagonal before `last`
            pair, delete, insert = ending[:, above]
            new[DELETE, inner], before_delete = _best(
                pair + opening, delete, insert + opening, moves
            )
            pair, delete, insert = ending[:, inner]
            new[INSERT, inner], before_insert = _best(
                pair + opening, delete + opening, insert, moves
            )
            new[PAIR, inner] = best[above] + pair_scores
            pair, delete, insert = new[:, inner]
            best[inner], kind = _best(pair, delete, insert, moves)
            best[0] = opening
            if moves is not None:
                assert kind is not None and before_insert is not None and before_delete is not None
                moves.append(kind << 6 | before_insert << 4 | before_delete << 2 | ANY)
            yield best
            last, best, ending, new = best, last, new, ending


def _pad(rows: list[list[int]], dtype: np.dtype) -> np.ndarray:
    """Return the rows as the columns of an array, filled up with zeros."""
    length = max(map(len, rows), default=0)
    return np.array(list(zip_longest(*rows, fillvalue=0)), dtype).reshape(length, len(rows))


def _best(
    pair: np.ndarray,
    delete: np.ndarray,
    insert: np.ndarray,
    moves: list[np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the greatest of three, and, if moves are wanted, which: the first of PAIR, DELETE,
    INSERT that is it.
    """
    top = np.maximum(np.maximum(pair, delete), insert)
    if moves is None:
        return top, None
    return top, (pair < top).view(np.uint8) * ((delete < top).view(np.uint8) + np.uint8(1))

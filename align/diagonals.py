"""Needleman-Wunsch with any scoring, for many pairs at once, by anti-diagonals.

`align.needleman` defines scores, ties and errors.

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
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from numbers import Integral
from typing import Any

import numpy as np

from align.bitparallel import DELETE, INSERT, PAIR

Number = int | float

# Stands for "whichever operation is best"; the other values are PAIR, DELETE and INSERT.
ANY = 3


class Batch:
    """The alignment tables of a batch of pairs with one scoring.

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

    def operations(self, moves: list[np.ndarray], k: int) -> list[int]:
        """Return the best alignment of pair `k`, from its end to its beginning.

        Each operation is PAIR, DELETE or INSERT. The moves are followed back from the last cell.
        """
        longest_b = len(self.b)
        i, j = self.lengths[:, k].tolist()

        operations = []
        last = ANY
        while i and j:
            # Row 0 of a diagonal's moves is its first inner cell.
            move = moves[i + j - 2].item(i - max(1, i + j - longest_b), k)
            if last == ANY:
                last = move >> 6
            operations.append(last)

            i -= last != INSERT
            j -= last != DELETE
            last = move >> 2 * last & 3
        return operations + [DELETE] * i + [INSERT] * j

    def _diagonals(self) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yield (inner, above, pair_scores) for the diagonals d = 2, 3, ...

        `inner` are the rows of the inner cells, `above` the rows before them, and `pair_scores`
        (rows, B) the score of pairing the two symbols of each cell.
        """
        n, m = len(self.a), len(self.b)

        # Along a diagonal b is read backwards: row i + m - d of its reversal is b[j - 1].
        reversed_b = self.b[::-1].copy()
        for d in range(2, n + m + 1):
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

"""Needleman-Wunsch with any scoring, for many pairs at once, by anti-diagonals.

`align.needleman` defines scores, ties and errors.

How the table is filled. Cell (i, j) holds the best score of the first i symbols of a and the first
j of b.

- The cells of an anti-diagonal d = i + j do not depend on each other and are computed together. The
  arrays have one row per i, where row i is cell (i, d - i), and one column per pair of sequences.
  A cell depends only on cells above it and to its left, so padding at the ends of short sequences
  cannot reach a result.
- Cells hold score - gap * d. On this scale a gap adds 0, so all border cells are 0. That is why two
  buffers can alternate without their borders being written again: inner cells never touch row 0,
  and row d is still untouched when diagonal d needs it for the border cell (d, 0).

Shapes: B pairs; N and M are the greatest lengths of a and of b. Time O(B N M), in N + M steps.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from numbers import Integral
from typing import Any

import numpy as np

from align.bitparallel import DELETE, INSERT

Number = int | float


class Batch:
    """The alignment tables of a batch of pairs with one scoring.

    The symbols are integer ids in padded arrays, `a` (N, B) and `b` (M, B). The parameters of the
    scoring are on the scale of the cells (see the head of this module).
    """

    def __init__(self, pairs: Sequence[Any], match: float, mismatch: float, gap: float):
        ids: dict[Hashable, int] = {}
        rows = [
            [[ids.setdefault(symbol, len(ids)) for symbol in pair[side]] for pair in pairs]
            for side in (0, 1)
        ]
        # (2, B): of a, of b
        self.lengths = np.array([[len(row) for row in side] for side in rows], dtype=np.int64)
        self.a, self.b = (_pad(side, np.min_scalar_type(len(ids))) for side in rows)

        match, mismatch, gap = map(_finite, ("match", "mismatch", "gap"), (match, mismatch, gap))
        scale = (match - 2 * gap, mismatch - 2 * gap)
        is_whole = all(isinstance(number, int) for number in scale)
        self.gap = gap if is_whole else float(gap)

        # No cell exceeds `bound` in absolute value, nor does what is added to undo the shift.
        bound = (len(self.a) + len(self.b) + 1) * max(map(abs, (*scale, gap)))
        if not (2 * bound < 2**62 if is_whole else math.isfinite(2 * bound)):
            raise ValueError(
                f"scores of up to ±{bound:.3g} overflow; give smaller match, mismatch or gap"
            )

        self.dtype = np.min_scalar_type(-bound - 1) if is_whole else np.dtype(np.float64)
        self.match, self.mismatch = map(self.dtype.type, scale)

    def fill(self, moves: list[np.ndarray] | None = None) -> np.ndarray:
        """Fill the tables and return the scores (B,).

        If `moves` is given, the moves into the inner cells of each diagonal are appended to it: the
        last operation of the best alignment that ends there.
        """
        lengths_a = self.lengths[0]
        total = self.lengths.sum(axis=0)

        # Diagonals 0 and 1 have no inner cells.
        shifted = np.zeros(len(total), self.dtype)

        last, best = np.zeros((2, len(self.a) + 1, self.a.shape[1]), self.dtype)
        for d, (inner, above, pair_scores) in enumerate(self._diagonals(), start=2):
            # Until it is overwritten, `best` holds the diagonal before `last`.
            pair, delete, insert = best[above] + pair_scores, last[above], last[inner]
            top = np.maximum(np.maximum(pair, delete), insert)
            best[inner] = top
            if moves is not None:
                # Of several best operations the first of PAIR, DELETE, INSERT (0, 1, 2) counts.
                is_gap, is_insert = (pair < top).view(np.uint8), (delete < top).view(np.uint8)
                moves.append(is_gap * (is_insert + np.uint8(1)))

            done = np.flatnonzero(total == d)
            shifted[done] = best[lengths_a[done], done]
            last, best = best, last

        # Undo the shift of the cells, score - gap * d.
        return shifted.astype(np.result_type(self.dtype, np.int64)) + self.gap * total

    def operations(self, moves: list[np.ndarray], k: int) -> list[int]:
        """Return the best alignment of pair `k`, from its end to its beginning.

        Each operation is PAIR, DELETE or INSERT. The moves are followed back from the last cell.
        """
        longest_b = len(self.b)
        i, j = self.lengths[:, k].tolist()

        operations = []
        while i and j:
            # Row 0 of a diagonal's moves is its first inner cell.
            move = moves[i + j - 2].item(i - max(1, i + j - longest_b), k)
            operations.append(move)
            i -= move != INSERT
            j -= move != DELETE
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


def _pad(rows: list[list[int]], dtype: np.dtype) -> np.ndarray:
    """Return the rows as the columns of an array, padded with zeros."""
    length = max(map(len, rows), default=0)
    return np.array(list(zip_longest(*rows, fillvalue=0)), dtype).reshape(length, len(rows))


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

"""Alignment under the standard scoring (match 1, mismatch -1, gap -1), with bit vectors.

The method is BitPAl (Loving, Hernandez & Benson 2014), which extends Myers' bit-vector algorithm
(1999) from edit distance to general integer scores. It stores no scores, only the differences
between neighbouring cells, and one operation on Python's long integers computes thousands of them.

Recurrence. Let T(i, j) be the best score of the first i symbols of `first` and the first j of
`second`, plus i + j. In T a gap adds 0, a mismatch 1, and a match 3. A cell receives two
differences:

    v = T(i, j-1) - T(i-1, j-1)    from the column before
    h = T(i-1, j) - T(i-1, j-1)    from the row above

Its own value is then T(i, j) = T(i-1, j-1) + d, where d is 3 if the symbols are equal and
max(h, v, 1) otherwise. The cell passes on v' = d - h to column j + 1, and h' = d - v to row i + 1.
At the borders all differences are 0, so by induction each is 0, 1, 2 or 3.

Encoding. Bit i - 1 of an integer belongs to row i. The integers v0, v1, v2 mark the rows with
v <= 0, v <= 1, v <= 2, and h1, h2, h3 those with h >= 1, h >= 2, h >= 3. In this encoding the
recurrence reads:

    h' >= 3  if v = 0 and (equal or h >= 3)
    h' >= 2  if v <= 1 and (equal or h >= 3), or v = 0 and h >= 2
    h' >= 1  if v <= 2 and (equal or h >= 3), or v <= 1 and h >= 2, or v = 0
    v' <= 0  if h >= 1, and (h >= 2 or v <= 1), and (h >= 3 or (v <= 2 and unequal))
    v' <= 1  if (h >= 1 or v <= 1), and (h >= 2 or (v <= 2 and unequal))
    v' <= 2  if h >= 1 or (v <= 2 and unequal)

The first two lines depend on themselves one row above. As in Myers' algorithm, the carries of an
addition propagate them down the whole column.

Batches. Several `firsts` that are compared with the same `second` lie side by side in the same
integers. A zero bit after each of them stops the carries.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

PAIR, DELETE, INSERT = range(3)

# The most bits that v0, v1 and v2 have together. Longer integers are hardly faster per cell, and
# the masks of the symbols take more memory.
CHUNK_BITS = 72_000


def chunks(lengths: Sequence[int]) -> Iterator[range]:
    """Yield ranges of consecutive sequences that fit into one set of integers.

    `lengths` are the numbers of symbols. A sequence that exceeds CHUNK_BITS gets its own range.
    """
    start = bits = 0
    for index, length in enumerate(lengths):
        if index > start and bits + 3 * (length + 1) > CHUNK_BITS:
            yield range(start, index)
            start, bits = index, 0
        bits += 3 * (length + 1)

    if lengths:
        yield range(start, len(lengths))


def _carries(propagate: int, generate: int) -> int:
    """Return the bits that receive a carry when `generate` is added to `propagate`.

    The bits of `generate` must be a subset of those of `propagate`. A carry starts above each bit
    of `generate` and moves up through consecutive bits of `propagate`.
    """
    return propagate + generate ^ propagate ^ generate


class BitColumns:
    """The alignment tables of several `firsts` against one `second`, computed column by column.

    `operations` needs the moves of every column, which are kept only if `keep_moves` is True: two
    bits per cell. Time O(n m / w) for sequences of n and m symbols, where w is the width of a
    machine word.
    """

    def __init__(
        self, firsts: Sequence[Sequence[Hashable]], second: Sequence[Hashable], keep_moves: bool
    ):
        self.firsts, self.second = firsts, second
        # The first bit of each sequence; one bit between neighbours stays zero.
        self.starts = list(accumulate((len(first) + 1 for first in firsts), initial=0))

        # Per column: where unequal symbols are best paired, and where a deletion is best.
        self.pairs: list[int] = []
        self.deletes: list[int] = []

        ones = sum((1 << len(first)) - 1 << start for first, start in zip(firsts, self.starts))
        masks = self._masks()

        # All differences are 0 at the border, so v <= 0, v <= 1 and v <= 2 hold in every row.
        v0 = v1 = v2 = ones
        for symbol in second:
            equal = masks[symbol]

            # The differences from the row above, as in the table at the head of this module.
            h3 = _carries(v0, v0 & equal)
            three = equal | h3
            two = v1 & three
            h2 = _carries(v0 | two, two)
            h1 = (v2 & three | v1 & h2 | v0) << 1 & ones

            # The differences to the next column.
            low = v2 & (ones ^ equal)
            either = v1 | h2
            v0, v1, v2 = h1 & either & (h3 | low), (h1 | v1) & (h2 | low), h1 | low

            if keep_moves:
                self.pairs.append(either ^ h2)  # v <= 1 and h <= 1, so d = 1
                self.deletes.append(v0)
        self.last = v0, v1, v2

    def _masks(self) -> dict[Hashable, int]:
        """Return, for each symbol of `second`, the integer that marks where `firsts` have it."""
        rows = {symbol: bytearray(self.starts[-1] // 8 + 1) for symbol in set(self.second)}
        for first, start in zip(self.firsts, self.starts):
            for bit, symbol in enumerate(first, start):
                if symbol in rows:
                    rows[symbol][bit >> 3] |= 1 << (bit & 7)
        return {symbol: int.from_bytes(row, "little") for symbol, row in rows.items()}

    def score(self, k: int) -> int:
        """Return the score of the best alignment of `firsts[k]` and `second`."""
        n, m, start = len(self.firsts[k]), len(self.second), self.starts[k]

        # T(n, m) is the sum of v over the last column. Each row has v = 3 - (v <= 0) - (v <= 1) -
        # (v <= 2), where a comparison counts 1 if it holds.
        marks = sum((v >> start & (1 << n) - 1).bit_count() for v in self.last)
        return 3 * n - marks - n - m

    def operations(self, k: int) -> list[int]:
        """Return the best alignment of `firsts[k]` and `second`, from its end to its beginning.

        Each operation is PAIR, DELETE or INSERT. Where several are best, a pair is preferred to a
        deletion, and a deletion to an insertion.
        """
        first, second, start = self.firsts[k], self.second, self.starts[k]
        pairs, deletes = self.pairs, self.deletes

        operations = []
        i, j = len(first) - 1, len(second) - 1
        while i >= 0 <= j:
            # Identity first, because a symbol need not equal itself (NaN).
            if first[i] is second[j] or first[i] == second[j] or pairs[j] & 1 << start + i:
                operations.append(PAIR)
                i -= 1
                j -= 1
            elif deletes[j] & 1 << start + i:
                operations.append(DELETE)
                i -= 1
            else:
                operations.append(INSERT)
                j -= 1
        return operations + [DELETE] * (i + 1) + [INSERT] * (j + 1)

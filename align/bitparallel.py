"""The standard scoring (match 1, mismatch -1, gap -1) by long integers: thousands of cells in one
operation.

Let T(i, j) be the best score of the first i symbols of one sequence and the first j of another,
plus i + j. In T a gap counts 0, a mismatch 1, a match 3. Into cell (i, j) come v = T(i, j - 1) -
T(i - 1, j - 1) and h = T(i - 1, j) - T(i - 1, j - 1), and

    T(i, j) - T(i - 1, j - 1) = 3 if the symbols are equal, else max(h, v, 1).

Out of it go v' = that - h, to column j + 1, and h' = that - v, to row i + 1. All are 0, 1, 2 or 3,
by induction from 0 at the borders. A whole column is computed at once (Myers 1999; Loving,
Hernandez & Benson 2014): the integers v0, v1, v2 have bit i - 1 set where v is at most 0, 1, 2,
and h1, h2, h3 where h is at least 1, 2, 3. Row by row,

    h' >= 3 where v = 0 and (equal or h >= 3)
    h' >= 2 where v <= 1 and (equal or h >= 3), or v = 0 and h >= 2
    h' >= 1 where v <= 2 and (equal or h >= 3), or v <= 1 and h >= 2, or v = 0
    v' <= 0 where h >= 1, and h >= 2 or v <= 1, and h >= 3 or (v <= 2 and unequal)
    v' <= 1 where h >= 1 or v <= 1, and h >= 2 or (v <= 2 and unequal)
    v' <= 2 where h >= 1 or (v <= 2 and unequal)

of which the first two spread down the column as the carries of an addition do.

Several first sequences that are held against one second sequence stand side by side in the
integers, each with a bit of 0 behind it, where carries end.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

PAIR, DELETE, INSERT = range(3)
# bits in v0, v1, v2 together: longer integers are hardly faster, and the masks take memory
SIDE_BY_SIDE = 72_000


def chunks(lengths: Sequence[int]) -> Iterator[range]:
    """Yield ranges of neighbours that are short enough, with `lengths` symbols each, to stand side
    by side.
    """
    start = bits = 0
    for place, length in enumerate(lengths):
        if place > start and bits + 3 * (length + 1) > SIDE_BY_SIDE:
            yield range(start, place)
            start, bits = place, 0
        bits += 3 * (length + 1)
    if lengths:
        yield range(start, len(lengths))


def _carries(through: int, start: int) -> int:
    """Return the carries into each bit of through + start: they begin behind the bits `start`, a
    part of the bits `through`, and run on through the others of these.
    """
    return through + start ^ through ^ start


class Columns:
    """The columns of several first sequences `firsts` against one `second`; what `operations` asks
    for only if `keep`.
    """

    def __init__(
        self, firsts: Sequence[Sequence[Hashable]], second: Sequence[Hashable], keep: bool
    ):
        self.firsts, self.second = firsts, second
        self.starts = list(accumulate((len(first) + 1 for first in firsts), initial=0))
        self.pairs, self.deletes = (
            [],
            [],
        )  # [j]: where, of unequal symbols, a pair is best; where a delete is
        ones = sum((1 << len(first)) - 1 << start for first, start in zip(firsts, self.starts))
        v0 = v1 = v2 = ones
        masks = self._masks()
        for symbol in second:
            equal = masks[symbol]
            h3 = _carries(v0, v0 & equal)
            three = equal | h3
            two = v1 & three
            h2 = _carries(v0 | two, two)
            h1 = (v2 & three | v1 & h2 | v0) << 1 & ones
            low, either = v2 & (ones ^ equal), v1 | h2
            v0, v1, v2 = h1 & either & (h3 | low), (h1 | v1) & (h2 | low), h1 | low
            if keep:
                self.pairs.append(either ^ h2)  # v <= 1 and h <= 1
                self.deletes.append(v0)
        self.last = v0, v1, v2

    def _masks(self) -> dict[Hashable, int]:
        """Return for each symbol of `second` the integer with a bit set wherever it stands in
        `firsts`.
        """
        rows = {symbol: bytearray(self.starts[-1] // 8 + 1) for symbol in set(self.second)}
        for first, start in zip(self.firsts, self.starts):
            for place, symbol in enumerate(first, start):
                if symbol in rows:
                    rows[symbol][place >> 3] |= 1 << (place & 7)
        return {symbol: int.from_bytes(row, "little") for symbol, row in rows.items()}

    def score(self, k: int) -> int:
        """Return the best score of `firsts[k]` and `second`."""
        n, m, start = len(self.firsts[k]), len(self.second), self.starts[k]
        below = sum(
            (v >> start & (1 << n) - 1).bit_count() for v in self.last
        )  # T(n, m), the sum of v, is 3 n - below
        return 3 * n - below - n - m

    def operations(self, k: int) -> list[int]:
        """Return the operations of the best alignment of `firsts[k]` and `second`, from its end:
        of several, at each step a pair if one can be had, else a delete, else an insert.
        """
        first, second, start, pairs, deletes = (
            self.firsts[k],
            self.second,
            self.starts[k],
            self.pairs,
            self.deletes,
        )
        i, j, made = len(first) - 1, len(second) - 1, []
        while i >= 0 <= j:
            if first[i] is second[j] or first[i] == second[j] or pairs[j] & 1 << start + i:
                made.append(PAIR)
                i -= 1
                j -= 1
            elif deletes[j] & 1 << start + i:
                made.append(DELETE)
                i -= 1
            else:
                made.append(INSERT)
                j -= 1
        return made + [DELETE] * (i + 1) + [INSERT] * (j + 1)

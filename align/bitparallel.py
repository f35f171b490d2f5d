"""The standard scoring (match 1, mismatch -1, gap -1) by machine words: 64 cells and more in one operation.

The best score of two sequences of n and m symbols is S = LCS - n - m, where LCS is the length of the longest common subsequence
of the sequences with each symbol w written as the three ``$ w w`` ($ being a symbol of nobody's). LCS lengths come a whole
column at a time from additions and ands of long integers (Crochemore et al. 2001; Hyyrö 2004): column j is an
integer whose bit k is 0 where the length grows from row k to row k + 1. Several first sequences that are held against one
second sequence stand side by side in the integers, each with a bit of 0 behind it that stops the carry.

Let D(i, j) be the best score of the first i and j symbols. The three bits of row i in column j tell D(i, j) - D(i - 1, j),
which all but decides the last operation; where it does not, bits are counted.
"""
from collections.abc import Hashable, Iterator, Sequence

PAIR, DELETE, INSERT = range(3)
SIDE_BY_SIDE = 6000  # bits: longer integers cost more than the loop that they save


def chunks(lengths: Sequence[int]) -> Iterator[range]:
    """Yield ranges of neighbours that are short enough, with `lengths` symbols each, to stand side by side."""
    start = bits = 0
    for place, length in enumerate(lengths):
        if place > start and bits + 3 * length + 1 > SIDE_BY_SIDE:
            yield range(start, place)
            start, bits = place, 0
        bits += 3 * length + 1
    if lengths:
        yield range(start, len(lengths))


class Columns:
    """The columns of several first sequences `firsts` against one `second`; `keep` all of them for `operations`, or the last alone."""

    def __init__(self, firsts: Sequence[Sequence[Hashable]], second: Sequence[Hashable], keep: bool):
        self.firsts, self.second, self.starts = firsts, second, []
        masks, dollars, ones, start = dict.fromkeys(second, 0), 0, 0, 0
        for first in firsts:
            self.starts.append(start)
            three = 6 << start  # bits 1 and 2 of a symbol's three
            for symbol in first:
                if symbol in masks:
                    masks[symbol] |= three
                three <<= 3
            width = 3 * len(first)
            ones |= ((1 << width) - 1) << start
            dollars |= ((1 << width) - 1) // 7 << start
            start += width + 1
        column = ones
        self.columns = [column]  # 0, 1, ..., or the last alone
        for symbol in second:
            grown = column & dollars
            column = (column + grown | column - grown) & ones
            mask = masks[symbol]
            if mask:
                grown = column & mask
                column = (column + grown | column - grown) & ones
                grown = column & mask
                column = (column + grown | column - grown) & ones
            if keep:
                self.columns.append(column)
            else:
                self.columns[0] = column

    def score(self, k: int) -> int:
        """Return the best score of `firsts[k]` and `second`."""
        n = len(self.firsts[k])
        bits = self.columns[-1] >> self.starts[k] & (1 << 3 * n) - 1
        return 3 * n - bits.bit_count() - n - len(self.second)

    def operations(self, k: int) -> list[int]:
        """Return the operations of the best alignment of `firsts[k]` and `second`, from its end: of several, at each step a
        pair if one can be had, else a delete, else an insert."""
        first, second, start, columns = self.firsts[k], self.second, self.starts[k], self.columns
        i, j, made = len(first), len(second), []
        while i and j:
            mine, other = first[i - 1], second[j - 1]
            if mine is other or mine == other:
                i -= 1
                j -= 1
                made.append(PAIR)
                continue
            low, kind = 3 * i - 3, PAIR
            if (columns[j] >> start + low & 7) == 7:  # D(i, j) = D(i - 1, j) - 1, so a delete is as good as any
                below = (1 << low) - 1
                if (columns[j - 1] >> start & below).bit_count() != (columns[j] >> start & below).bit_count() + 1:
                    kind = DELETE  # for D(i - 1, j) > D(i - 1, j - 1)
            elif (columns[j - 1] >> start + low & 7).bit_count() < 2:
                kind = INSERT  # for D(i, j - 1) > D(i - 1, j - 1)
            i -= kind != INSERT
            j -= kind != DELETE
            made.append(kind)
        return made + [DELETE] * i + [INSERT] * j

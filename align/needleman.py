"""Words, and the global alignment of two sequences: Needleman-Wunsch, for many pairs at once.

A word is a maximal run of non-whitespace characters, after the text was put into Unicode
normalisation form C. So a word is the same whether its accents are composed or combining
characters. Punctuation is part of the word that it touches.

The algorithm is Needleman & Wunsch (1970): a match scores 1, a mismatch -1, and a gap, which is one
deleted or inserted symbol, -1. It is computed with bit vectors (`BitColumns`).

Symbols are hashable values, such as words or pairs of words. A str is the sequence of its
characters.

Ties. Of several best alignments one is returned: read from its end, at each step a pair (match or
substitution) is preferred to a deletion, and a deletion to an insertion.

Shapes: B pairs; N and M are the lengths of a and of b.
"""

import re
import unicodedata
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

Symbols = Sequence[Hashable]
Pairs = Sequence[tuple[Symbols, Symbols]]

_WORD = re.compile(r"\S+")


def normalise(text: str) -> str:
    """Return `text` in Unicode normalisation form C (Unicode Standard Annex 15)."""
    return unicodedata.normalize("NFC", text)


def split_words(text: str) -> list[str]:
    """Return the words of `text`, in order.

    >>> split_words(" The  owl,\\nit seems. ")
    ['The', 'owl,', 'it', 'seems.']
    """
    return _WORD.findall(normalise(text))


def word_ends(text: str) -> list[int]:
    """Return the offset in `text` (in characters) at which each word of `split_words(text)` ends.

    The offsets refer to the text before normalisation, which never joins or splits words.

    >>> word_ends(" The  owl,")
    [4, 10]
    """
    return [match.end() for match in _WORD.finditer(text)]


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

    score: int
    ops: list[Op]


def nw_score_batch(pairs: Pairs) -> np.ndarray:
    """Return the score of the best global alignment of each of the `pairs`, int64 (B,).

    Three matches and one insertion; memory O(B (N + M)):

    >>> nw_score_batch([("the owl saw".split(), "the old owl saw".split())]).tolist()
    [2]
    """
    tables = _tables(pairs, keep_moves=False)
    return np.array([table.score(k) for table, k in tables], np.int64)


def nw_align(a: Symbols, b: Symbols) -> Alignment:
    """Return a best global alignment of `a` and `b`, see `nw_align_batch`.

    >>> nw_align("ab", "b").ops
    [Op(kind='delete', i=0, j=None), Op(kind='match', i=1, j=0)]
    """
    return nw_align_batch([(a, b)])[0]


def nw_align_batch(pairs: Pairs) -> list[Alignment]:
    """Return a best alignment of each of the `pairs`, in order. Two bits per cell are kept."""
    return [table.alignment(k) for table, k in _tables(pairs, keep_moves=True)]


def similarity_batch(completions: Sequence[Symbols], target: Symbols) -> np.ndarray:
    """Return the similarity of each of the `completions` to `target`: (S + L) / 2L, float64 (B,).

    S is the score of the best alignment, L the length of the longer sequence. The similarity is
    1 if and only if the sequences are equal, and never below 0.
    """
    scores = nw_score_batch([(completion, target) for completion in completions])
    longest = np.array([max(len(each), len(target)) for each in completions], dtype=np.int64)
    return np.where(longest == 0, 1.0, (scores + longest) / np.maximum(2 * longest, 1))


def prefix_scores(sequences: Sequence[Symbols], target: Symbols) -> list[list[int]]:
    """Return the scores of all prefixes of each sequence: n + 1 numbers for n symbols.

    Number i is the best score of the first i symbols against any prefix of `target`: the
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


def _tables(pairs: Pairs, *, keep_moves: bool) -> Iterator[tuple["BitColumns", int]]:
    """Yield the tables that each pair is in, and its place there."""
    # Neighbours whose b is the same object have one table together.
    for _, neighbours in groupby(pairs, key=lambda pair: id(pair[1])):
        firsts, seconds = zip(*neighbours)
        table = BitColumns(firsts, seconds[0], keep_moves)
        for k in range(len(firsts)):
            yield table, k


def _carries(propagate: int, generate: int) -> int:
    """Return the bits that receive a carry when `generate`, a subset, is added to `propagate`.

    A carry starts above each bit of `generate` and moves up through consecutive bits of
    `propagate`.
    """
    return propagate + generate ^ propagate ^ generate


class BitColumns:
    """The alignment tables of several `firsts` against one `second`, computed column by column.

    `alignment` needs the moves of every column, which are kept only if `keep_moves` is True: two
    bits per cell. Time O(n m / w) for sequences of n and m symbols, where w is the width of a
    machine word.

    The method is BitPAl (Loving, Hernandez & Benson 2014), which extends Myers' bit-vector
    algorithm (1999) from edit distance to general integer scores. It stores no scores, only the
    differences between neighbouring cells, and one operation on Python's long integers computes
    thousands of them.

    Recurrence. Let T(i, j) be the best score of the first i symbols of `first` and the first j of
    `second`, plus i + j. In T a gap adds 0, a mismatch 1, and a match 3. A cell receives two
    differences:

        v = T(i, j-1) - T(i-1, j-1)    from the column before
        h = T(i-1, j) - T(i-1, j-1)    from the row above

    Its own value is then T(i, j) = T(i-1, j-1) + d, where d is 3 if the symbols are equal and
    max(h, v, 1) otherwise. The cell passes on v' = d - h to column j + 1, and h' = d - v to row
    i + 1. At the borders all differences are 0, so by induction each is 0, 1, 2 or 3.

    Encoding. Bit i - 1 of an integer belongs to row i. The integers v0, v1, v2 mark the rows with
    v <= 0, v <= 1, v <= 2, and h1, h2, h3 those with h >= 1, h >= 2, h >= 3. In this encoding the
    recurrence reads:

        h' >= 3  if v = 0 and (equal or h >= 3)
        h' >= 2  if v <= 1 and (equal or h >= 3), or v = 0 and h >= 2
        h' >= 1  if v <= 2 and (equal or h >= 3), or v <= 1 and h >= 2, or v = 0
        v' <= 0  if h >= 1, and (h >= 2 or v <= 1), and (h >= 3 or (v <= 2 and unequal))
        v' <= 1  if (h >= 1 or v <= 1), and (h >= 2 or (v <= 2 and unequal))
        v' <= 2  if h >= 1 or (v <= 2 and unequal)

    The first two lines depend on themselves one row above. As in Myers' algorithm, the carries of
    an addition propagate them down the whole column.

    Batches. Several `firsts` that are compared with the same `second` lie side by side in the same
    integers. A zero bit after each of them stops the carries.
    """

    def __init__(self, firsts: Sequence[Symbols], second: Symbols, keep_moves: bool):
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

            # The differences from the row above, as in the table above.
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

    def alignment(self, k: int) -> Alignment:
        """Return the best alignment of `firsts[k]` and `second`, found from its end."""
        first, second, start = self.firsts[k], self.second, self.starts[k]
        pairs, deletes = self.pairs, self.deletes

        ops = []
        i, j = len(first) - 1, len(second) - 1
        while i >= 0 <= j:
            is_equal = first[i] == second[j]
            if is_equal or pairs[j] & 1 << start + i:
                ops.append(Op("match" if is_equal else "substitute", i, j))
                i -= 1
                j -= 1
            elif deletes[j] & 1 << start + i:
                ops.append(Op("delete", i, None))
                i -= 1
            else:
                ops.append(Op("insert", None, j))
                j -= 1
        ops += [Op("delete", rest, None) for rest in range(i, -1, -1)]
        ops += [Op("insert", None, rest) for rest in range(j, -1, -1)]
        return Alignment(self.score(k), ops[::-1])

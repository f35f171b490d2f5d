"""How well the beginnings of sequences align with a target: Needleman-Wunsch (match 1, mismatch
-1, gap -1), its end left open.
"""

from collections.abc import Hashable, Sequence

import numpy as np


def prefix_scores(
    sequences: Sequence[Sequence[Hashable]], target: Sequence[Hashable]
) -> list[list[int]]:
    """Return for each sequence of n symbols n + 1 numbers: i is the best score of its first i
    symbols against any prefix of `target`.

    So a symbol of the target that is passed over counts -1 as soon as a later one is matched, and
    what is still missing counts nothing. Row i of the table follows from row i - 1; a run of gaps
    within a row is a running maximum. Time O(B N M), in N steps.

    A match; then "b" is passed over, and a match; then a mismatch:

    >>> prefix_scores([["a", "c", "x"]], ["a", "b", "c", "d"])
    [[0, 1, 1, 0]]
    """
    ids: dict[Hashable, int] = {}
    target_M = np.array([ids.setdefault(symbol, len(ids)) for symbol in target], dtype=np.int64)
    symbols_BN = np.full((len(sequences), max(map(len, sequences), default=0)), -1)
    for row, sequence in zip(symbols_BN, sequences):
        row[: len(sequence)] = [ids.get(symbol, -1) for symbol in sequence]
    places = np.arange(len(target) + 1)
    row_BM = np.broadcast_to(-places, (len(sequences), len(places)))
    best = [np.zeros(len(sequences), dtype=np.int64)]
    for symbols_B in symbols_BN.T:
        pairs_BM = row_BM[:, :-1] + np.where(symbols_B[:, None] == target_M, 1, -1)
        row_BM = row_BM - 1
        np.maximum(row_BM[:, 1:], pairs_BM, out=row_BM[:, 1:])
        row_BM = np.maximum.accumulate(row_BM + places, axis=1) - places
        best.append(row_BM.max(axis=1))
    return [
        scores[: len(sequence) + 1]
        for scores, sequence in zip(np.stack(best, axis=1).tolist(), sequences)
    ]

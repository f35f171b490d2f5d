"""Scores of the prefixes of sequences against a target whose end is free.

This is the Needleman-Wunsch table with the standard scoring (match 1, mismatch -1, gap -1). The
best score of a prefix is the maximum of its row, because the rest of the target costs nothing.
"""

from collections.abc import Hashable, Sequence

import numpy as np


def prefix_scores(
    sequences: Sequence[Sequence[Hashable]], target: Sequence[Hashable]
) -> list[list[int]]:
    """Return the scores of all prefixes of each sequence: n + 1 numbers for n symbols.

    Number i is the best score of the first i symbols against any prefix of `target`. A symbol of
    the target that is skipped costs 1 as soon as a later one is matched; symbols that are still
    missing at the end cost nothing.

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

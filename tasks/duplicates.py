"""Nearly equal texts: pairs whose sets of three-word sequences overlap by four fifths or more.

The overlap of two sets is their Jaccard index, |A ∩ B| / |A ∪ B|. Pairs are found by prefix
filtering (Bayardo, Ma & Srikant 2007): two sets that overlap by t share one of the |A| - ceil(t
|A|) + 1 rarest members of each. So only texts that share a rare member are compared.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from align.words import normalise

OVERLAP = 0.8
WORDS = 3  # in a sequence

# Texts with fewer sequences are not compared, because short ones are often alike: "What is 2 + 3?"
MIN_SEQUENCES = 8


def near_duplicates(
    held_out: Sequence[str], known: Sequence[str], overlap: float = OVERLAP
) -> list[tuple[int, int]]:
    """Return (i, j) for each held-out text i that nearly repeats a known text; j is the first one.

    Texts of fewer than ten words are not compared.
    """
    sets = [_sequences(text) for text in held_out]
    known_sets = [_sequences(text) for text in known]
    counts = Counter(member for members in (*sets, *known_sets) for member in members)

    by_member: dict[str, list[int]] = defaultdict(list)
    for j, members in enumerate(known_sets):
        for member in _rarest(members, counts, overlap):
            by_member[member].append(j)

    pairs = []
    for i, members in enumerate(sets):
        candidates = {j for member in _rarest(members, counts, overlap) for j in by_member[member]}
        alike = (j for j in sorted(candidates) if _overlap(members, known_sets[j]) >= overlap)
        if (first := next(alike, None)) is not None:
            pairs.append((i, first))
    return pairs


def _sequences(text: str) -> frozenset[str]:
    """Return the sequences of three words in a text; an empty set if it is too short."""
    words = normalise(text).casefold().split()
    found = frozenset(" ".join(words[k : k + WORDS]) for k in range(len(words) - WORDS + 1))
    return found if len(found) >= MIN_SEQUENCES else frozenset()


def _rarest(members: frozenset[str], counts: Counter, overlap: float) -> list[str]:
    """Return the members of which any set that overlaps enough has at least one."""
    size = len(members) - math.ceil(overlap * len(members)) + 1 if members else 0
    return sorted(members, key=lambda member: (counts[member], member))[:size]


def _overlap(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 0.0

"""Measure how fast groups are aligned, and compare with exact libraries.

    python tests/benchmarks/bench_align.py

A group is 16 completions and one target, as lists of words. Every library gets its preferred input:
ours the words, Biopython strings with one character for each word, rapidfuzz integers. The
conversion is timed as well, because a user would have to do it. All libraries take turns in one
process on one core, and the shortest of several times counts. Scores are compared first; a library
that is not exact is named and not timed.
"""

import argparse
import contextlib
import random
import timeit
from functools import partial

from align.needleman import nw_align, nw_scores

GROUP = 16

# The share of words that are dropped, doubled or replaced.
SLIPS = {"nearly right": 0.02, "half wrong": 0.3, "all wrong": 1.0}


def group_of(words: int, slips: float, rng: random.Random) -> tuple[list[list[str]], list[str]]:
    vocabulary = [f"w{i}" for i in range(max(10, words // 2))]
    target = rng.choices(vocabulary, k=words)

    def completion():
        made = []
        for word in target:
            made += (
                rng.choice([[], [word, word], [rng.choice(vocabulary)]])
                if rng.random() < slips
                else [word]
            )
        return made

    return [completion() for _ in range(GROUP)], target


def ids_of(words: list[str], ids: dict[str, int]) -> list[int]:
    return [ids.setdefault(word, len(ids)) for word in words]


class Ours:
    score = staticmethod(nw_scores)
    path = staticmethod(nw_align)


class Biopython:
    def __init__(self):
        from Bio.Align import PairwiseAligner

        self.aligner = PairwiseAligner(mode="global")
        self.aligner.match_score, self.aligner.mismatch_score, self.aligner.gap_score = 1, -1, -1

    def score(self, completions, target):
        return self._each(self.aligner.score, completions, target)

    def path(self, completions, target):
        return self._each(lambda x, y: self.aligner.align(x, y)[0].aligned, completions, target)

    def _each(self, use, completions, target):
        ids: dict[str, int] = {}
        second, *firsts = (
            "".join(chr(0x4E00 + number) for number in ids_of(words, ids))
            for words in (target, *completions)
        )
        return [use(first, second) for first in firsts]


class Rapidfuzz:
    def __init__(self):
        from rapidfuzz.distance import Levenshtein

        self.distance = Levenshtein.distance

    def score(self, completions, target):
        """2 S = n + m - (distance with insert = delete = 3, substitute = 4)."""
        ids: dict[str, int] = {}
        second, *firsts = (ids_of(words, ids) for words in (target, *completions))
        return [
            (len(first) + len(second) - self.distance(first, second, weights=(3, 3, 4))) / 2
            for first in firsts
        ]


def contestants() -> dict[str, object]:
    """Return ours and the libraries that are installed, by name."""
    found: dict[str, object] = {"ours": Ours()}
    for kind in (Biopython, Rapidfuzz):
        with contextlib.suppress(ImportError):
            found[kind.__name__] = kind()
    return found


def milliseconds(work, times: int) -> float:
    """Return the least of `times` durations of `work`."""
    return 1000 * min(timeit.repeat(work, number=1, repeat=times))


def times_of(everyone: dict, what: str, completions, target, times: int) -> dict[str, float]:
    """Return each exact library's milliseconds, the least of three rounds in which all take turns,
    so that a noisy moment does not fall on one of them.
    """
    right = list(everyone["ours"].score(completions, target))
    works = {
        name: partial(getattr(each, what), completions, target)
        for name, each in everyone.items()
        if hasattr(each, what) and list(each.score(completions, target)) == right
    }
    rounds = [{name: milliseconds(works[name], times) for name in works} for _ in range(3)]
    return {name: min(each[name] for each in rounds) for name in works}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", default="20,50,200,1000")
    arguments = parser.parse_args()
    everyone = contestants()
    names = "".join(f"{name:>12}" for name in everyone)
    print(f"{'words':>5}  {'completions':<13}{'what':<7}{names}  ms; ours / best peer")
    for words in map(int, arguments.words.split(",")):
        for label, slips in SLIPS.items():
            completions, target = group_of(words, slips, random.Random(0))
            for what in ("score", "path"):
                times = times_of(everyone, what, completions, target, 2 if words > 500 else 20)
                shown = "".join(
                    f"{times[name]:>12.2f}" if name in times else f"{'-':>12}" for name in everyone
                )
                peers = [value for name, value in times.items() if name != "ours"]
                ratio = f"  {times['ours'] / min(peers):.2f}" if peers else ""
                print(f"{words:>5}  {label:<13}{what:<7}{shown}{ratio}", flush=True)


if __name__ == "__main__":
    main()

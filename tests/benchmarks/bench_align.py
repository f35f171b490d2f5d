"""Measure how fast groups are aligned, and compare with exact libraries.

    python tests/benchmarks/bench_align.py

A group is 16 completions and one target, as lists of words. Every library gets its preferred input:
ours the words, Biopython strings with one character for each word, rapidfuzz integers. The
conversion is timed as well, because a user would have to do it. All libraries take turns in one
process on one core, and the shortest of several times counts. Scores are compared first; a library
that is not exact is named and not timed.
"""

import argparse
import random
import time
from functools import partial

from align.needleman import nw_align_batch, nw_score_batch

GROUP = 16

# The share of words that are dropped, doubled or replaced.
SLIPS = {
    "nearly right": 0.02,
    "half wrong": 0.3,
    "all wrong": 1.0,
}


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


def contestants() -> dict[str, dict]:
    """Return the functions "score" and "path" of each library, by name.

    Both take (completions, target). "score" returns the scores.
    """
    ours = {
        "score": lambda completions, target: nw_score_batch(
            [(words, target) for words in completions]
        ).tolist(),
        "path": lambda completions, target: nw_align_batch(
            [(words, target) for words in completions]
        ),
    }
    found = {"ours": ours}
    try:
        from Bio.Align import PairwiseAligner

        aligner = PairwiseAligner(mode="global")
        aligner.match_score, aligner.mismatch_score, aligner.gap_score = 1, -1, -1

        def as_text(words, ids):
            return "".join(chr(0x4E00 + number) for number in ids_of(words, ids))

        def biopython(completions, target, use):
            ids: dict[str, int] = {}
            second = as_text(target, ids)
            return [use(as_text(words, ids), second) for words in completions]

        found["Biopython"] = {
            "score": lambda completions, target: biopython(completions, target, aligner.score),
            "path": lambda completions, target: biopython(
                completions, target, lambda x, y: aligner.align(x, y)[0].aligned
            ),
        }
    except ImportError:
        pass
    try:
        from rapidfuzz.distance import Levenshtein

        def rapidfuzz(completions, target):
            # 2 S = n + m - (distance with insert = delete = 3, substitute = 4)
            ids: dict[str, int] = {}
            second = ids_of(target, ids)
            return [
                (
                    len(words)
                    + len(target)
                    - Levenshtein.distance(ids_of(words, ids), second, weights=(3, 3, 4))
                )
                / 2
                for words in completions
            ]

        found["rapidfuzz"] = {"score": rapidfuzz}
    except ImportError:
        pass
    return found


def least(work, times: int) -> float:
    """Return the least of `times` durations of `work`, in milliseconds."""
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return 1000 * min(durations)


def times_of(everyone: dict, what: str, completions, target, times: int) -> dict[str, float]:
    """Return each exact library's milliseconds, the least of three rounds in which all take turns,
    so that a noisy moment does not fall on one of them.
    """
    right = everyone["ours"]["score"](completions, target)
    exact = {
        name: work[what]
        for name, work in everyone.items()
        if what in work and list(work["score"](completions, target)) == list(right)
    }
    rounds = [
        {name: least(partial(work, completions, target), times) for name, work in exact.items()}
        for _ in range(3)
    ]
    return {name: min(each[name] for each in rounds) for name in exact}


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

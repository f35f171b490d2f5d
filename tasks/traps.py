"""What cheap strategies earn under each reward of the interleave task: `python -m tasks.traps`.

A policy can get stuck in a strategy that ignores one of the texts if a reward pays well for it.
Plain similarity gives 0.50 for copying A at 25 words.
"""

import sys
from collections.abc import Sequence

import numpy as np

from data.errors import Parser, exit_status
from tasks.interleave import Interleave, interleaved
from tasks.supply import LADDER, parse_levels, problem_at


def strategies(a: Sequence[str], b: Sequence[str]) -> dict[str, list[str]]:
    """Return what each cheap strategy writes. These are the traps that a policy can fall into."""
    right = interleaved(a, b)
    return {
        "copies A": list(a),
        "copies B": list(b),
        "doubles A": [word for word in a for _ in range(2)],
        "doubles B": [word for word in b for _ in range(2)],
        "A then B": [*a, *b],
        "B then A": [*b, *a],
        "B first": interleaved(b, a),
        "runs on in A": [*right[: len(right) // 2], *a[len(right) // 4 :]],
        "runs on in B": [*right[: len(right) // 2], *b[len(right) // 4 :]],
        "stops half way": right[: len(right) // 2],
    }


def all_strategies(a: Sequence[str], b: Sequence[str]) -> dict[str, list[str]]:
    """Return what each strategy writes: the traps, small mistakes, and the right answer."""
    right = interleaved(a, b)
    third = 2 * (len(a) // 3)
    return {
        "right": right,
        "empty": [],
        **strategies(a, b),
        "turn lost at a third": right[:third] + interleaved(b[third // 2 :], a[third // 2 :]),
        "one word skipped": right[:third] + right[third + 1 :],
        "stutter": right[:third] + right[third : third + 1] + right[third:],
        "target twice": right + right,
        "garbage": [f"{word}~" for word in right],
    }


def table(levels: Sequence[int], samples: int = 20) -> dict[tuple[str, int, str], float]:
    """Return the mean reward of each (strategy, level, name of the reward).

    The mean is over `samples` problems of the validation split.
    """
    tasks = {reward: Interleave(reward) for reward in Interleave.rewards}
    rewards: dict[tuple[str, int, str], list[float]] = {}
    for level in levels:
        for index in range(samples):
            problem = problem_at(
                tasks["similarity"], seed=0, split="validation", level=level, index=index
            )
            written = all_strategies(problem.data["a"], problem.data["b"])
            texts = [" ".join(words) for words in written.values()]

            for reward, task in tasks.items():
                for name, score in zip(written, task.score(problem, texts)):
                    rewards.setdefault((name, level, reward), []).append(score.reward)
    return {key: float(np.mean(values)) for key, values in rewards.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 2 for a user's mistake."""
    return exit_status("tasks.traps", lambda: show(argv))


def show(argv: Sequence[str] | None) -> int:
    """Print a table for each level: a row for each strategy, a column for each reward."""
    parser = Parser(prog="python -m tasks.traps", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--levels",
        metavar="L,L,...",
        default=",".join(map(str, LADDER)),
        help="words of each text (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=5,
        help="average over N problems (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)

    names = Interleave.rewards
    for level in parse_levels(arguments.levels, "--levels"):
        means = table([level], arguments.samples)
        print(f"| {level} words | {' | '.join(names)} |")
        print("|---|" + "---|" * len(names))
        for strategy in dict.fromkeys(strategy for strategy, *_ in means):
            cells = [f"{means[strategy, level, reward]:.2f}" for reward in names]
            print(f"| {strategy} | {' | '.join(cells)} |")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often the 95 % intervals contain the true value, and how wide they are, in Markdown:
`python tests/tools/statistics_tables.py`.

Rates are enumerated exactly; scores are simulated with a fixed seed (`--samples`).
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpo.statistics import mean_bounds, rate_interval

Draw = Callable[[np.random.Generator, tuple[int, ...], float], np.ndarray]


def slips(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """Most scores are 1, the others lie around 0.5, as those of a nearly trained policy do."""
    return np.where(rng.random(shape) < 2 * (1 - mean), rng.beta(2, 2, shape), 1.0)


def halves(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """Scores of 0, 0.5 and 1, as many of 0 as of 0.5."""
    drawn, share = rng.random(shape), (1 - mean) / 1.5
    return np.where(drawn < share, 0.0, np.where(drawn < 2 * share, 0.5, 1.0))


def near(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """All scores fall a little short: a beta distribution, of standard deviation 0.09 at 0.9."""
    return rng.beta(10 * mean, 10 * (1 - mean), shape)


SCORES: dict[str, Draw] = {
    "1 or beta(2, 2)": slips,
    "0, 0.5 or 1": halves,
    "beta, all short of 1": near,
}


def show(title: str, rows: Iterable[list[str]]):
    """Print a table in Markdown, each row as soon as it is known. The first row is the heading."""
    print(f"{title}\n")
    for i, row in enumerate(rows):
        print(f"| {' | '.join(row)} |", flush=True)
        if i == 0:
            print(f"|{' ---: |' * len(row)}")
    print()


def chance_of(right: int, n: int, rate: float) -> float:
    """Return the probability of `right` successes of n."""
    return math.comb(n, right) * rate**right * (1 - rate) ** (n - right)


def coverage(samples: int):
    show("Coverage of rates in %, exactly (Clopper-Pearson)", coverage_of_rates())
    show("Coverage of mean scores in %, and mean width (Gaffke)", coverage_of_scores(samples))


def coverage_of_rates() -> Iterator[list[str]]:
    sizes = (16, 32, 64, 128, 200, 500)
    intervals = {n: [rate_interval(right, n) for right in range(n + 1)] for n in sizes}
    yield ["true rate", *(f"n = {n}" for n in sizes)]
    for rate in (0.5, 0.7, 0.85, 0.9, 0.95, 0.97, 0.985, 0.99, 0.995):
        shares = [
            sum(
                chance_of(right, n, rate)
                for right, (low, high) in enumerate(intervals[n])
                if low <= rate + 1e-12 and rate <= high + 1e-12
            )
            for n in sizes
        ]
        yield [f"{rate:g}", *(f"{100 * share:.1f}" for share in shares)]


def coverage_of_scores(samples: int) -> Iterator[list[str]]:
    sizes = (16, 64, 200, 1000)
    rng = np.random.default_rng(0)
    yield ["scores", "true mean", *(f"n = {n}" for n in sizes)]
    for name, draw in SCORES.items():
        for mean in (0.5, 0.7, 0.9, 0.95, 0.97, 0.985, 0.99, 0.995):
            row = [name, f"{mean:g}"]
            for n in sizes:
                low, high = mean_bounds(draw(rng, (samples, n), mean))
                share = ((low <= mean) & (mean <= high)).mean()
                row.append(f"{100 * share:.1f} ({np.mean(high - low):.3f})")
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1000, help="samples of each simulated cell")
    options = parser.parse_args()
    coverage(options.samples)


if __name__ == "__main__":
    main()

"""Tables about intervals and promotions, in Markdown:
`python tests/tools/statistics_tables.py coverage`.

coverage   how often the 95 % intervals contain the true value, and how wide they are
heldout    how likely a validation check promotes, by true mean and number of problems
running    how likely the running mean promotes, by true mean and prompts per step

Rates are enumerated exactly; scores are simulated with a fixed seed (`--samples`).
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpo.config import PROMOTE_AT
from grpo.curriculum import Ladder
from grpo.records import StepSummary
from grpo.statistics import mean_bounds, rate_interval, reaches_mark

Draw = Callable[[np.random.Generator, tuple[int, ...], float], np.ndarray]

# The lower and the upper ends of intervals.
Ends = tuple[np.ndarray, np.ndarray]


def bernoulli(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    return (rng.random(shape) < mean).astype(float)


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


def bimodal(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """Group means of problems that the policy mostly either solves or fails.

    Their standard deviation is 0.25 at a mean of 0.85.
    """
    return rng.beta(mean, 1 - mean, shape)


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


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


# coverage


def wilson(means: np.ndarray, n: int) -> Ends:
    """Return Wilson's score interval (1927) of the means of n values."""
    z = 1.959964
    centre = (means + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(means * (1 - means) / n + z * z / (4 * n * n))
    return centre - half, centre + half


def binomial(n: int, rate: float) -> np.ndarray:
    """Return the probabilities of 0 ... n successes."""
    if rate in (0.0, 1.0):
        return np.eye(n + 1)[round(n * rate)]
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    k = np.arange(n + 1)
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    return np.exp(log_choose + k * np.log(rate) + (n - k) * np.log1p(-rate))


def covers(ends: Ends, value: float) -> np.ndarray:
    low, high = ends
    return (low <= value + 1e-12) & (value <= high + 1e-12)


def coverage_of_rates() -> Iterator[list[str]]:
    rates, sizes = (
        (0.5, 0.7, 0.85, 0.9, 0.95, 0.97, 0.985, 0.99, 0.995),
        (16, 32, 64, 128, 200, 500, 1000),
    )
    methods: dict[int, list[Ends]] = {}
    for n in sizes:
        exact = np.array([rate_interval(right, n) for right in range(n + 1)]).T
        methods[n] = [(exact[0], exact[1]), wilson(np.arange(n + 1) / n, n)]

    yield ["true rate", *(f"n = {n}" for n in sizes)]
    for rate in rates:
        row = [f"{rate:g}"]
        for n in sizes:
            chances = binomial(n, rate)
            row.append(
                " / ".join(percent(chances[covers(ends, rate)].sum()) for ends in methods[n])
            )
        yield row


def coverage_of_scores(samples: int) -> Iterator[list[str]]:
    means, sizes = (0.5, 0.7, 0.9, 0.95, 0.97, 0.985, 0.99, 0.995), (16, 64, 200, 1000)
    rng = np.random.default_rng(0)

    yield ["scores", "true mean", *(f"n = {n}" for n in sizes)]
    for name, draw in SCORES.items():
        for mean in means:
            row = [name, f"{mean:g}"]
            for n in sizes:
                values_Sn = draw(rng, (samples, n), mean)
                methods = (
                    mean_bounds(values_Sn),
                    wilson(values_Sn.mean(axis=1), n),
                )
                shares = " / ".join(percent(covers(ends, mean).mean()) for ends in methods)
                widths = " / ".join(f"{np.mean(high - low):.3f}" for low, high in methods)
                row.append(f"{shares} ({widths})")
            yield row


def coverage(samples: int):
    show(
        "Coverage of rates in %, exactly: Clopper-Pearson (ours) / Wilson",
        coverage_of_rates(),
    )
    show(
        "Coverage of mean scores in %, and mean width: Gaffke (ours) / Wilson",
        coverage_of_scores(samples),
    )


# promotion


def once(draw: Draw, mean: float, n: int, mark: float, samples: int) -> float:
    """Return the probability that n scores pass the test for the `mark`."""
    if draw is bernoulli:
        passing = [
            reaches_mark(right / n, rate_interval(right, n).low, mark) for right in range(n + 1)
        ]
        return float(binomial(n, mean)[passing].sum())

    values_Sn = draw(np.random.default_rng(0), (samples, n), mean)
    values_Sn = values_Sn[values_Sn.mean(axis=1) >= mark]
    if not len(values_Sn):
        return 0.0
    low_S, _ = mean_bounds(values_Sn)
    means_S = values_Sn.mean(axis=1)
    return sum(reaches_mark(*pair, mark) for pair in zip(means_S, low_S)) / samples


def chances_of_checks(n: int, mark: float, samples: int) -> Iterator[list[str]]:
    yield ["true mean", "0 or 1", "1 or beta(2, 2)", "0, 0.5 or 1", "beta, all short of 1"]
    for mean in (0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995):
        row = [f"{mean:g}"]
        for draw in (bernoulli, slips, halves, near):
            chance = once(draw, mean, n, mark, samples)
            row.append(" / ".join(f"{100 * (1 - (1 - chance) ** k):.3g}" for k in (1, 3, 10)))
        yield row


def heldout(samples: int):
    """Print the probability that one check promotes, and that one of 3 or 10 checks does.

    Checks use the same problems and the same random numbers, so a policy that does not change gets
    the same answers each time: its probability is that of one check, however often it is checked.
    The other figures are for independent checks, the most that repetition can do.
    """
    mark = PROMOTE_AT["heldout"]
    for n in (64, 128, 256):
        title = f"Promotion at {mark:g} by {n} problems, %, in 1 / 3 / 10 independent checks"
        show(title, chances_of_checks(n, mark, samples))


def climbs(draw: Draw, mean: float, prompts: int, steps: int, seed: int) -> float:
    """Return the step at which the running mean promotes from the second level, or infinity."""
    rng = np.random.default_rng(seed)
    ladder = Ladder([10, 25, 50], "running", PROMOTE_AT["running"])
    ladder.position = 1
    for step in range(1, steps + 1):
        groups = ladder.levels_for(seed, step, prompts).count(25)
        if ladder.observe(StepSummary(step, {25: draw(rng, (groups,), mean).tolist()})):
            return step
    return float("inf")


def chances_of_climbing(runs: int) -> Iterator[list[str]]:
    sizes = (2, 4, 8, 16)

    yield ["group means", "true mean", *(f"{n} prompts" for n in sizes)]
    for name, draw in {"beta": near, "bimodal": bimodal, "0 or 1": bernoulli}.items():
        for mean in (0.8, 0.85, 0.88, 0.9, 0.93, 0.96, 0.98):
            row = [name, f"{mean:g}"]
            for prompts in sizes:
                steps = np.array([climbs(draw, mean, prompts, 100, seed) for seed in range(runs)])
                shares = " / ".join(f"{100 * (steps <= limit).mean():.0f}" for limit in (50, 100))
                middle = np.median(steps)
                row.append(shares + (f"; {middle:.0f}" if np.isfinite(middle) else ""))
            yield row


def running(samples: int):
    mark = PROMOTE_AT["running"]
    title = f"Promotion at {mark:g} by the running mean (2nd level)"
    show(f"{title}: % within 50 / 100 steps; median step", chances_of_climbing(samples // 5))


TABLES = {
    "coverage": coverage,
    "heldout": heldout,
    "running": running,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--samples", type=int, default=1000, help="samples of each simulated cell")
    options = parser.parse_args(argv)
    TABLES[options.table](options.samples)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

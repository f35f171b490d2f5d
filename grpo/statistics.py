"""95 % confidence intervals of rates and of mean scores. The whole project uses these.

The usual intervals fail near the top of the scale, where trained policies are. For 64 right answers
of 64, which have no variance, a bootstrap reports [1, 1]; at a true rate of 0.99 its 95 % interval
holds the true rate less than half of the time. The two methods here allow for values that have not
been seen yet:

- a rate: Clopper & Pearson 1934 (Biometrika 26), exact;
- a mean of scores with known bounds: Gaffke 2005, as given by Learned-Miller & Thomas 2019
  (arXiv:1905.06208). It is a Bayesian bootstrap with one additional score at the bound. On scores
  of 0 and 1 it equals Clopper-Pearson; it is narrower the less the scores vary. Its coverage is a
  conjecture for general distributions; no counterexample is known.

`tests/grpo/core/test_statistics.py` measures their coverage.
"""

import math
from collections.abc import Sequence

import numpy as np

TAIL = 0.025  # probability that an interval misses on either side
DRAWS = 10_000  # of weights; their noise moves an end by about 1 % of the interval's width
BLOCKS = 10  # of draws, made one after the other to limit memory

# How far below the mark the mean's 95 % interval may begin. With any distribution of scores, a
# policy whose true mean is below the mark by more than this passes at most one test in 40.
MARGIN = 0.05


def mean_interval(
    values: Sequence[float] | np.ndarray,
    bounds: tuple[float, float] = (0.0, 1.0),
    tail: float = TAIL,
) -> tuple[float, float]:
    """Return the interval of the mean of the distribution that `values` (n,) were drawn from.

    `bounds` are the smallest and the largest possible value; a value outside widens them. For
    differences of two scores they are (-1, 1). The interval misses on either side with probability
    `tail`.
    """
    values_n = np.asarray(values, dtype=float)
    least, largest = min(bounds[0], values_n.min()), max(bounds[1], values_n.max())
    scaled_n = (values_n - least) / (largest - least)

    if np.isin(scaled_n, (0.0, 1.0)).all():
        n, right = len(scaled_n), int(scaled_n.sum())
        low, high = _lowest_rate(right, n, tail), 1.0 - _lowest_rate(n - right, n, tail)
    else:
        (low,), (high,) = mean_bounds(scaled_n[None], tail)

    width = largest - least
    return float(least + width * low), float(least + width * high)


def mean_bounds(values_Sn: np.ndarray, tail: float = TAIL) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper ends (S,) of the means of S samples of n values in [0, 1]."""
    n = values_Sn.shape[1]
    rng = np.random.default_rng(0)
    sorted_Sn = np.sort(values_Sn, axis=1)  # the result must not depend on the order

    lower, upper = [], []
    for _ in range(BLOCKS):
        # Uniform on the simplex of n + 1 parts: one for each value, and one for an unseen value.
        weights_DN = rng.standard_exponential((DRAWS // BLOCKS, n + 1))
        weights_DN /= weights_DN.sum(axis=1, keepdims=True)
        means_SD = sorted_Sn @ weights_DN[:, :n].T

        # The unseen value may be as low as 0, and as high as 1.
        lower.append(means_SD)
        upper.append(means_SD + weights_DN[:, n])

    low_S = np.quantile(np.hstack(lower), tail, axis=1)
    high_S = np.quantile(np.hstack(upper), 1 - tail, axis=1)
    return low_S, high_S


def reaches_mark(mean: float, low: float, mark: float) -> bool:
    """Return whether a mean whose 95 % interval begins at `low` is evidence that `mark` is met."""
    return mean >= mark and low >= mark - MARGIN


def problems_needed(mark: float) -> int:
    """Return how many problems it takes to show that `mark` is met, if all of them are solved.

    The interval of n values of 1 begins at TAIL ** (1 / n).
    """
    floor = max(TAIL, mark - MARGIN)
    return math.ceil(math.log(TAIL) / math.log(floor))


def _lowest_rate(right: int, n: int, tail: float) -> float:
    """Return the rate at which `right` or more successes in `n` trials have probability `tail`: the
    lower end of the interval of Clopper and Pearson.
    """
    if right == 0:
        return 0.0

    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    k = np.arange(right, n + 1)
    log_choose = log_factorial[n] - log_factorial[k] - log_factorial[n - k]

    low, high = 0.0, 1.0
    for _ in range(50):  # bisection, to 1e-15
        rate = (low + high) / 2
        probability = np.exp(log_choose + k * np.log(rate) + (n - k) * np.log1p(-rate)).sum()
        low, high = (rate, high) if probability < tail else (low, rate)
    return low

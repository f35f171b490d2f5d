import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.statistics import DRAWS, MARGIN, mean_bounds, mean_interval, problems_needed


def slips(rng, shape, mean):
    """Most scores are 1, the others lie around 0.5, as those of a nearly trained policy do."""
    return np.where(rng.random(shape) < 2 * (1 - mean), rng.beta(2, 2, shape), 1.0)


def halves(rng, shape, mean):
    """Scores of 0, 0.5 and 1, as many of 0 as of 0.5."""
    drawn, share = rng.random(shape), (1 - mean) / 1.5
    return np.where(drawn < share, 0.0, np.where(drawn < 2 * share, 0.5, 1.0))


def near(rng, shape, mean):
    """All scores fall a little short: a beta distribution, of standard deviation 0.09 at 0.9."""
    return rng.beta(10 * mean, 10 * (1 - mean), shape)


def rate_interval(right, n):
    return mean_interval([1.0] * right + [0.0] * (n - right))


RATES = (0.5, 0.7, 0.85, 0.9, 0.95, 0.97, 0.985, 0.99, 0.995)
SIZES = (16, 64, 200)


def test_rates_by_hand():
    # All right: low ** n = 0.025. One of two: the ends solve 1 - (1 - p)² = 0.025 and p² + ...
    # likewise from above.
    assert rate_interval(64, 64) == pytest.approx((0.025 ** (1 / 64), 1.0))
    assert rate_interval(0, 5) == pytest.approx((0.0, 1 - 0.025 ** (1 / 5)))
    assert rate_interval(1, 2) == pytest.approx((1 - 0.975**0.5, 0.975**0.5))


@pytest.mark.parametrize("n", SIZES)
def test_the_interval_of_a_rate_covers_everywhere(n):
    """Exactly, by adding up the binomial probabilities of the outcomes whose interval holds the
    true rate.
    """
    intervals = np.array([rate_interval(right, n) for right in range(n + 1)])
    for rate in RATES:
        inside = (intervals[:, 0] <= rate) & (rate <= intervals[:, 1])
        chances = [
            math.comb(n, right) * rate**right * (1 - rate) ** (n - right)
            for right in np.flatnonzero(inside).tolist()
        ]
        assert sum(chances) >= 0.95


@pytest.mark.parametrize("draw", [slips, halves, near])
@pytest.mark.parametrize("mean", [0.9, 0.97, 0.995])
@pytest.mark.parametrize("n", [16, 64])
def test_the_interval_of_a_mean_covers_near_the_top(n, mean, draw):
    # It covers 98 %; fewer than 93 % of 400 samples do so with a probability below 1e-7.
    scores_Sn = draw(np.random.default_rng(7), (400, n), mean)
    low_S, high_S = mean_bounds(scores_Sn)
    assert ((low_S <= mean) & (mean <= high_S)).mean() >= 0.93


@pytest.mark.parametrize("wrong, n", [(0, 8), (1, 8), (0, 64), (3, 64), (32, 64)])
def test_both_methods_agree_on_zeros_and_ones(wrong, n):
    (low,), (high,) = mean_bounds(np.array([[0.0] * wrong + [1.0] * (n - wrong)]))
    exact = rate_interval(n - wrong, n)
    # An end is the quantile of DRAWS means: its level, 0.025, has a standard deviation of 0.0016,
    # or 1.4 % of the width.
    assert DRAWS == 10_000
    assert (low, high) == pytest.approx(exact, abs=0.06 * (exact[1] - exact[0]))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_the_interval_holds_the_mean_and_ignores_the_order(values, rng):
    low, high = mean_interval(values)
    assert 0 <= low <= np.mean(values) + 1e-12 and np.mean(values) - 1e-12 <= high <= 1
    shuffled = rng.sample(values, len(values))
    assert mean_interval(shuffled) == pytest.approx((low, high), abs=1e-12)


def test_scores_that_vary_less_have_a_narrower_interval():
    rate, scores = mean_interval([1.0] * 32 + [0.0] * 32), mean_interval([0.6] * 32 + [0.4] * 32)
    assert scores[1] - scores[0] < 0.6 * (rate[1] - rate[0])


def test_bounds_are_scaled_and_widened_by_what_lies_outside():
    assert mean_interval([-1, 1, 1], (-1, 1)) == pytest.approx(
        [2 * end - 1 for end in rate_interval(2, 3)]
    )
    assert mean_interval([0, 50, 50]) == pytest.approx([50 * end for end in rate_interval(2, 3)])


def test_differences_of_equal_scores_have_an_interval_around_zero():
    low, high = mean_interval([0.0] * 64, (-1, 1))
    assert low < 0 < high and high == pytest.approx(-low, abs=0.003)


@given(st.floats(0, 0.99))
def test_the_least_number_of_problems_that_shows_a_mark(mark):
    n = problems_needed(mark)
    assert rate_interval(n, n)[0] >= mark - MARGIN - 1e-9
    assert n == 1 or rate_interval(n - 1, n - 1)[0] < mark - MARGIN + 1e-9

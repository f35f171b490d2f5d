"""Advantages: hand-computed values and the identities that every scale keeps."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.data.errors import UserError
from grpo.learn.advantages import SCALES, advantages, own_advantages

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
(FUNCTIONS,) = re.findall(r"^(from statistics .*?)^train", PAGE.read_text(), re.S | re.M)
GROUP = st.lists(st.floats(0, 1), min_size=2, max_size=16)
GROUPS = st.lists(GROUP, min_size=1, max_size=4)


def test_group_scale_divides_by_the_sample_std_of_each_group():
    # [1, 0, 0, 1]: mean 1/2, sum of squares 4 * 1/4 = 1, sample variance 1/3.  [0.2, 0.4]: mean
    # 0.3, variance 0.02.
    first, second = 0.5 / (math.sqrt(1 / 3) + 1e-4), 0.1 / (math.sqrt(0.02) + 1e-4)
    expected = [[first, -first, -first, first], [-second, second]]
    result = advantages([[1.0, 0.0, 0.0, 1.0], [0.2, 0.4]], scale="group")
    assert [pytest.approx(group, rel=1e-12) for group in expected] == result


def test_batch_scale_divides_by_the_std_of_all_rewards():
    # Group means 1 and 5, every distance 1. All of [0, 2, 4, 6]: mean 3, squares 9 + 1 + 1 + 9 =
    # 20, variance 20/3; of the centred rewards [-1, 1, -1, 1] it would be 4/3.
    one = 1 / (math.sqrt(20 / 3) + 1e-4)
    result = advantages([[0.0, 2.0], [4.0, 6.0]], scale="batch")
    assert [pytest.approx([-one, one], rel=1e-12)] * 2 == result


def test_scale_none_only_centres():
    found = advantages([[0.0, 0.5, 1.0], [3.0, 1.0]], scale="none")
    assert found == [[-0.5, 0.0, 0.5], [1.0, -1.0]]


def grouped(*rewards):
    return [SimpleNamespace(rewards=row, completions=row) for row in rewards]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("rloo", [[1, -1 / 3, -1 / 3, -1 / 3], [-1, 1]]),
        ("maxrl", [[3, -1, -1, -1], [-1, 1]]),
        # Of [1, 0, 0, 0, 0, 1] the mean is 1/3 and the variance 4/15.
        ("reinforce_plus_plus", [[1.29099, *3 * [-0.645497]], [-0.645497, 1.29099]]),
    ],
)
def test_the_examples_of_the_page(name, expected):
    names = {}
    exec(FUNCTIONS, names)
    found = own_advantages(names[name], grouped([1.0, 0.0, 0.0, 0.0], [0.0, 1.0]))
    assert found == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize(
    "found",
    [
        *([[1.0, 2.0]], [[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0, math.nan]]),
        *(["12", "34"], [[1.0, 10**400], [2.0, 3.0]]),
    ],
)
def test_a_function_returns_a_number_for_each_completion(found):
    with pytest.raises(
        UserError, match=r"^advantages python:<lambda>: returned .*; it must return"
    ):
        own_advantages(lambda groups: found, grouped([0.0, 1.0], [0.0, 1.0]))


def test_a_generator_that_fails_is_one_line():
    with pytest.raises(UserError, match="^advantages python:<lambda> raised ZeroDivisionError"):
        own_advantages(lambda groups: (1 / 0 for _ in groups), grouped([0.0, 1.0]))


@given(GROUPS, st.sampled_from(SCALES))
def test_advantages_of_a_group_sum_to_zero(rewards, scale):
    for group in advantages(rewards, scale=scale):
        # 16 roundings of 1e-16, divided by at least eps = 1e-4.
        assert math.fsum(group) == pytest.approx(0, abs=1e-11)


@given(st.floats(-100, 100), st.integers(2, 16), GROUP, st.sampled_from(SCALES))
@example(0.1, 3, [0.0, 1.0], "group")  # 0.1 + 0.1 + 0.1 is not 0.3, and a third of it not 0.1
def test_a_constant_group_gets_exact_zeros(reward, size, other, scale):
    assert advantages([[reward] * size, other], scale=scale)[0] == [0.0] * size


def test_arrays_of_integers_are_centred_as_lists_are():
    rows = [[0, 1, 1, 1], [1, 0, 0, 1]]
    found = advantages([[np.int64(reward) for reward in row] for row in rows])
    assert found == advantages([[float(reward) for reward in row] for row in rows])
    assert all(type(value) is float for group in found for value in group)

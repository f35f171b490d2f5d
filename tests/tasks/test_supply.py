from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.arithmetic import Arithmetic
from tasks.base import Problem, UserError, problem_at, problem_stream, split_of_key
from tasks.supply import Supply, epoch_order, fixed_size, held_out

TASK = Arithmetic("product")
seeds, indices = st.integers(0, 10**6), st.integers(0, 10**5)


@given(seeds, indices)
def test_fresh_is_the_stream(seed, index):
    assert Supply(TASK, seed=seed).at(index, 22) == problem_at(
        TASK, seed=seed, split="train", level=22, index=index
    )


@given(seeds, indices, st.integers(1, 40))
def test_fixed_is_a_pure_function_wherever_one_starts(seed, index, size):
    """A run taken up in the middle of an epoch goes on with the problems that it would have drawn."""
    straight, resumed = (Supply(TASK, seed=seed, kind=f"fixed:{size}") for _ in range(2))
    expected = [straight.at(i, 22) for i in range(index, index + 3)]
    resumed.at(index + 1, 22)
    assert [resumed.at(i, 22) for i in range(index, index + 3)] == expected


@given(seeds, st.integers(1, 30), st.integers(0, 50))
def test_an_epoch_holds_each_problem_once(seed, size, epoch):
    supply = Supply(TASK, seed=seed, kind=f"fixed:{size}")
    keys = [supply.at(i, 22).key for i in range(epoch * size, (epoch + 1) * size)]
    first = [problem.key for problem in supply._fixed(22)]
    assert sorted(keys) == sorted(first) and len(set(keys)) == size


@given(seeds, st.integers(0, 1000), st.integers(1, 200))
def test_orders_are_permutations(seed, epoch, size):
    assert sorted(epoch_order(seed, epoch, size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(seed, epoch, 30)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400  # of 30! orders


def test_the_fixed_set_is_of_the_training_split():
    assert {
        split_of_key(problem.key) for problem in Supply(TASK, seed=0, kind="fixed:60")._fixed(22)
    } == {"train"}


def test_neighbouring_seeds_have_sets_of_their_own():
    one, two = (
        {p.key for p in Supply(TASK, seed=seed, kind="fixed:300")._fixed(32)} for seed in (0, 1)
    )
    assert len(one & two) < 10  # 300 * 300 / 64,800 = 1.4 in the mean


def test_a_mixed_dataset_is_shuffled_each_epoch_and_has_its_own_levels():
    problems = [Problem("any", i, "p", "x", str(i)) for i in range(12)]
    supply = Supply(TASK, seed=0, dataset=problems, mixed=True)
    epochs = [[supply.at(i, 99) for i in range(12 * epoch, 12 * epoch + 12)] for epoch in range(3)]
    assert all(Counter(p.key for p in epoch) == Counter(map(str, range(12))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != problems


def test_a_level_of_a_dataset_has_the_problems_of_that_level():
    problems = [Problem("any", 10 + i % 3, "p", "x", str(i)) for i in range(12)]
    supply = Supply(TASK, seed=0, dataset=problems)
    for level in (10, 11, 12):
        epoch = [supply.at(i, level).key for i in range(4)]
        assert sorted(epoch) == sorted(str(i) for i in range(12) if 10 + i % 3 == level)


@pytest.mark.parametrize(
    "kind",
    ["", "fixed", "fixed:", "fixed:0", "fixed:-3", "fixed:1.5", "fresh:3", "stale", "fixed:²"],
)
def test_what_is_no_supply(kind):
    with pytest.raises(UserError, match="give fresh, or fixed:N"):
        fixed_size(kind)


def test_a_family_that_is_too_small_for_the_set():
    with pytest.raises(
        UserError, match="only [0-9]+ different problems found, and 200 are asked for"
    ):
        Supply(TASK, seed=0, kind="fixed:200").at(0, 11)  # 36 products of single digits


def test_seen_problems_are_passed_over_and_counted():
    stream = [Problem("any", 1, "p", "x", str(i)) for i in range(20)]
    problems, dropped = held_out(stream, 5, {"1", "3", "9"}, "here")
    assert [problem.key for problem in problems] == ["0", "2", "4", "5", "6"] and dropped == 2
    assert held_out(iter(stream), 5, set(), "here") == (stream[:5], 0)
    endless = (Problem("any", 1, "p", "x", str(i)) for i in count())
    assert held_out(endless, 5, set("0123"), "here")[1] == 4


@pytest.mark.parametrize(
    "available, seen, line",
    [
        (
            6,
            {"0", "1", "2"},
            "here: 3 of 6 problems were trained on, 3 are left and 5 are asked for; generate 2 more",
        ),
        (
            4,
            set(),
            "here: 0 of 4 problems were trained on, 4 are left and 5 are asked for; generate 1 more",
        ),
        (
            40,
            set(map(str, range(40))),
            "here: 10 of 10 problems were trained on, 0 are left and 5 are asked for; generate 5 more",
        ),
    ],
)
def test_too_few_left_says_how_many_more(available, seen, line):
    with pytest.raises(UserError) as error:
        held_out([Problem("any", 1, "p", "x", str(i)) for i in range(available)], 5, seen, "here")
    assert str(error.value) == line + " that training has not seen"


def test_held_out_streams_of_the_arithmetic_task_never_meet_training():
    supply = Supply(TASK, seed=0)
    trained = {supply.at(i, 22).key for i in range(500)}
    assert (
        held_out(problem_stream(TASK, seed=1, split="validation", level=22), 50, trained, "here")[1]
        == 0
    )

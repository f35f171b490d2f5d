"""Reward functions: their calls, components, errors and time limits."""

import asyncio
import random
import threading
import time

import pytest

from tasks.base import UserError
from tasks.protocol import Problem
from tasks.rewards import RewardFunctions, RewardSettings


def problem(name="p", **row):
    data = {"where": f"row {name}", "row": {"answer": "42", **row}}
    return Problem("data", 1, f"prompt {name}", "", name, data)


def scores(functions, completions=("a", "b"), **settings):
    if not isinstance(functions, list):
        functions = [functions]
    rewards = RewardFunctions(functions, RewardSettings(**settings))
    return rewards.scores([(problem(), list(completions))])[0]


def refused(functions, message, **settings):
    with pytest.raises(UserError) as caught:
        scores(functions, **settings)
    line = str(caught.value)
    assert message in line and "\n" not in line, line


def length(completion):
    return len(completion) / 10


def test_components_are_weighted_and_kept():
    def parts(completion, answer):
        return {"right": completion == answer, "short": 0.5}

    (score,) = scores(parts, ["42"], weights={"short": 0.2}, highest=1.1)
    assert score.reward == pytest.approx(1.1) and score.exact
    assert score.parts == {"reward/right": 1.0, "reward/short": 0.5}

    (score,) = scores([parts, length], ["42"])
    assert score.reward == pytest.approx(1.7)
    assert list(score.parts) == ["reward/right", "reward/short", "reward/length"]
    (score,) = scores(length, ["42"])
    assert score.parts == {} and score.reward == 0.2


def test_a_function_of_the_group_gets_lists():
    def group(prompts, completions, answer, **row):
        assert prompts == ["prompt p"] * 2 and answer == ["42"] * 2 and row == {}
        return [len(text) for text in completions]

    assert [score.reward for score in scores(group, ["a", "bcd"])] == [1, 3]


def test_async_functions_wait_side_by_side():
    async def judge(completion):
        await asyncio.sleep(0.2)
        return float(completion)

    start = time.monotonic()
    found = scores(judge, [str(n) for n in range(16)])
    assert time.monotonic() - start < 1.6  # one after the other: 3.2 s
    assert [score.reward for score in found] == list(range(16))


def test_the_order_does_not_depend_on_timing():
    rng = random.Random(0)
    naps = {str(n): rng.random() / 20 for n in range(40)}

    def slow(completion):
        time.sleep(naps[completion])
        return float(completion)

    assert [score.reward for score in scores(slow, list(naps))] == list(range(40))


def test_groups_are_scored_side_by_side_and_no_more_than_the_workers_at_once():
    at_once, most, lock = 0, 0, threading.Lock()

    def slow(completion):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return 1.0

    rewards = RewardFunctions([slow], RewardSettings(workers=6))
    groups = [(problem(str(n)), ["a", "b", "c"]) for n in range(8)]
    assert [len(group) for group in rewards.scores(groups)] == [3] * 8
    assert 3 < most <= 6


def test_a_function_that_hangs_is_named_with_its_row():
    def hang(completion):
        time.sleep(60)

    async def hang_async(completion):
        await asyncio.sleep(60)

    for function in (hang, hang_async):
        name = function.__name__
        start = time.monotonic()
        refused(function, f"reward {name}, row p, completion 1: took more than 0.2 s", timeout=0.2)
        assert time.monotonic() - start < 5


def test_the_time_limit_counts_from_the_start_of_a_call():
    def slow(completion):
        time.sleep(0.1)
        return 1.0

    assert len(scores(slow, ["x"] * 12, timeout=0.6, workers=1)) == 12  # 1.2 s in all


def raises(completion):
    raise KeyError("oh\nno")


async def raises_async(completion):
    raise ValueError("no")


def raises_timeout(completion):
    raise TimeoutError("by itself")


def exits(completion):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward raises, row p, completion 1 raised KeyError: 'oh"),
        (raises_async, "raised ValueError: no"),
        (raises_timeout, "raised TimeoutError: by itself"),
        (exits, "raised SystemExit: 3"),
        (lambda completion: None, "returned None"),
        (lambda completion: float("nan"), "returned nan"),
        (lambda completion: "1", "returned '1'"),
        (lambda completion: {}, "returned no component"),
        (lambda completion: {"a": None}, "returned 'a': None"),
        (lambda completions: [1.0], "returned 1 results for 2 completions"),
        (lambda completions: 1.0, "must return a list"),
        (lambda completions: "ab", "must return a list"),
        ([length, length], "each needs a name of its own"),
        ("length", "give a function"),
    ],
)
def test_what_is_wrong_is_one_line(function, message):
    refused(function, message)


def test_two_functions_with_one_component():
    def first(completion):
        return {"a": 1}

    def second(completion):
        return {"a": 2}

    refused([first, second], "another function has a component 'a' too")


def test_a_weight_without_a_component():
    refused(length, "--reward-weights size: no such component", weights={"size": 1.0})


def test_parameters_are_checked_before_training():
    rewards = RewardFunctions([length])
    rewards.check({"answer": ""}, "row 1")
    with pytest.raises(UserError, match="has no parameter completion"):
        RewardFunctions([lambda text: 1.0]).check({"text": ""}, "row 1")
    with pytest.raises(UserError, match="wants 'solution', and row 1 has only answer"):
        RewardFunctions([lambda completion, solution: 1.0]).check({"answer": ""}, "row 1")
    with pytest.raises(UserError, match="without a name"):
        RewardFunctions([lambda completion, /: 1.0])

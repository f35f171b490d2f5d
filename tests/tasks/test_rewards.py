"""Reward functions: their calls, components, errors and time limits."""

import asyncio
import json
import random
import threading
import time

import numpy
import pytest
import torch
from small_rewards import problem, scores

from data.errors import UserError
from tasks.rewards import RewardFunctions


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

    (score,) = scores(parts, ["42"], weights={"short": 0.2}, reward_range=(0, 1.1))
    assert score.reward == pytest.approx(1.1) and score.exact
    assert score.parts == {"reward/right": 1.0, "reward/short": 0.5}

    (score,) = scores([parts, length], ["42"])
    assert score.reward == pytest.approx(1.7)
    assert list(score.parts) == ["reward/right", "reward/short", "reward/length"]
    (score,) = scores(length, ["42"])
    assert score.parts == {} and score.reward == 0.2
    one, two = scores(lambda completion: dict.fromkeys(completion, 0.5), ["a", "ab"])
    assert one.parts == {"reward/a": 0.5} and two.parts == {"reward/a": 0.5, "reward/b": 0.5}


def test_a_function_of_the_group_gets_lists():
    def group(prompts, completions, answer, **row):
        assert prompts == ["prompt p"] * 2 and answer == ["42"] * 2 and row == {}
        return [len(text) for text in completions]

    assert [score.reward for score in scores(group, ["a", "bcd"])] == [1, 3]


def slow(completion):
    time.sleep(0.2)
    return float(completion)


async def slow_async(completion):
    await asyncio.sleep(0.2)
    return float(completion)


@pytest.mark.parametrize("judge", [slow, slow_async])
def test_slow_functions_wait_side_by_side(judge):
    start = time.monotonic()
    found = scores(judge, [str(n) for n in range(16)])
    assert time.monotonic() - start < 1.6  # one after the other: 3.2 s
    assert [score.reward for score in found] == list(range(16))


def test_a_function_that_changes_its_row_changes_no_other_call():
    def one(completion, tests):
        tests["seen"].append(completion)
        return len(tests["seen"])

    def group(completions, tests):
        return [one(text, of_one) for text, of_one in zip(completions, tests, strict=True)]

    row = problem(tests={"seen": []})
    for function in (one, group):
        rewards = RewardFunctions([function], reward_range=(0, 9))
        assert [score.reward for score in rewards.scores([(row, ["a"] * 4)])[0]] == [1] * 4
    assert row.data["row"]["tests"] == {"seen": []}


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

    rewards = RewardFunctions([slow], workers=6)
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


def test_a_failure_abandons_the_other_calls_and_the_next_ones_run():
    ran, cancelled = [], threading.Event()

    def judge(completion):
        ran.append(completion)
        time.sleep({"hangs": 1.0}.get(completion, 0.0))
        return 1.0

    async def judge_async(completion):
        try:
            await asyncio.sleep({"hangs": 60}.get(completion, 0.0))
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    for function in (judge, judge_async):
        rewards = RewardFunctions([function], timeout=0.2, workers=1)
        with pytest.raises(UserError, match="completion 1: took more than 0.2 s"):
            rewards.scores([(problem(), ["hangs", "waits"])])
        assert [score.reward for score in rewards.scores([(problem(), ["next"])])[0]] == [1.0]

    assert cancelled.wait(10)
    time.sleep(1.0)
    assert ran == ["hangs", "next"]


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


def interrupts(completion):
    raise KeyboardInterrupt


async def cancels(completion):
    raise asyncio.CancelledError


def runs_out(completion):
    raise MemoryError("no room")


def refuses(completion):
    raise UserError("it is no row of mine")


def parses(completion):
    return json.loads("{")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward raises, row p, completion 1 raised KeyError: 'oh"),
        (raises_async, "raised ValueError: no"),
        (raises_timeout, "raised TimeoutError: by itself"),
        (exits, "raised SystemExit: 3"),
        (interrupts, "row p, completion 1 raised KeyboardInterrupt ("),
        (cancels, "row p, completion 1 raised CancelledError ("),
        (runs_out, "row p, completion 1 raised MemoryError: no room ("),
        (refuses, "row p, completion 1 raised UserError: it is no row of mine ("),
        (parses, "test_rewards.py, line "),
        (
            lambda completion: slow_async(completion),
            "returned a coroutine; define it with async def",
        ),
        (lambda completion: None, "returned None"),
        (lambda completion: float("nan"), "returned nan"),
        (lambda completion: "1", "returned '1'"),
        (lambda completion: {}, "returned no component"),
        (lambda completion: {"a": None}, "returned 'a': None"),
        (lambda completion: {1: 0.5, "1": 0.5}, "returned a component called 1; its name must be"),
        (lambda completion: {"a\n": 0.5}, "returned a component called 'a\\n'"),
        (lambda completion: 10**400, "completion 1: returned 1000"),
        (lambda completion: numpy.zeros(2), "completion 1: returned array([0., 0.])"),
        (lambda completion: torch.zeros(2), "completion 1: returned tensor([0., 0.])"),
        (lambda completions: [1.0], "returned [1.0]; it must return a list"),
        (lambda completions: 1.0, "must return a list"),
        (lambda completions: "ab", "must return a list"),
        ("length", "give a function"),
    ],
)
def test_what_is_wrong_is_one_line(function, message):
    refused(function, message)


class Judge:
    def __call__(self, completion):
        return 0.5

    def method(self, completion):
        return 0.5


def test_a_reward_outside_its_range_is_named_with_the_flag():
    for reward, weight in ((5, 1.0), (-0.1, 1.0), (1.0, 1.1)):
        message = f"reward size, row p, completion 1: is {reward * weight:g}, outside [0, 1]; give "

        def size(completion, reward=reward):
            return reward

        refused(size, message, weights={"size": weight}, reward_range=(0, 1))
    assert scores(lambda completion: 1 + 1e-8, reward_range=(0, 1))[0].exact  # by rounding
    in_float32 = numpy.float32(0.9)  # 0.899999976
    assert scores(lambda completion: in_float32, reward_range=(0, 0.9))[0].exact
    assert not scores(lambda completion: 0.8999, reward_range=(0, 0.9))[0].exact


def test_two_functions_with_one_component():
    def first(completion):
        return {"a": 1}

    def second(completion):
        return {"a": 2}

    refused([first, second], "two functions have a component 'a'")


def test_a_weight_without_a_component():
    refused(
        length,
        "has no component 'size', which --reward-weights names; it has length",
        weights={"size": 1.0},
    )


def test_parameters_are_checked_before_training():
    rewards = RewardFunctions([length])
    rewards.check({"answer": ""}, "row 1")
    with pytest.raises(UserError, match="has no parameter completion"):
        RewardFunctions([lambda text: 1.0]).check({"text": ""}, "row 1")
    with pytest.raises(UserError, match="wants 'solution', and row 1 has only answer"):
        RewardFunctions([lambda completion, solution: 1.0]).check({"answer": ""}, "row 1")
    for reward, name in (
        (lambda completions, completion_ids, **row: [0], "completion_ids"),
        (lambda completions, prompt: [0], "prompt"),
    ):
        gets = "remove it: besides columns, it gets only prompts and completions, as texts$"
        with pytest.raises(UserError, match=f"wants '{name}', and row 1 has only answer; {gets}"):
            RewardFunctions([reward]).check({"answer": ""}, "row 1")
        RewardFunctions([reward]).check({name: ""}, "row 1")
    with pytest.raises(UserError, match="without a name"):
        RewardFunctions([lambda completion, /: 1.0])


def test_a_watcher_is_told_how_many_calls_are_done(monkeypatch):
    monkeypatch.setattr("tasks.rewards.LOOK", 0.05)
    told = []

    def slow(completion):
        time.sleep(0.1)
        return 1.0

    rewards = RewardFunctions([slow], workers=2)
    rewards.watcher = lambda done, total, seconds: told.append((done, total, seconds))
    rewards.scores([(problem(str(n)), ["a", "b"]) for n in range(4)])
    counts = [done for done, _, _ in told]
    assert counts == sorted(counts) and 0 <= counts[0] < 8 and counts[-1] == 8
    assert {total for _, total, _ in told} == {8}
    assert 0 < told[0][2] < told[-1][2]

    told.clear()
    rewards.scores([(problem(), ["a"])])
    monkeypatch.setattr("tasks.rewards.LOOK", 60)
    told.clear()
    rewards.scores([(problem(), ["a"])])
    assert told == []  # fast enough

"""Reward functions: their calls, components, errors and time limits."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks import reward_calls
from tasks.base import UserError
from tasks.own_files import load_function
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


# Processes, and what is shown while calls run.

PROGRAM = """
import os, signal, sys, time

def reward(completion, answer, **row):
    print("a line that must not reach the pipe")
    return {"right": completion == answer, "process": os.getpid()}

def nap(completion):
    time.sleep(float(completion))
    return float(completion)

def group(completions, answer):
    return [len(text) / 10 for text in completions]

def array(completions):
    import numpy
    return numpy.array([len(text) for text in completions])

def raises(completion):
    raise KeyError("oh\\nno")

def text(completion):
    return "1"

def odd(completion):
    return {1, 2}

def leaves(completion):
    os._exit(3)

def exits(completion):
    sys.exit(3)

def dies(completion):
    os.kill(os.getpid(), signal.SIGKILL)

async def waits(completion):
    return os.getpid()
"""


@pytest.fixture
def in_processes(tmp_path):
    """Scores by a function of PROGRAM in processes."""
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)

    def scored(name, completions=("a", "b"), **settings):
        spec = f"{path}:{name}"
        settings = {"workers": 2, "program": spec} | settings
        return scores(load_function(spec), completions, **settings)

    return scored


def test_processes_return_what_threads_return(in_processes):
    texts = ["42", "4", "a\nb", "\u202e\ud7ff 42", ""]
    for name in ("group", "array"):
        assert in_processes(name, texts) == in_processes(name, texts, program=None)
    threads, processes = in_processes("reward", texts, program=None), in_processes("reward", texts)
    for one, other in zip(threads, processes, strict=True):
        assert one.parts["reward/right"] == other.parts["reward/right"]


def test_several_processes_compute(in_processes):
    found = in_processes("reward", ["42", "x"] * 20)
    processes = {score.parts["reward/process"] for score in found}
    assert len(processes) == 2 and os.getpid() not in processes
    assert [score.parts["reward/right"] for score in found] == [1.0, 0.0] * 20


def test_functions_of_a_group_and_arrays_in_a_process(in_processes):
    assert [score.reward for score in in_processes("group", ["a", "bcd"])] == [0.1, 0.3]
    assert [score.reward for score in in_processes("array", ["a", "bcd"])] == [1, 3]


def test_coroutines_stay_in_the_event_loop(in_processes):
    assert {score.reward for score in in_processes("waits")} == {os.getpid()}


def test_the_order_does_not_depend_on_the_timing_of_processes(in_processes):
    naps = [random.Random(0).random() / 20 for _ in range(30)]
    assert [score.reward for score in in_processes("nap", list(map(str, naps)))] == naps


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "reward raises, row p, completion 1 raised KeyError: 'oh"),
        ("text", "reward text, row p, completion 1: returned '1'"),
        ("odd", "reward odd, row p, completion 1 returned {1, 2}; it must return a finite number"),
        ("exits", "completion 1 raised SystemExit: 3"),
        ("leaves", "completion 1 ended its process (exit status 3)"),
        ("dies", "completion 1 ended its process (killed by SIGKILL; was the memory not enough?)"),
    ],
)
def test_what_is_wrong_in_a_process_is_one_line(in_processes, name, message):
    with pytest.raises(UserError) as caught:
        in_processes(name)
    assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_a_process_that_hangs_is_named_and_ended(in_processes):
    start = time.monotonic()
    with pytest.raises(UserError, match="reward nap, row p, completion 1: took more than 0.3 s"):
        in_processes("nap", ["60"], timeout=0.3)
    assert time.monotonic() - start < 10


def test_processes_end_with_their_functions(in_processes, tmp_path):
    spec = f"{tmp_path / 'mine.py'}:dies"
    rewards = RewardFunctions([load_function(spec)], RewardSettings(workers=3, program=spec))
    with pytest.raises(UserError):
        rewards.scores([(problem(), ["a"] * 9)])  # calls follow that nobody reads
    calls = rewards._calls
    del rewards
    gc.collect()
    for thread in calls._threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(process._process is None for process in calls._processes)


def test_processes_end_when_ours_is_killed(tmp_path):
    """Also while the function runs: nothing may compute on for nobody."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    script = f"""
import os, sys, threading, time
from tasks.protocol import Problem
from tasks.rewards import RewardFunctions, RewardSettings
from tasks.own_files import load_function
spec = {str(tmp_path / "mine.py:nap")!r}
rewards = RewardFunctions([load_function(spec)], RewardSettings(workers=1, program=spec))
problem = Problem("data", 1, "p", "", "k", {{"row": {{}}}})
rewards.scores([(problem, ["0"])])
print(rewards._calls._processes[0]._process.pid, flush=True)
rewards.scores([(problem, ["600"])])
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        child = int(process.stdout.readline())
        assert is_alive(child)
        process.kill()
    for _ in range(100):
        if not is_alive(child):
            break
        time.sleep(0.1)
    assert not is_alive(child)


def is_alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_watcher_is_told_how_many_calls_are_done(monkeypatch):
    monkeypatch.setattr(reward_calls, "LOOK", 0.05)
    told = []

    def slow(completion):
        time.sleep(0.1)
        return 1.0

    rewards = RewardFunctions([slow], RewardSettings(workers=2))
    rewards.watcher = lambda done, total, seconds: told.append((done, total, seconds))
    rewards.scores([(problem(str(n)), ["a", "b"]) for n in range(4)])
    counts = [done for done, _, _ in told]
    assert counts == sorted(counts) and 0 <= counts[0] < 8 and counts[-1] == 8
    assert {total for _, total, _ in told} == {8}
    assert 0 < told[0][2] < told[-1][2]

    told.clear()
    rewards.scores([(problem(), ["a"])])
    monkeypatch.setattr(reward_calls, "LOOK", 60)
    told.clear()
    rewards.scores([(problem(), ["a"])])
    assert told == []  # fast enough

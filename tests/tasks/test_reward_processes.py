"""Reward functions in processes of their own."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_rewards import problem, scores

from tasks import reward_calls
from tasks.base import UserError
from tasks.own_files import load_function
from tasks.rewards import RewardFunctions, RewardSettings

PROGRAM = """
import fractions, os, signal, sys, time

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

def numbered(completion):
    return {1: 0.5, "1": 0.5}

def half(completion):
    return fractions.Fraction(1, 2)

def interrupts(completion):
    raise KeyboardInterrupt

def runs_out(completion):
    raise MemoryError

def lazy(completion):
    return waits(completion)

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
    for name in ("group", "array", "half"):
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
        ("numbered", "completion 1 returned {1: 0.5, '1': 0.5}; it must return a finite number"),
        ("exits", "completion 1 raised SystemExit: 3"),
        ("interrupts", "completion 1 raised KeyboardInterrupt (/"),
        ("runs_out", "completion 1 raised MemoryError (/"),
        ("lazy", "completion 1 returned a coroutine, which nobody awaits"),
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


def test_a_process_that_hangs_is_ended_and_replaced(in_processes, tmp_path):
    spec = f"{tmp_path / 'mine.py'}:nap"
    settings = RewardSettings(timeout=1.0, workers=1, program=spec)
    rewards = RewardFunctions([load_function(spec)], settings)
    rewards.scores([(problem(), ["0"])])
    process = rewards._calls._processes[0]._process
    with pytest.raises(UserError, match="took more than 1 s"):
        rewards.scores([(problem(), ["60"])])
    assert process.wait(10) == -signal.SIGKILL
    assert rewards.scores([(problem(), ["0.25"])])[0][0].reward == 0.25


def test_a_file_that_hangs_in_a_process_is_named(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, time\n"
        "if os.environ['PARENT'] != str(os.getpid()): time.sleep(60)\n"
        "def nap(completion): return 0\n"
    )
    monkeypatch.setenv("PARENT", str(os.getpid()))
    monkeypatch.setattr(reward_calls, "LOADING", 0.3)
    spec = f"{path}:nap"
    with pytest.raises(UserError, match="reward nap, row p, completion 1: took more than 0.1 s"):
        scores(load_function(spec), workers=1, program=spec, timeout=0.1)


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

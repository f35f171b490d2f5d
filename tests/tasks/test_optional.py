"""What a task of one's own may have besides: anything wrong is one line that names the member."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from data.errors import UserError
from tasks.base import (
    Problem,
    check_problem,
    credits_of,
    default_steps_of,
    draft_of,
    family_size,
    mistakes_of,
    notes_of,
    problems_of,
    sources_of,
)
from tasks.registry import programs_of
from tasks.user_code import TaskError


def task(**members):
    return SimpleNamespace(name="own", **members)


def raises(*_):
    raise ValueError("lost")


def programs(own):
    return programs_of("data", own)


def steps(own):
    return default_steps_of(own, 2)


NUMPYS = Problem("own", 1, "a", "b", "k", {"x": np.int64(1)})
PROBLEM = Problem("own", 1, "a", "b", "k")


@pytest.mark.parametrize(
    "ask, members, line",
    [
        (lambda t: problems_of(t, ""), {"problems": lambda split: [3]}, "that: is int, and must"),
        (lambda t: problems_of(t, ""), {"problems": raises}, "problems() raised ValueError: lost"),
        (lambda t: problems_of(t, ""), {"problems": lambda split: [NUMPYS]}, "not what JSON can"),
        (
            lambda t: draft_of(t)(PROBLEM)("a"),
            {"draft": lambda problem: lambda text: "\ud800"},
            "the guesser of draft() returned '\\ud800'; it must return a text",
        ),
        (steps, {"default_steps": raises}, "default_steps() raised ValueError: lost"),
        (steps, {"default_steps": 3}, "default_steps() raised TypeError"),
    ],
)
def test_a_wrong_member_is_named_in_one_line(ask, members, line):
    with pytest.raises(UserError) as caught:
        ask(task(**members))
    assert str(caught.value).startswith("task own: ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_without_them_is_a_task():
    assert problems_of(task(), "train") == [] and notes_of(task()) == []
    assert mistakes_of(task()) == {} == sources_of(task())
    assert family_size(task(), 1) is None and programs(task()) == []
    assert steps(task()) == 100 and steps(task(default_steps=lambda _: np.int64(3))) == 3


@pytest.mark.parametrize(
    "messages", [3, "ab", [3], [{"role": "user"}], [{"role": 1, "content": ""}]]
)
def test_the_turns_of_a_conversation_are_checked(messages):
    problem = Problem("own", 1, "p", "", "k", {"messages": messages})
    with pytest.raises(TaskError, match="row 3: messages are .*; give a list of turns"):
        check_problem(problem, "row 3")


RIGHT = {
    "pairs": [((1, 0.5), (3, 0.0)), ()],
    "NumPy's": [np.array([[1, 0.5]], dtype=object), [(np.int64(3), np.float32(0.5))]],
    "whole amounts": [[(0, 1)], iter([(3, 2)])],
}


@pytest.mark.parametrize("given", RIGHT.values(), ids=RIGHT)
def test_credits_become_pairs_of_pythons_numbers(given):
    own = task(credits=lambda problem, completions: given, reward=None)
    for pairs in credits_of(own)(PROBLEM, ["a b", "c d"]):
        assert all(type(end) is int and type(amount) is float for end, amount in pairs)


WRONG = {
    "None": None,
    "too few": [[(1, 0.5)]],
    "no pairs": [[(1, 0.5)], [3]],
    "triples": [[(1, 0.5)], [(1, 0.5, 2)]],
    "texts": [[(1, 0.5)], [("1", 0.5)]],
    "fractions": [[(1, 0.5)], [(0.5, 0.5)]],
    "NaN": [[(1, 0.5)], [(1, math.nan)]],
    "before the text": [[(1, 0.5)], [(-1, 0.5)]],
    "behind the text": [[(1, 0.5)], [(4, 0.5)]],
    "not in order": [[(1, 0.5)], [(2, 0.5), (1, 0.5)]],
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_wrong_credits_are_one_line(given):
    own = task(credits=lambda problem, completions: given, reward=None)
    with pytest.raises(UserError) as caught:
        credits_of(own)(PROBLEM, ["a b", "c d"])
    assert str(caught.value).startswith(f"task own, problem {PROBLEM.key}: credits()")
    assert "\n" not in str(caught.value)

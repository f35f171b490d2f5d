"""What a task of one's own may have besides: anything wrong is one line that names the member."""

import math
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.errors import UserError
from tasks import base
from tasks.base import (
    MEMBERS,
    Problem,
    answers_of,
    check_problem,
    check_task,
    credits_of,
    default_steps_of,
    draft_of,
    foreign_of,
    levels_of,
    mistakes_of,
    notes_of,
    plain_texts_of,
    problems_of,
    sources_of,
    unseen_texts,
)
from tasks.registry import programs_of
from tasks.supply import family_size
from tasks.user_code import TaskError


def task(**members):
    return SimpleNamespace(name="own", **members)


def raises(*_):
    raise ValueError("lost")


def programs(own):
    return programs_of("data", own)


def steps(own):
    return default_steps_of(own, 2)


@pytest.mark.parametrize("member", ["credits", "answer"])
def test_what_changes_the_data_of_its_problem_is_refused(member):
    """The run would store other data than the problem had, and other methods would read them."""
    problem = Problem("own", 1, "a", "b", "k", {"words": ["a", "b"]})

    def change(problem, completion):
        if "x" in completion:
            problem.data["words"].pop()
        return [] if member == "credits" else "a"

    own = task(**{member: change}, reward=None)
    ask = {
        "credits": lambda text: credits_of(own)(problem, [text]),
        "answer": lambda text: answers_of(own, problem, ["a", text]),
    }[member]
    with pytest.raises(UserError) as caught:
        ask("x")
    assert str(caught.value).startswith("task own") and f"{member}() changed " in str(caught.value)


def test_answers_are_texts_or_none():
    assert answers_of(task(), PROBLEM, [" a ", "b"]) == ["a", "b"]
    own = task(answer=lambda problem, completion: None if completion == "a" else 7)
    assert answers_of(own, PROBLEM, ["a"]) == [None]
    with pytest.raises(UserError, match=r"^task own: answer\(\) returned 7; give a text or None$"):
        answers_of(own, PROBLEM, ["a", "b"])
    with pytest.raises(UserError, match=r"^task own: answer\(\) raised ValueError: lost"):
        answers_of(task(answer=raises), PROBLEM, ["a"])


ROOT = Path(__file__).resolve().parents[2]
NO_STEPS = ("x", None, 0, -3, True, 2.5)

NUMPYS = Problem("own", 1, "a", "b", "k", {"x": np.int64(1)})
PROBLEM = Problem("own", 1, "a", "b", "k")


@pytest.mark.parametrize(
    "ask, members, line",
    [
        (
            lambda t: problems_of(t, "train"),
            {"problems": lambda split: 3},
            "problems() raised Type",
        ),
        (lambda t: problems_of(t, "train"), {"problems": lambda split: [3]}, "returned 3 among"),
        (lambda t: problems_of(t, "train"), {"problems": raises}, "problems() raised ValueError"),
        (
            lambda t: problems_of(t, ""),
            {"problems": lambda split: [NUMPYS]},
            "is not what JSON can",
        ),
        (
            lambda t: draft_of(t)(PROBLEM)("a"),
            {"draft": lambda problem: lambda text: "\ud800"},
            "the guesser of draft() returned '\\ud800'; it must return a text",
        ),
        (lambda t: plain_texts_of(t, "train"), {"plain_texts": raises}, "raised ValueError: lost"),
        (
            lambda t: plain_texts_of(t, "train"),
            {"plain_texts": 3},
            "plain_texts() raised TypeError",
        ),
        (
            lambda t: plain_texts_of(t, "train"),
            {"plain_texts": lambda split: [1]},
            "plain_texts() returned [1]; it must return texts",
        ),
        (lambda t: problems_of(t, ""), {"problems": lambda split: count()}, "more than 1,000"),
        (lambda t: levels_of(t, 1), {"levels": lambda level: count()}, "more than 1,000"),
        (lambda t: foreign_of(t, 1), {"foreign": raises}, "foreign() raised ValueError: lost"),
        (lambda t: foreign_of(t, 1), {"foreign": lambda level: 3}, "foreign() returned 3;"),
        (notes_of, {"notes": 3}, "notes is 3; it must be a list of texts"),
        (notes_of, {"notes": "one"}, "notes is 'one'; it must be a list of texts"),
        (mistakes_of, {"mistakes": 3}, "mistakes is 3; it must map texts to texts"),
        (mistakes_of, {"mistakes": {1: "x"}}, "mistakes is {1: 'x'}; it must map texts to texts"),
        (sources_of, {"sources": lambda: 3}, "sources() is 3; it must map texts to texts"),
        (sources_of, {"sources": raises}, "sources() raised ValueError: lost"),
        (
            lambda t: family_size(t, 1),
            {"family_size": lambda n: "x"},
            "family_size(1) returned 'x'",
        ),
        (lambda t: family_size(t, 1), {"family_size": raises}, "family_size(1) raised ValueError"),
        (lambda t: foreign_of(t, 1), {"foreign": lambda level: {"a": 3}}, "returned {'a': 3}; it"),
        (
            lambda t: unseen_texts(t, ()),
            {"unseen": lambda known: 3},
            "unseen() returned 3; it must",
        ),
        (lambda t: unseen_texts(t, ()), {"unseen": raises}, "unseen() raised ValueError: lost"),
        (programs, {"program": "own.py"}, "program is 'own.py'; it must be a list of paths"),
        (programs, {"program": 3}, "program is 3; it must be a list of paths"),
        (programs, {"program": [3]}, "program is [3]; it must be a list of paths"),
        (programs, {"program": ["gone.py"]}, "program names gone.py; there is no such file"),
        *((steps, {"default_steps": lambda _, n=n: n}, f"returned {n!r};") for n in NO_STEPS),
        (steps, {"default_steps": raises}, "default_steps(2) raised ValueError: lost"),
        (steps, {"default_steps": 3}, "default_steps(2) raised TypeError"),
    ],
)
def test_a_wrong_member_is_named_in_one_line(ask, members, line, monkeypatch):
    monkeypatch.setattr(base, "MOST", 1000)
    with pytest.raises(UserError) as caught:
        ask(task(**members))
    assert str(caught.value).startswith("task own: ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_without_them_is_a_task():
    assert problems_of(task(), "train") == [] and notes_of(task()) == []
    assert mistakes_of(task()) == {} == sources_of(task())
    assert family_size(task(), 1) is None and programs(task()) == []
    assert steps(task()) == 100 and steps(task(default_steps=lambda _: np.int64(3))) == 3


@pytest.mark.parametrize("name", ["metric", "level_unit"])
def test_names_are_texts(name):
    members = {name: None, "make": raises, "score": raises}
    with pytest.raises(UserError, match=f"{name} is None; it must be a text"):
        check_task(task(**members), "own.py:Own")


def test_a_property_that_raises_is_one_line():
    class Own:
        name, make, score = "own", raises, raises
        draft = property(raises)

    with pytest.raises(UserError, match="^--task own.py:Own: draft raised ValueError: lost"):
        check_task(Own(), "own.py:Own")


def test_every_member_that_is_read_is_declared():
    """Else a property that raises would be a traceback in the middle of a run."""
    files = [*(ROOT / "tasks").rglob("*.py"), *(ROOT / "grpo").rglob("*.py")]
    reads = re.compile(r"\b(?:get|has)attr\((?:self\.)?task, \"(\w+)\"")
    read = {name for file in files for name in reads.findall(file.read_text())}
    assert len(read) > 20 and read <= {*MEMBERS}


@pytest.mark.parametrize("reward", [3, "c", lambda completion: 1.0])
@pytest.mark.parametrize("rewards, right", [((), "none, so give this m"), (("a", "b"), "a, b")])
def test_the_reward_in_use_is_one_of_the_rewards(reward, rewards, right):
    """Else config.yaml cannot hold it, or no resumed run can ask for it."""
    members = {"reward": reward, "rewards": rewards, "make": raises, "score": raises}
    with pytest.raises(UserError, match=f"^--task own.py:Own: reward is .*rewards: {right}"):
        check_task(task(**members), "own.py:Own")
    check_task(task(**members | {"reward": "a", "rewards": ["a"]}), "own.py:Own")


@pytest.mark.parametrize(
    "messages", [3, "ab", [3], [{"role": "user"}], [{"role": 1, "content": ""}]]
)
def test_the_turns_of_a_conversation_are_checked(messages):
    problem = Problem("own", 1, "p", "", "k", {"messages": messages})
    with pytest.raises(TaskError, match="row 3: messages are .*; give a list of turns"):
        check_problem(problem, "row 3")


def test_an_exception_whose_text_raises_is_named_by_its_type():
    class OddError(Exception):
        def __str__(self):
            return str(math.nan + self)

    def odd(*_):
        raise OddError

    with pytest.raises(UserError, match=r"problems\(\) raised OddError \("):
        problems_of(task(problems=odd), "train")


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

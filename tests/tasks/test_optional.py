"""What a task of one's own may have besides: anything wrong is one line that names the member."""

import math
from types import SimpleNamespace

import pytest

from tasks.base import Problem, UserError, mistakes_of, notes_of, problems_of, sources_of
from tasks.checks import TaskError, check_problem, check_task
from tasks.supply import family_size


def task(**members):
    return SimpleNamespace(name="own", **members)


def raises(*_):
    raise ValueError("lost")


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
    assert family_size(task(), 1) is None


@pytest.mark.parametrize("name", ["metric", "level_unit"])
def test_names_are_texts(name):
    members = {name: None, "make": raises, "score": raises}
    with pytest.raises(UserError, match=f"{name} is None; it must be a text"):
        check_task(task(**members), "own.py:Own")


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

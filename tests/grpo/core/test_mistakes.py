"""The most common mistake of wrong answers, in words."""

import pytest

from grpo.ending import mistake_of, most_common_mistake
from grpo.records import Completion, Group
from tasks.base import Problem, Score, mistakes_of
from tasks.interleave import Interleave
from tasks.traps import strategies

WORDS = {"copies A": "only text A is copied"}


def mistake(text, target="a b c", parts=None, finish="stop"):
    problem = Problem("t", 3, "p", target, "k")
    completion = Completion((1,), (0.0,), text, finish)
    return mistake_of(problem, completion, Score(0.0, parts or {}), WORDS)


@pytest.mark.parametrize(
    "case, words",
    [
        (mistake("a", parts={"trap": "copies A"}), "only text A is copied"),
        (mistake("a", parts={"trap": "of my own"}), "of my own"),
        (mistake("12 13", parts={"trap": None, "reason": "several answers"}), "several answers"),
        (mistake(" "), "nothing is written"),
        (mistake("a b", finish="length"), "truncated at the token budget"),
        (mistake("x y " * 4), "the text repeats itself"),
        (mistake("x y " * 3), "words are added"),
        (mistake("a b"), "words are missing"),
        (mistake("a b x"), "a wrong word"),
        (mistake("12", target="13"), "a wrong answer"),
        (mistake("12 or 13", target="13"), "a wrong answer"),
    ],
)
def test_mistakes_by_hand(case, words):
    assert case == words


def test_the_most_common_mistake_of_wrong_answers_alone():
    texts = ["a b c", "a b", "", "a b c", "x"]
    scores = [Score(1.0, exact=True), Score(0.6), Score(0.0), Score(1.0, exact=True), Score(0.1)]
    group = Group(
        0,
        Problem("t", 3, "p", "a b c", "k"),
        (1,),
        1.0,
        [Completion((1,), (0.0,), text, "stop") for text in texts],
        scores=scores,
    )
    assert most_common_mistake([group], {}) == "words are missing (2 of 3 wrong answers)"
    right = Group(0, group.problem, (1,), 1.0, group.completions[:1], scores=scores[:1])
    assert most_common_mistake([right], {}) == most_common_mistake([], {}) == ""


def test_interleave_has_words_for_each_trap():
    a, b = [f"a{i}" for i in range(20)], [f"b{i}" for i in range(20)]
    task = Interleave("similarity")
    problem = task.problem(a, b)
    words = mistakes_of(task)
    for name, text in strategies(a, b).items():
        (score,) = task.score(problem, [" ".join(text)])
        assert score.parts["trap"] == name and words[name] != name

"""What is said of a score: the formula must come to the reward that it explains."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.base import Problem, Score
from grpo.tasks.interleave import Interleave, interleaved
from grpo.tasks.registry import explain

WORDS = st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "the"]), min_size=1, max_size=7)


def come_to(formula: str) -> float:
    """Return the value of the right side of an explanation, without its words."""
    _, _, right = formula.partition(" = ")
    right = re.sub(r", of .*", "", right).replace("×", "*")
    return eval(re.sub(r"\b[a-zA-Z]\w*", "", right))


@given(WORDS, WORDS, st.sampled_from(Interleave.rewards), st.data())
def test_the_formula_of_each_reward_of_interleave_comes_to_the_reward(a, b, reward, data):
    task = Interleave(reward)
    problem = task.problem(a, b)
    written = data.draw(st.one_of(WORDS, st.permutations(interleaved(a, b))))
    (score,) = task.score(problem, [" ".join(written)])

    formula = explain("interleave", problem, score, reward)
    assert formula.startswith(f"{score.reward:.3f} = ")
    if not score.exact:
        assert come_to(formula) == pytest.approx(score.reward, abs=0.002), formula


def test_interleave_by_hand():
    problem = Interleave().problem(["a1", "a2"], ["b1", "b2"])

    def said(text, reward="prefix"):
        (score,) = Interleave(reward).score(problem, [text])
        return explain("interleave", problem, score, reward)

    assert said("a1 b1 a2 b2") == "1.000 = all 4 words right"
    assert said("a1 b1 b2") == "0.500 = 2 right before the first error / 4 wanted"
    assert said("a1 b1 x x x x") == "0.500 = 2 right before the first error / 4 wanted"
    assert said("a1 b1 a2 b2 x x") == (
        "0.800 = 4 right before the first error / 5 wanted and one too many"
    )
    assert said("a1 b1 b2", "pairs") == "0.333 = (-1 + 3) / (2 × 3), of pairs of neighbouring words"
    assert said("a1 a2", "similarity") == "0.500 = (0 + 4) / (2 × 4), of words"


def test_a_reason_is_said_before_anything_else():
    problem = Problem("arithmetic", 1, "What is 37 + 15?", "52", "k", {})
    right, none = Arithmetic().score(problem, ["52", "52 or 53"])
    assert explain("arithmetic", problem, right) == "1.000, as the task scored it"
    assert explain("arithmetic", problem, none) == "0.000 = not one integer"


def test_components_of_a_users_reward():
    problem = Problem("data", 1, "q", "", "k", {})
    parts = {"reward/place": 2 / 3, "reward/all": 0.2}
    assert explain("data", problem, Score(2 / 3 + 0.2, parts)) == (
        "0.867 = 0.667 place + 0.200 all"
    )
    assert explain("data", problem, Score(0.5, parts)) == "0.500, 0.667 place, 0.200 all"
    assert explain("data", problem, Score(0.5)) == "0.500, as the task scored it"
    # The file of a user's task is not loaded.
    assert explain("no/such.py:Task", problem, Score(0.5)) == "0.500, as the task scored it"


@pytest.mark.parametrize("task", ["interleave", "arithmetic", "gsm8k", "data"])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"words": "x", "matches": [], "substitutions": None, "gaps": {}},
        {"answer": 5, "digits_right": 1, "relative_error": "x", "reward/a": "x"},
        {"answer": "5", "digits_right": "1", "relative_error": 1e308, "reward/a": 10**400},
        {"words": 10**400, "matches": 1, "substitutions": 1, "gaps": 10**400},
    ],
)
def test_parts_that_no_version_stored_do_no_harm(task, parts):
    problem = Problem(task, 1, "q", "a b", "k", {})
    assert explain(task, problem, Score(0.25, parts), "prefix").startswith("0.250")

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
    right = re.sub(r"\((matched|off) .*|;.*", "", right).replace("−", "-").replace("×", "*")
    right = re.sub(r"(\d+) of (\d+)", r"(\1 / \2)", right)
    return eval(re.sub(r"(?!max\b)\b[a-zA-Z]\w*", "", right).replace("/  ", "/ "))


@given(WORDS, WORDS, st.sampled_from(Interleave.rewards), st.data())
def test_the_formula_of_each_reward_of_interleave_comes_to_the_reward(a, b, reward, data):
    task = Interleave(reward)
    problem = task.problem(a, b)
    written = data.draw(st.one_of(WORDS, st.permutations(interleaved(a, b))))
    (score,) = task.score(problem, [" ".join(written)])

    formula = explain("interleave", problem, " ".join(written), score, reward)
    assert formula.startswith(f"{score.reward:.3f} = ")
    if not score.exact:
        assert come_to(formula) == pytest.approx(score.reward, abs=0.002), formula


def test_interleave_by_hand():
    problem = Interleave().problem(["a1", "a2"], ["b1", "b2"])

    def said(text, reward="prefix"):
        (score,) = Interleave(reward).score(problem, [text])
        return explain("interleave", problem, text, score, reward)

    assert said("a1 b1 a2 b2") == "1.000 = all 4 words right"
    assert said("a1 b1 b2") == "0.500 = 2 right before the first error / 4 wanted"
    assert said("a1 b1 x x x x") == "0.500 = 2 right before the first error / 4 wanted"
    assert said("a1 b1 a2 b2 x x") == (
        "0.800 = 4 right before the first error / 5 wanted and one too many"
    )
    assert said("a1 b1 b2", "pairs").startswith("0.333 = (-1 + 3) / (2 × 3); the similarity of the")
    assert said("a1 a2", "similarity") == (
        "0.500 = (2 right − 0 replaced − 2 missing or too many + 4 wanted) / (2 × 4)"
    )


@pytest.mark.parametrize("text", ["51", "152", "25", "-52", "9999", "52", "none", "52 or 53", ""])
def test_the_formula_of_arithmetic_comes_to_the_reward(text):
    problem = Problem("arithmetic", 1, "What is 37 + 15?", "52", "k", {})
    (score,) = Arithmetic().score(problem, [text])
    formula = explain("arithmetic", problem, text, score)
    assert formula.startswith(f"{score.reward:.3f} = ")
    if score.parts["reason"] is None and not score.exact:
        assert come_to(formula) == pytest.approx(score.reward, abs=0.002), formula


def test_arithmetic_by_hand():
    problem = Problem("arithmetic", 1, "What is 37 + 15?", "52", "k", {})

    def said(text):
        return explain("arithmetic", problem, text, *Arithmetic().score(problem, [text]))

    assert said("52") == "1.000 = the answer 52 is right"
    assert said("52 or 53") == "0.000 = no answer was read: not one integer"
    assert said("51") == (
        "0.346 = 0.3 × 1 of 2 digits in place + 0.2 × (1 − relative error 0.019); the answer was "
        "51, not 52"
    )


def test_answers():
    problem = Problem("gsm8k", 1, "q", "Answer: 18", "k", {})
    right, wrong, none = Score(1.0, exact=True), Score(0.1), Score(0.0)
    assert explain("gsm8k:F", problem, "Answer: 18", right) == "1.000 = the answer 18 is right"
    assert explain("gsm8k:F", problem, "#### 17", wrong) == (
        "0.100 = there is an answer, 17, but it is wrong"
    )
    assert explain("gsm8k:F", problem, "", none) == "0.000 = no answer was found"


def test_components_of_a_users_reward():
    problem = Problem("data", 1, "q", "", "k", {})
    parts = {"reward/place": 2 / 3, "reward/all": 0.2}
    assert explain("data", problem, "", Score(2 / 3 + 0.2, parts)) == (
        "0.867 = 0.667 place + 0.200 all"
    )
    assert explain("data", problem, "", Score(0.5, parts)) == "0.500, 0.667 place, 0.200 all"
    assert explain("data", problem, "", Score(0.5)) == "0.500, as the task scored it"
    # The file of a user's task is not loaded.
    assert explain("no/such.py:Task", problem, "", Score(0.5)) == "0.500, as the task scored it"


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
    assert explain(task, problem, "a", Score(0.25, parts), "prefix").startswith("0.250")

import ast
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.data.errors import UserError
from grpo.tasks.arithmetic import Arithmetic, canonical, chain, product
from grpo.tasks.base import SPLITS, Problem, key_of, split_of_key
from grpo.tasks.supply import problem_at

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CHAIN, PRODUCT = Arithmetic(), Arithmetic("product")


def value_of(expression):
    """Evaluate by Python's own grammar."""

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(expression, mode="eval").body)


@given(st.integers(0, 10**9), st.integers(1, 8))
def test_chains_are_worth_what_they_say(seed, steps):
    text, values = chain(steps, random.Random(seed))
    assert len(values) == steps and value_of(text) == values[-1]
    assert sum(text.count(f" {sign} ") for sign in "+-*") == steps


@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(1, 5))
def test_products_have_the_digits_asked_for(seed, first, second):
    text, (value,) = product((first, second), random.Random(seed))
    x, y = text.split(" * ")
    assert (len(x), len(y)) == (first, second)
    assert int(x) * int(y) == value
    assert min(int(x), int(y)) >= 2
    assert canonical(text) == " * ".join(sorted((x, y), key=int))


@given(
    st.integers(0, 10**6),
    st.sampled_from(SPLITS),
    st.integers(0, 10**6),
    st.sampled_from([(CHAIN, 1), (CHAIN, 4), (PRODUCT, 32)]),
)
def test_a_problem_belongs_to_its_split_and_its_key_is_made_of_its_data(seed, split, index, family):
    task, level = family
    problem = problem_at(task, seed=seed, split=split, level=level, index=index)
    assert problem == problem_at(task, seed=seed, split=split, level=level, index=index)
    assert split_of_key(problem.key) == split and task.key(problem) == problem.key
    expression = problem.prompt.removeprefix("What is ").split("?")[0]
    assert expression == problem.data["expression"] and value_of(expression) == int(problem.target)
    assert "No working" in problem.prompt and "bare integer" in problem.prompt


def test_swapped_operands_are_one_problem():
    def key(task, expression):
        return task.key(Problem("arithmetic", 1, "", "", "", {"expression": expression}))

    assert key(PRODUCT, "37 * 15") == key(PRODUCT, "15 * 37") == key_of("arithmetic", "15 * 37")
    assert key(CHAIN, "(9 + 4) * 3") == key(CHAIN, "(4 + 9) * 3") != key(CHAIN, "(9 - 4) * 3")
    assert key(CHAIN, "9 - 4") != key(CHAIN, "4 - 9")


def test_family_sizes_by_hand():
    assert PRODUCT.family_size(32) == 900 * 90 == 81_000
    assert PRODUCT.family_size(11) == 8 * 9 // 2  # 2 ... 9, pairs in no order
    assert PRODUCT.family_size(22) == 90 * 91 // 2 and CHAIN.family_size(2) is None


def score(target, text):
    (one,) = CHAIN.score(Problem("arithmetic", 2, "", str(target), ""), [text])
    return one


@pytest.mark.parametrize(
    "text, reward",
    [
        ("52", 1),
        (" **52**", 1),
        ("37 + 15 = 52", 1),
        ("0052", 1),
        ("51", 0.15 + 0.2 * 51 / 52),
        ("152", 0.2),
        ("25", 0.2 * 25 / 52),
        ("-52", 0),
        ("52 or 53", 0),
        ("5.2", 0),
        ("", 0),
        ("fifty-two", 0),
    ],
)
def test_rewards_by_hand(text, reward):
    """The table of the module."""
    one = score(52, text)
    assert one.reward == pytest.approx(reward)
    assert one.exact == (reward == 1)
    assert one.value == float(one.exact)


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_only_the_right_answer_is_paid_in_full_and_half_is_the_most_for_a_wrong_one(target, answer):
    reward = score(target, str(answer)).reward
    assert reward == 1 if answer == target else 0 <= reward < 0.5


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["{}", "**{}**", "= {}", "The answer is {}.", "\\boxed{{{}}}"]),
)
def test_the_form_is_never_paid(target, answer, form):
    plain, formed = score(target, str(answer)), score(target, form.format(answer))
    assert plain.reward == formed.reward and plain.parts == formed.parts


def test_parts_by_hand():
    assert score(1234, "-234").parts == {
        "answer": "-234",
        "reason": None,
        "sign": False,
        "digits_right": "0111",
        "relative_error": 1468 / 1234,
    }
    assert score(1234, "1034").parts["digits_right"] == "1011"
    assert score(7, "12 13").parts == {"answer": None, "reason": "not one integer"}
    assert score(3, "9" * 90).parts["relative_error"] == 1000.0


@pytest.mark.parametrize("level", [0, 3, 30])
def test_products_need_two_digits_of_level(level):
    with pytest.raises(UserError, match=f"--level {level}: products need digits of both factors"):
        problem_at(PRODUCT, seed=0, split="train", level=level, index=0)


def test_another_family_is_refused():
    with pytest.raises(UserError, match="^--family sums: give chain or product$"):
        Arithmetic("sums")

"""Scores as a task gives them, checked: ranges, numbers of NumPy and PyTorch, and what is refused
in one line.
"""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.data.errors import UserError, shortened
from grpo.tasks.base import Problem, Score, range_of, scores_of, scores_of_groups

PROBLEM = Problem("given", 1, "prompt", "target", "k" * 16)
UNSET = object()


class Given:
    """Scores that a test has made, for a task of some reward range (UNSET: none is declared)."""

    name, rewards, default_level = "given", (), 1

    def __init__(self, scores, reward_range=UNSET):
        self.scores = scores
        if reward_range is not UNSET:
            self.reward_range = reward_range

    def score(self, problem, completions):
        return self.scores


def checked(*scores, **options):
    return scores_of(Given(scores, **options), PROBLEM, ["text"] * len(scores))


def refused(*scores, **options) -> str:
    with pytest.raises(UserError) as caught:
        checked(*scores, **options)
    line = str(caught.value)
    where = rf"task given, problem {'k' * 16}, completion {len(scores)}: score\(\) returned .*"
    assert re.fullmatch(where, line), line
    return line.partition(" returned ")[2]


class Fails(Given):
    def score(self, problem, completions):
        return [1 / 0]


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (Given(None), r": score\(\) raised TypeError"),
        (Given([]), r": score\(\) returned 0 scores for 1 completions"),
        (Given([0.5]), r", completion 1: score\(\) returned .*float"),
        (Fails([]), r": score\(\) raised ZeroDivisionError: division by zero \(.*line \d"),
    ],
)
def test_a_scorer_that_fails_is_named(task, fault):
    with pytest.raises(UserError, match=f"task given, problem {PROBLEM.key}{fault}"):
        scores_of(task, PROBLEM, ["text"])


@pytest.mark.parametrize("found", [None, [], [None]])
def test_groups_that_are_not_scored_are_one_line(found):
    task = Given([])
    task.score_groups = lambda groups: found
    with pytest.raises(UserError, match=r"^task given: score_groups\(\) raised .*Error"):
        scores_of(task, PROBLEM, ["text"])


RANGE = "; a task declares another reward_range, and rows have --reward-range LOW,HIGH"
FINITE = "; give a finite number, up to 1e+30"


@pytest.mark.parametrize(
    "scores, limits, line",
    [
        ([Score(0.5), Score(50)], UNSET, f"a reward of 50; it must lie in [0, 1]{RANGE}"),
        ([Score(1e-3)], (-1.0, 0.0), f"a reward of 0.001; it must lie in [-1, 0]{RANGE}"),
        ([Score(50, value=50)], (0, 100), "a value of 50; it must lie in [0, 1]"),
        ([Score(0.5, exact="no")], UNSET, "exact 'no'; give True or False"),
        ([Score(50)], None, "no value; a task whose reward_range is None must give one, in [0, 1]"),
        ([Score(np.float32("nan"), value=0.5)], None, f"a reward of np.float32(nan){FINITE}"),
        ([Score(10**400)], None, f"a reward of {shortened(str(10**400))}{FINITE}"),
        ([Score(np.array([0.5]))], UNSET, f"a reward of array([0.5]){FINITE}"),
        ([Score(0.5, {"seen": {1, 2}})], UNSET, "Object of type set is not JSON serializable"),
        ([Score(0.5, {"trap": 1})], UNSET, "'trap' 1; give the name of a trap, or None"),
        ([Score(0.5, {"trap_kind": 1})], UNSET, "'trap_kind' 1; give the name of a trap, or None"),
        ([Score(0.5, {"reward/x": "a"})], UNSET, f"a reward/x of 'a'{FINITE}"),
        ([Score(0.5, {"reward/x": math.inf})], UNSET, f"a reward/x of inf{FINITE}"),
    ],
)
def test_what_is_refused(scores, limits, line):
    assert refused(*scores, reward_range=limits) == line


@pytest.mark.parametrize(
    "limits", [(1, 1), (0,), (0, 1, 2), (0, math.inf), (0, 1e31), 1.0, (None, 1)]
)
def test_a_range_that_is_none_is_refused(limits):
    with pytest.raises(UserError, match="^task given: reward_range is .*; give the lowest and the"):
        range_of(Given([], limits))


@given(
    low=st.floats(-1000, 1000),
    width=st.floats(1e-3, 1000),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=6),
)
def test_the_value_is_the_place_of_the_reward_in_its_range(low, width, shares):
    limits = (low, low + width)
    rewards = [low + share * (limits[1] - low) for share in shares]
    scores = checked(*map(Score, rewards), reward_range=limits)
    assert all(0 <= score.value <= 1 and low <= score.reward <= limits[1] for score in scores)
    assert [score.value for score in scores] == pytest.approx(shares, abs=2e-6)
    # A value that the task gives is shown as it is.
    assert checked(Score(low, value=0.75), reward_range=limits)[0].value == 0.75


def test_an_end_that_rounding_has_passed_is_the_end():
    """Sums in float32 pass 1 by 1e-7; in a range that wide nobody means anything by it."""
    scores = checked(Score(np.float32(1) + np.float32(1.2e-7)), Score(-1e-9), Score(1 + 2e-16))
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert refused(Score(1.00001)).startswith("a reward of 1.00001")


def test_an_answer_of_the_highest_value_is_exact():
    full, part = checked(Score(1.0), Score(0.5, value=0.75))
    assert full.exact and not part.exact


def test_a_score_may_change_its_list_of_completions():
    class Empties(Given):
        def score(self, problem, completions):
            return [Score(len(completions.pop()) / 4) for _ in range(len(completions))]

        def score_groups(self, groups):
            return [self.score(problem, texts) for problem, texts in groups]

    texts = ["a", "abc"]
    assert [score.reward for score in scores_of(Empties([]), PROBLEM, texts)] == [0.75, 0.25]
    assert len(scores_of_groups(Empties([]), [(PROBLEM, texts)])[0]) == 2 == len(texts)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(seen=1),
        lambda data: data["tests"][0]["input"].append(3),
        lambda data: data["tests"].reverse(),
        lambda data: data["pair"][1].clear(),
        lambda data: data.update(tests=np.ones(2)),
    ],
)
def test_a_score_that_changes_the_data_of_its_problem_changes_a_copy(change):
    """The run would store other data than the problem had."""
    data = {"tests": [{"input": [1, 2]}, {"input": []}], "pair": (1, [2]), "limit": math.nan}
    problem = replace(PROBLEM, data=data)

    class Changes(Given):
        def score(self, problem, completions):
            change(problem.data)
            return [Score(0.5) for _ in completions]

    before = repr(problem)
    scores_of_groups(Changes([]), [(problem, ["a"])])
    assert repr(problem) == before


NUMBERS = [
    np.float32(0.5),
    np.float64(0.5),
    np.float16(0.5),
    np.array(0.5),
    torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
    Fraction(1, 2),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numbers_of_other_libraries_become_pythons(number):
    (score,) = checked(Score(number, value=number, exact=np.bool_(True)))
    assert (score.reward, score.value, score.exact) == (0.5, 0.5, True)
    assert {type(score.reward), type(score.value)} == {float} and type(score.exact) is bool


def test_parts_of_other_libraries_become_what_json_holds():
    parts = {
        np.str_("label"): np.str_("a"),
        "count": np.int64(3),
        "share": np.float32(0.5),
        "right": np.bool_(False),
        "each": np.array([1, 2]),
        "trap": None,
    }
    (score,) = checked(Score(0.5, parts))
    assert json.loads(json.dumps(score.parts)) == score.parts
    assert score.parts == {
        "label": "a",
        "count": 3,
        "share": 0.5,
        "right": False,
        "each": [1, 2],
        "trap": None,
    }
    assert type(score.parts["label"]) is str

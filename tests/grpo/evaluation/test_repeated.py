"""pass@k and majority votes, against enumeration."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Completion, Group
from grpo.tools.evaluation.repeated import pass_at_k, repeated_figures, sizes
from tasks.base import Problem, Score


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(share)


@given(st.integers(1, 300))
def test_sizes_rise_to_the_number_of_samples(samples):
    found = sizes(samples)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == samples
    assert all(b <= 2 * a for a, b in zip(found, found[1:]))


class Task:
    name = "task"

    def answer(self, problem, completion):
        return completion.strip() or None


def group(*texts, answer="7"):
    completions = [Completion((1,), (0.0,), text, "stop") for text in texts]
    scores = [Score(float(text.strip() == answer), exact=text.strip() == answer) for text in texts]
    problem = Problem("task", 1, "?", answer, "key")
    return Group(0, problem, (1,), 1.0, completions, scores=scores)


def majority(*texts):
    return repeated_figures(Task(), [group(*texts)])["majority"]["mean"]


def test_the_majority_is_the_most_frequent_answer():
    assert majority("7", "8", " 7") == 1
    assert majority("8", "7", "8") == 0
    assert majority("7", "8") == 1 and majority("8", "7") == 0  # the first of equals
    assert majority("", "", "7") == 1  # what is no answer has no vote
    assert majority("", "") == 0


def test_figures_are_means_over_problems():
    figures = repeated_figures(Task(), [group("7", "8", "8", "8"), group("7", "7", "7", "7")])
    assert [(entry["k"], entry["mean"]) for entry in figures["pass_at"]] == [
        (1, 0.625),
        (2, 0.75),
        (4, 1.0),
    ]
    assert figures["majority"]["mean"] == 0.5 and figures["majority"]["k"] == 4
    for entry in (*figures["pass_at"], figures["majority"]):
        assert 0 <= entry["ci_low"] <= entry["mean"] <= entry["ci_high"] <= 1
    assert repeated_figures(Task(), [group("7")]) == {}

"""pass@k, against enumeration; the file of samples."""

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Completion, Group
from grpo.tools.evaluate import as_json, repeated_figures
from tasks.base import Problem, Score


def group(*texts, answer="7"):
    completions = [Completion((1,), (0.0,), text, "stop") for text in texts]
    scores = [Score(float(text == answer), exact=text == answer) for text in texts]
    problem = Problem("task", 1, "?", answer, "key")
    return Group(0, problem, (1,), 1.0, completions, scores=scores)


@given(st.lists(st.booleans(), min_size=2, max_size=9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right):
    for entry in repeated_figures([group(*("7" if each else "8" for each in right))])["pass_at"]:
        subsets = list(combinations(right, entry["k"]))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert entry["mean"] == pytest.approx(share)


def test_figures_are_means_over_problems():
    figures = repeated_figures([group("7", "8", "8", "8"), group("7", "7", "7", "7")])
    means = [(entry["k"], entry["mean"]) for entry in figures["pass_at"]]
    assert means == [(1, 0.625), (2, 0.75), (4, 1.0)]
    for entry in figures["pass_at"]:
        assert 0 <= entry["ci_low"] <= entry["mean"] <= entry["ci_high"] <= 1
    assert [entry["k"] for entry in repeated_figures([group(*"1234567")])["pass_at"]] == [
        1,
        2,
        4,
        7,
    ]
    assert repeated_figures([group("7")]) == {}


def test_every_answer_is_written():
    result = {"model": "m", "sent": ["a", "b"], "groups": [group("7", "8 “")]}
    (line,) = json.loads(as_json([result]))
    assert (line["model"], line["prompt"]) == ("m", "a\nb")
    (one,) = line["answers"]
    assert one["completions"] == ["7", "8 “"] and one["exact"] == [True, False]
    assert (one["scores"], one["target"], one["key"]) == ([1, 0], "7", "key")

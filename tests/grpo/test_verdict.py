"""The verdict on a run."""

import json
import random
from dataclasses import replace

import pytest

from grpo.records import Completion, Group
from grpo.verdict import (
    MIN_STEPS,
    HeldOutScores,
    Verdict,
    is_expected,
    reach_verdict,
    values_by_problem,
)
from tasks.base import Problem, Score


def group(key, level=1, value=0.5):
    problem = Problem("t", level, "p", "x", key)
    completions = [Completion((1,), (0.0,), "x", "stop")] * 2
    return Group(0, problem, (1,), 1.0, completions, scores=[Score(value)] * 2)


def metrics(steps, updated=None, wasted=0, clipped=0.0):
    """The lines of metrics.jsonl for so many steps, the first `updated` of which had an update."""
    return [
        {
            "num_tokens": 100 * number,
            "wasted_tokens_total": wasted,
            "completions/clipped_ratio": clipped,
            **({"loss": 0.1} if updated is None or number <= updated else {}),
        }
        for number in range(1, steps + 1)
    ]


def verdict_on(before, after, steps=MIN_STEPS, was_solved=False, stopped=""):
    problems = [str(number) for number in range(len(before))]
    return reach_verdict(
        25,
        HeldOutScores(dict(zip(problems, before)), dict(zip(problems, after))),
        metrics(steps),
        was_solved=was_solved,
        stopped=stopped,
    )


@pytest.mark.parametrize(
    "before, after, options, kind, exit_status",
    [
        ([0.2] * 64, [0.9] * 64, {}, "learned", 0),
        ([0.2] * 64, [0.9] * 64, {"steps": 2}, "learned", 0),
        ([0.2] * 64, [0.9] * 64, {"stopped": "no group"}, "learned", 3),
        ([1.0] * 64, [1.0] * 64, {"was_solved": True}, "already solved", 0),
        ([1.0] * 64, [0.1] * 64, {"was_solved": True}, "not learned", 3),
        ([0.2] * 64, [0.2] * 64, {}, "not learned", 3),
        ([0.9] * 64, [0.2] * 64, {}, "not learned", 3),
        ([0.2] * 64, [0.2] * 64, {"steps": 2}, "too short to tell", 0),
        ([0.2] * 64, [0.2] * 64, {"steps": MIN_STEPS - 1}, "too short to tell", 0),
        ([0.2] * 64, [0.2] * 64, {"steps": 20, "stopped": "no group"}, "not learned", 3),
        ([0.0] * 3, [1.0] * 3, {}, "not learned", 3),  # three problems prove nothing
        ([], [], {}, "not measured", 0),
    ],
)
def test_verdicts_by_hand(before, after, options, kind, exit_status):
    verdict = verdict_on(before, after, **options)
    assert (verdict.kind, verdict.exit_status) == (kind, exit_status)


def test_the_same_problems_are_compared():
    before = {"a": 0.2, "b": 0.4, "trained on since": 0.0}
    after = {"b": 0.5, "a": 0.4, "new": 1.0}
    verdict = reach_verdict(10, HeldOutScores(before, after), metrics(2), was_solved=False)
    assert verdict.n == 2
    assert (verdict.before, verdict.after) == pytest.approx((0.3, 0.45))
    assert verdict.difference == pytest.approx(0.15)


def test_the_same_problems_are_compared_after_a_warm_start():
    before, imitated, after = {"a": 0.2, "b": 0.4}, {"b": 0.5}, {"a": 0.9, "b": 0.75}
    verdict = reach_verdict(
        10, HeldOutScores(before, after, imitated), metrics(2), was_solved=False
    )
    assert verdict.n == 1
    assert (verdict.before, verdict.imitated, verdict.after) == (0.4, 0.5, 0.75)
    assert verdict.difference == 0.25


def test_values_are_those_of_one_level():
    groups = [group(key="a", value=0.25), group(key="b", level=2)]
    assert values_by_problem(groups, 1) == {"a": 0.25}


def test_a_step_of_more_groups_counts_for_more_in_the_share_of_truncated_completions():
    """All completions of 8 groups were truncated, and none of 24."""
    lines = metrics(2)
    lines[0] |= {"groups/count": 8, "completions/clipped_ratio": 1.0}
    lines[1] |= {"groups/count": 24, "completions/clipped_ratio": 0.0}
    verdict = reach_verdict(25, HeldOutScores({}, {}), lines, was_solved=False)
    assert verdict.truncated == 0.25


def test_the_figures_of_a_verdict_and_how_they_read():
    lines = metrics(60, updated=41, wasted=4800, clipped=0.25)
    values = {str(n): 0.0 for n in range(100)}, {str(n): 0.9 for n in range(100)}
    verdict = reach_verdict(25, HeldOutScores(*values), lines, was_solved=False)
    assert (verdict.steps, verdict.updated, verdict.untaught) == (60, 41, 0.8)
    said = verdict.lines("similarity", "words")
    assert said[0].startswith("LEARNED: held-out similarity at 25 words 0.000 → 0.900, difference")
    assert "(n = 100, paired)" in said[0]
    assert "41 of 60 steps updated the weights; 80% of the sampled tokens" in said[1]
    assert "25% of the completions were truncated" in said[1]

    assert "right answer" not in said[1]

    written = json.loads(json.dumps(verdict.to_json()))
    assert written["verdict"] == "learned" and written["purpose"] == "verdict"
    assert (written["step"], written["level"], written["n"]) == (60, 25, 100)


def test_a_verdict_says_how_often_right_answers_were_shown():
    """In 3 of the 12 groups that two steps trained on."""
    lines = metrics(2)
    lines[0] |= {"groups/kept": 4, "groups/demonstrated": 3}
    lines[1] |= {"groups/kept": 8, "groups/demonstrated": 0}
    verdict = reach_verdict(25, HeldOutScores({}, {}), lines, was_solved=False)
    assert verdict.demonstrated == 0.25
    spent = verdict.lines("similarity", "words")[1]
    assert spent.endswith("; 25% of the groups trained on showed the right answer")
    assert json.loads(json.dumps(verdict.to_json()))["demonstrated"] == 0.25


def test_a_verdict_is_read_back_also_without_the_keys_that_older_versions_lack():
    new = ("solved_step", "mistake", "next_command")
    verdict = replace(
        verdict_on([0.2] * 64, [0.9] * 64),
        solved_step=40,
        mistake="a wrong word (2 of 3 wrong answers)",
        next_command="python eval.py",
    )
    line = json.loads(json.dumps(verdict.to_json()))
    assert Verdict.from_json(line) == verdict
    older = {name: value for name, value in line.items() if name not in new}
    assert Verdict.from_json(older) == verdict_on([0.2] * 64, [0.9] * 64)
    assert Verdict.from_json({"verdict": "learned", "step": 3}) is None

    said = verdict.lines("similarity", "words")
    assert said[2:] == [
        "solved in every held-out evaluation from step 40 on",
        "most common mistake: a wrong word (2 of 3 wrong answers)",
    ]


def test_a_run_is_expected_to_learn_and_a_control_experiment_is_not():
    learned, not_learned = (verdict_on([0.2] * 64, [after] * 64) for after in (0.9, 0.2))
    mark = {"control": "shuffled-rewards"}
    assert is_expected(learned, {}) and is_expected(not_learned, mark)
    assert not is_expected(not_learned, {}) and not is_expected(learned, mark)
    assert not is_expected(replace(learned, stopped="an alarm"), {})


def test_what_imitation_came_to_is_no_learning_by_reinforcement():
    """The run is compared with the policy after imitation; the untrained score is stated beside
    it.
    """
    untrained, imitated = {str(n): 0.0 for n in range(64)}, {str(n): 0.4 for n in range(64)}
    learned = {str(n): 0.9 for n in range(64)}
    scores = HeldOutScores(untrained, imitated, imitated)
    same = reach_verdict(10, scores, metrics(60), was_solved=False)
    assert same.kind == "not learned" and same.exit_status == 3 and same.difference == 0
    assert same.before == 0 and same.imitated == pytest.approx(0.4)

    scores = HeldOutScores(untrained, learned, imitated)
    more = reach_verdict(10, scores, metrics(60), was_solved=False)
    assert more.kind == "learned" and more.difference == pytest.approx(0.5)
    assert (
        "10 words 0.000 → 0.400 by imitation → 0.900, reinforcement added +0.500"
        in (more.lines("similarity", "words")[0])
    )


def test_where_imitation_was_not_measured_nothing_is_said():
    """Older runs measured the policy after imitation at one level only."""
    scores = HeldOutScores({"a": 0.2}, {"a": 0.9}, imitated={})
    assert reach_verdict(10, scores, metrics(60), was_solved=False).kind == "not measured"


def test_a_run_that_changed_no_weights_has_not_learned():
    values = {str(n): 0.2 for n in range(64)}, {str(n): 0.9 for n in range(64)}
    verdict = reach_verdict(10, HeldOutScores(*values), metrics(60, updated=0), was_solved=False)
    assert verdict.updated == 0 and verdict.kind == "not learned"


def test_a_policy_that_a_short_run_made_worse_has_not_learned():
    verdict = verdict_on([0.6] * 64, [0.1] * 64, steps=4)
    assert verdict.high < 0 and verdict.kind == "not learned" and verdict.exit_status == 3


def test_several_levels_need_a_clearer_difference_each():
    """The one-sided error of 2.5 % is shared among them."""
    rng = random.Random(0)
    gains = [rng.choice([-1.0, 0.0, 0.0, 1.0, 1.0]) / 4 for _ in range(80)]
    values = {str(n): 0.5 for n in range(80)}, {str(n): 0.5 + g for n, g in enumerate(gains)}
    one, four = (
        reach_verdict(
            10, HeldOutScores(*values, levels=levels), metrics(60, updated=60), was_solved=False
        )
        for levels in (1, 4)
    )
    assert one.kind == "learned" and one.low > 0 > four.low and four.kind == "not learned"
    assert four.high > one.high and four.difference == one.difference


@pytest.mark.parametrize("n", [8, 64])
def test_no_difference_is_rarely_called_learning(n):
    """Two draws of one policy: "learned" in at most 2.5 % of the cases (one-sided), here of 400.

    At the true rate of 2.5 % more than 20 of 400 come up with a probability below 0.2 %.
    """
    rng = random.Random(n)

    def score(rate):
        return 1.0 if rng.random() < rate else rng.choice([0.0, 0.5])

    kinds = []
    for _ in range(400):
        rates = [rng.random() for _ in range(n)]
        before, after = ([score(rate) for rate in rates] for _ in range(2))
        kinds.append(verdict_on(before, after).kind)
    assert kinds.count("learned") <= 20


def test_a_small_but_clear_gain_is_found():
    rng = random.Random(0)
    gains = [rng.choice([0.0, 0.1, 0.2]) for _ in range(64)]
    verdict = verdict_on([0.3] * 64, [0.3 + gain for gain in gains])
    assert verdict.kind == "learned"
    assert 0 < verdict.low < verdict.difference < verdict.high

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Completion, Group
from grpo.variance import CLASSES, REMEDIES, VarianceMonitor, classify
from tasks.base import Problem, Score

PROBLEM = Problem("t", 1, "p", "x", "k")


def group(verdict, action="keep", attempt=0, tokens=3):
    return Group(0, PROBLEM, (1,), 1.0, [Completion((1,) * tokens, (0.0,) * tokens, "x", "stop")], attempt,
                 [Score(0.5)], verdict, action)


def step(**counts):
    return [group(verdict) for verdict, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize("policy", ["keep", "skip"])
def test_a_step_back_raises_the_temperature(policy):
    monitor = VarianceMonitor(policy, temperature=1.0, heat=1.3, ceiling=1.5)
    assert monitor.raise_temperature() == "temperature 1.000 → 1.300"
    assert monitor.raise_temperature() == "temperature 1.300 → 1.500, its ceiling" and monitor.temperature == 1.5


@pytest.mark.parametrize("rewards, texts, verdict", [
    ([0.1, 0.2], ["a", "b"], "varied"),
    ([1.0, 1.0], ["a", "a"], "solved"),  # identical and right is solved: there is nothing to mend
    ([1.0, 1.0], ["a", "b"], "solved"),
    ([0.5, 0.5], ["a", "a"], "identical"),
    ([0.0, 0.0], ["a", "a"], "identical"),  # one wrong text is the collapse, whatever it earns
    ([0.0, 0.0], ["a", "b"], "failed"),
    ([0.5, 0.5], ["a", "b"], "tied"),
])
def test_classes_by_hand(rewards, texts, verdict):
    assert classify(rewards, texts, threshold=0) == verdict


def test_threshold_catches_near_ties():
    assert classify([0.5, 0.5 + 1e-9], ["a", "b"], threshold=0) == "varied"
    assert classify([0.5, 0.5 + 1e-9], ["a", "b"], threshold=1e-6) == "tied"


@given(st.lists(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=8), max_size=40),
       st.sampled_from(["keep", "skip", "resample"]))
def test_temperature_stays_within_its_bounds(steps, policy):
    monitor = VarianceMonitor(policy, temperature=0.8)
    for verdicts in steps:
        before = monitor.temperature
        monitor.observe([group(verdict) for verdict in verdicts])
        collapsed = sum(v in ("identical", "failed", "tied") for v in verdicts) / len(verdicts)
        assert 0.8 <= monitor.temperature <= 0.8 * 1.5
        assert monitor.temperature <= before or (collapsed >= 0.5 and policy != "keep")
        if 0.25 < collapsed < 0.5:  # hysteresis
            assert monitor.temperature == before
        assert all(0.8 <= monitor.retry_temperature(n) <= 0.8 * 1.5 for n in (1, 2, 9))


def test_temperature_rises_and_returns_by_hand():
    monitor = VarianceMonitor("skip", temperature=1.0, heat=1.2, cool=1.1, ceiling=1.5)
    seen = []
    for counts in (dict(tied=2, varied=2), dict(failed=4), dict(identical=4), dict(tied=3, varied=5), dict(varied=4),
                   dict(varied=4), dict(solved=4)):
        monitor.observe(step(**counts))
        seen.append(round(monitor.temperature, 4))
    # 1.2, 1.44, ceiling 1.5; 3 of 8 lie between release and trigger; then 1.5 / 1.1, again, and solved groups do not heat
    assert seen == [1.2, 1.44, 1.5, 1.5, 1.3636, 1.2397, 1.127]


@given(st.sampled_from(CLASSES), st.integers(0, 5), st.integers(0, 4))
def test_decisions(verdict, attempt, retries):
    kept = VarianceMonitor("keep", temperature=1.0, retries=retries).decide(verdict, attempt)
    skipped = VarianceMonitor("skip", temperature=1.0, retries=retries).decide(verdict, attempt)
    again = VarianceMonitor("resample", temperature=1.0, retries=retries).decide(verdict, attempt)
    assert kept == "keep"
    assert skipped == ("keep" if verdict == "varied" else "skip")
    if verdict == "varied":
        assert again == "keep"
    else:
        assert again == ("resample" if verdict != "solved" and attempt < retries else "skip")


def test_the_alarm_names_the_cause_once_and_is_armed_again():
    monitor = VarianceMonitor("skip", temperature=1.0, alarm_steps=3)
    said = [monitor.observe(step(identical=3, varied=1)) for _ in range(6)]
    alarms = [[line for line in lines if line.startswith("ALARM")] for lines in said]
    assert [len(lines) for lines in alarms] == [0, 0, 1, 0, 0, 0]
    assert "75% identical" in alarms[2][0] and REMEDIES["identical"] in alarms[2][0]
    monitor.observe(step(varied=4))
    again = [monitor.observe(step(solved=4)) for _ in range(3)]
    assert REMEDIES["solved"] in again[-1][-1]


def test_the_ledger_adds_up():
    monitor = VarianceMonitor("resample", temperature=1.0)
    groups = [group("tied", "resample", 0, 5), group("tied", "skip", 1, 7), group("varied", "keep", 0, 9)]
    assert monitor.metrics(groups)["wasted_tokens"] == 12
    monitor.observe(groups)
    assert monitor.metrics(groups)["wasted_tokens_total"] == 24
    metrics = monitor.metrics(groups)
    assert (metrics["groups/count"], metrics["groups/kept"], metrics["groups/resampled"], metrics["groups/skipped"]) == (2, 1, 1, 1)
    assert (metrics["groups/class/tied"], metrics["groups/class/varied"]) == (1, 1)  # of first tries


@given(st.lists(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=4), min_size=2, max_size=20), st.data())
def test_state_goes_on_identically(steps, data):
    cut = data.draw(st.integers(0, len(steps) - 1))
    whole, first = VarianceMonitor("skip", temperature=1.0), VarianceMonitor("skip", temperature=1.0)
    for verdicts in steps[:cut]:
        whole.observe([group(v) for v in verdicts])
        first.observe([group(v) for v in verdicts])
    second = VarianceMonitor("skip", temperature=1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for verdicts in steps[cut:]:
        assert whole.observe([group(v) for v in verdicts]) == second.observe([group(v) for v in verdicts])
    assert whole.state_dict() == second.state_dict()

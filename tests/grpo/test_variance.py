import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.group_metrics import histogram
from grpo.records import CLASSES, Completion, Group
from grpo.variance import (
    REMEDIES,
    TRAP_REMEDY,
    VarianceMonitor,
    VarianceSettings,
    classify,
    common_trap,
    lost_diversity,
)
from tasks.base import Problem, Score

PROBLEM = Problem("t", 1, "p", "x", "k")


def group(class_name, action="keep", attempt=0, tokens=3, distinct=None, finish="stop", level=1):
    """A group of eight completions: one text if it is identical or solved, else eight, or
    `distinct`.
    """
    distinct = distinct or (1 if class_name in ("identical", "solved") else 8)
    texts = [str(min(i, distinct - 1)) for i in range(8)]
    return Group(
        0,
        Problem("t", level, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,) * tokens, (0.0,) * tokens, text, finish) for text in texts],
        attempt,
        [Score(0.5)] * 8,
        class_name,
        action,
    )


def monitor_for(on_degenerate, **settings):
    return VarianceMonitor(VarianceSettings(on_degenerate, **settings))


def step(level=1, **counts):
    return [group(class_name, level=level) for class_name, n in counts.items() for _ in range(n)]


def scored(*traps, attempt=0, level=1, paid=0.5, value=0.25):
    """A varied group whose completions are in these traps; those that are in none earn nothing."""
    scores = [
        Score(paid, {"trap": trap}, value) if trap else Score(0.0, {"trap": None}) for trap in traps
    ]
    return Group(
        0,
        Problem("t", level, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,), (0.0,), "x", "stop")] * len(traps),
        attempt,
        scores,
        trap=common_trap(scores),
    )


def trapped(share, name="sulks", **figures):
    """A step of ten completions, that share of them in the trap."""
    inside = round(10 * share)
    return [scored(*[name] * inside, *[None] * (10 - inside), **figures)]


def alarms(monitor, steps):
    return [[line for line in monitor.observe(step) if line.startswith("ALARM")] for step in steps]


@pytest.mark.parametrize(
    "rewards, texts, class_name",
    [
        ([0.1, 0.2], ["a", "b"], "varied"),
        (
            [1.0, 1.0],
            ["a", "a"],
            "solved",
        ),  # identical and right is solved: there is nothing to mend
        ([1.0, 1.0], ["a", "b"], "solved"),
        ([0.5, 0.5], ["a", "a"], "identical"),
        ([0.0, 0.0], ["a", "a"], "identical"),  # one wrong text is the collapse, whatever it earns
        ([0.0, 0.0], ["a", "b"], "failed"),
        ([0.5, 0.5], ["a", "b"], "tied"),
    ],
)
def test_classes_by_hand(rewards, texts, class_name):
    assert classify(rewards, texts, threshold=0) == class_name


def test_threshold_catches_near_ties():
    assert classify([0.5, 0.5 + 1e-9], ["a", "b"], threshold=0) == "varied"
    assert classify([0.5, 0.5 + 1e-9], ["a", "b"], threshold=1e-6) == "tied"


@given(
    st.lists(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=8), max_size=40),
    st.sampled_from(["keep", "skip", "resample"]),
)
def test_only_lost_diversity_raises_the_temperature(steps, policy):
    monitor = monitor_for(policy, temperature=0.8)
    for class_names in steps:
        before = monitor.temperature
        groups = [group(class_name) for class_name in class_names]
        monitor.observe(groups)
        identical = class_names.count("identical") / len(class_names)
        failing = sum(v in ("failed", "tied") for v in class_names) / len(class_names)

        assert 0.8 <= monitor.temperature <= 0.8 * 1.5
        assert monitor.temperature <= before or (identical >= 0.5 and policy != "keep")
        if failing > 0.5:  # the remedy is an easier level
            assert monitor.temperature == 0.8
        if 0.25 < identical < 0.5 and failing < 0.5:  # hysteresis
            assert monitor.temperature == before
        for each in groups:
            hotter = each.class_name == "identical"
            assert 0.8 <= monitor.retry_temperature(each) <= 0.8 * 1.5
            assert hotter or monitor.retry_temperature(each) == 0.8


def test_temperature_rises_and_returns_by_hand():
    monitor = monitor_for(
        "skip", temperature=1.0, temperature_factor=1.2, cooling=1.1, temperature_ceiling=1.5
    )
    seen = []
    for counts in (
        dict(identical=2, varied=2),
        dict(identical=4),
        dict(identical=4),
        dict(identical=3, varied=5),
        dict(varied=4),
        dict(solved=4),
        dict(failed=2, varied=2),
        dict(failed=4),
        dict(identical=4),
        dict(tied=4),
    ):
        monitor.observe(step(**counts))
        seen.append(round(monitor.temperature, 4))
    # 1.2, 1.44, ceiling 1.5; 3 of 8 lie between release and trigger; 1.5 / 1.1, again; then groups
    # that fail with different texts: the base; one rise, and tied groups end it
    assert seen == [1.2, 1.44, 1.5, 1.5, 1.3636, 1.2397, 1.0, 1.0, 1.2, 1.0]


@pytest.mark.parametrize(
    "class_name, distinct, lost",
    [
        ("identical", 1, True),
        ("failed", 2, True),  # two texts of eight: a quarter
        ("tied", 2, True),
        ("failed", 3, False),
        ("tied", 8, False),
        ("varied", 2, False),  # whatever teaches is left alone
        ("solved", 1, False),
    ],
)
def test_diversity_is_lost_with_few_distinct_texts_and_no_variance(class_name, distinct, lost):
    assert lost_diversity(group(class_name, distinct=distinct)) == lost
    monitor = monitor_for("skip", temperature=1.0)
    monitor.observe([group(class_name, distinct=distinct)] * 4)
    assert (monitor.temperature > 1) == lost


def test_tries_get_hotter_only_where_diversity_was_lost():
    monitor = monitor_for(
        "resample", temperature=1.0, temperature_factor=1.2, temperature_ceiling=1.5
    )
    tries = [monitor.retry_temperature(group("identical", attempt=n)) for n in range(3)]
    assert tries == pytest.approx([1.2, 1.44, 1.5])
    monitor.temperature = 1.3
    assert monitor.retry_temperature(group("failed")) == 1.0


def test_later_tries_neither_raise_the_temperature_nor_alarm():
    monitor = monitor_for("resample", temperature=1.0, alarm_steps=2)
    tries = [group("identical", "skip", attempt) for attempt in (1, 2) for _ in range(4)]
    # one first try of four collapsed; of all twelve groups it would be three quarters
    said = [monitor.observe(step(varied=3, identical=1) + tries) for _ in range(4)]
    assert said == [[]] * 4 and monitor.temperature == 1.0


def test_only_the_named_level_counts():
    groups = step(level=10, solved=12) + step(level=25, identical=4)
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=2)
    assert monitor.observe(groups, 25) and monitor.temperature > 1
    (line,) = [line for line in monitor.observe(groups, 25) if line.startswith("ALARM")]
    assert "100% identical" in line and monitor.collapse == [line]

    monitor = monitor_for("skip", temperature=1.0)
    monitor.observe(groups, 50)  # nothing at that level: all groups count
    assert monitor.temperature == 1.0


@given(st.sampled_from(CLASSES), st.integers(0, 5), st.integers(0, 4))
def test_decisions(class_name, attempt, retries):
    kept = monitor_for("keep", temperature=1.0, retries=retries).decide(class_name, attempt)
    skipped = monitor_for("skip", temperature=1.0, retries=retries).decide(class_name, attempt)
    again = monitor_for("resample", temperature=1.0, retries=retries).decide(class_name, attempt)
    assert kept == "keep"
    assert skipped == ("keep" if class_name == "varied" else "skip")
    if class_name == "varied":
        assert again == "keep"
    else:
        assert again == ("resample" if class_name != "solved" and attempt < retries else "skip")


def test_an_alarm_names_its_cause_and_is_repeated_less_and_less_often():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=3)
    said = alarms(monitor, [step(identical=3, varied=1)] * 24)
    due = {3: 3, 6: 6, 12: 12, 24: 24}  # step: for how long it has lasted
    assert [number for number, lines in enumerate(said, 1) if lines] == list(due)
    for number, lasted in due.items():
        (line,) = said[number - 1]
        assert f"for {lasted} steps" in line and "75% identical" in line
        assert REMEDIES["identical"] in line
    assert monitor.collapse == said[-1]

    monitor.observe(step(varied=4))
    again = alarms(monitor, [step(solved=4)] * 3)
    assert REMEDIES["solved"] in again[-1][-1]
    assert monitor.collapse == []  # said, but nothing to stop a run for


def test_one_alarm_does_not_hide_another():
    monitor = monitor_for("skip", temperature=1.0)
    first = alarms(monitor, [step(solved=16)] * 5)
    assert REMEDIES["solved"] in first[-1][0]
    # the next level fails throughout, and an eighth of the groups still replays the solved one
    then = alarms(monitor, [step(failed=14, solved=2)] * 5)
    assert [bool(lines) for lines in then] == [False, False, True, False, False]
    assert REMEDIES["failed"] in then[2][0]


def test_a_cause_that_returns_is_alarmed_again():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=2)
    (_, first) = alarms(monitor, [step(failed=4)] * 2)
    assert alarms(monitor, [step(failed=1, varied=3)] * 2) == [[], []]  # down to the release share
    (_, second) = alarms(monitor, [step(failed=4)] * 2)
    assert first == second and first


def test_truncated_completions_are_alarmed():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=2)
    cut, whole = group("varied", finish="length"), group("varied")
    assert alarms(monitor, [[cut, whole]] * 4) == [[]] * 4  # half of them
    said = alarms(monitor, [[cut, cut, cut, whole]] * 2)
    assert said[0] == [] and "75% of the completions are truncated" in said[1][0]
    assert "--max-new-tokens" in said[1][0] and monitor.collapse == []


def test_the_ledger_adds_up():
    monitor = monitor_for("resample", temperature=1.0)
    groups = [
        group("tied", "resample", 0, 5),
        group("tied", "skip", 1, 7),
        group("varied", "keep", 0, 9),
    ]
    assert monitor.metrics(groups)["wasted_tokens"] == 8 * 12
    monitor.observe(groups)
    assert monitor.metrics(groups)["wasted_tokens_total"] == 8 * 24
    metrics = monitor.metrics(groups)
    assert (
        metrics["groups/count"],
        metrics["groups/kept"],
        metrics["groups/resampled"],
        metrics["groups/skipped"],
    ) == (2, 1, 1, 1)
    assert (metrics["groups/class/tied"], metrics["groups/class/varied"]) == (
        1,
        1,
    )  # of first tries


@pytest.mark.parametrize(
    "traps, common",
    [
        (["a", "a", None, None], "a"),
        (["a", None, None], None),
        (["a", "b", None], None),
        ([None, None], None),
        (["b", "a", "a"], "a"),
        (["b", "b", "a", "a"], "b"),  # half and half: the first of them
    ],
)
def test_the_trap_of_a_group_holds_half_of_it(traps, common):
    assert common_trap([Score(0.5, {"trap": trap}) for trap in traps]) == common
    assert common_trap([Score(0.5)]) is None  # of a task that names none


def test_the_alarm_names_the_trap_its_share_its_pay_and_the_remedy():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=5)
    steps = [
        trapped(0.9),
        trapped(0.9),
        trapped(0.9),
        trapped(0.9),
        trapped(0.5, paid=1.0, value=0.75),
    ]
    *quiet, (line,) = alarms(monitor, steps)
    assert quiet == [[]] * 4 and monitor.collapse == [line]
    # share (4 * 0.9 + 0.5) / 5 = 0.82; paid 0.5 + 0.5 * 0.5 / 4.1 = 0.561; score 0.25 + 0.5 * 0.5
    # / 4.1 = 0.311
    assert (
        line == "ALARM: for 5 steps 82% of the completions are in the trap 'sulks', reward 0.56 "
        f"(score 0.31): {TRAP_REMEDY}"
    )


def test_the_alarm_of_a_trap_lasts_until_it_clears():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=2)
    # 0.4 is no longer most, but does not clear the alarm; 0.2 does
    shares = [0.5, 0.5, 0.4, 0.9, 0.9, 0.2, 0.9, 0.9]
    said = alarms(monitor, [trapped(share) for share in shares])
    assert [len(lines) for lines in said] == [0, 1, 0, 0, 0, 0, 0, 1]
    said = alarms(
        monitor, [trapped(0.9, "mumbles"), trapped(0.9, "mumbles")]
    )  # another one is another alarm
    assert said[0] == [] and "the trap 'mumbles'" in said[1][0]


@pytest.mark.parametrize(
    "steps",
    [
        [trapped(0.4)] * 9,  # never half
        [trapped(0.9), trapped(0.9), trapped(0.4)] * 3,  # not in a row
        [trapped(0.9), trapped(0.9, "mumbles")] * 5,  # not one and the same
        [
            [
                scored(None, None),
                scored("sulks", "sulks", attempt=1),
                scored("sulks", "sulks", attempt=2),
            ]
        ]
        * 9,  # later tries
    ],
)
def test_no_alarm_without_a_lasting_trap(steps):
    assert alarms(monitor_for("skip", temperature=1.0, alarm_steps=3), steps) == [[]] * len(steps)


@given(st.integers(0, 12), st.floats(0.5, 1))
def test_a_collapse_is_said_within_ten_steps(before, share):
    monitor = monitor_for("skip", temperature=1.0)  # as the trainer makes it
    assert not any(alarms(monitor, [trapped(0.1)] * before))
    assert any(alarms(monitor, [trapped(share)] * 10))
    monitor = monitor_for("skip", temperature=1.0)
    assert not any(alarms(monitor, [step(varied=4)] * before))
    assert any(alarms(monitor, [step(tied=3, varied=1)] * 10))


def test_figures_of_traps_and_levels_by_hand():
    monitor = monitor_for("skip", temperature=1.0)
    groups = [
        scored("a", "a", "a", None, level=10),
        scored("a", "b", None, None, level=25),
        scored("b", "b", "b", "b", level=25),
        scored("c", "c", "c", "c", level=25, attempt=1),
    ]
    groups[2].class_name = "tied"
    metrics = monitor.metrics(groups)
    assert {name: value for name, value in metrics.items() if name.startswith("traps/")} == {
        "traps/a": 4 / 12,
        "traps/b": 5 / 12,
    }
    assert metrics["groups/trapped"] == 2
    # rewards of level 10: three of 0.5, one of 0: std 0.5 * sqrt(3) / 4 = 0.2165; of 25: two of
    # each, 0.25, and none
    assert metrics["group_std/hist"] == {
        "0": 1,
        "0-0.01": 0,
        "0.01-0.03": 0,
        "0.03-0.1": 0,
        "0.1-0.3": 2,
        ">0.3": 0,
    }
    assert list(metrics["levels"]) == ["10", "25"]
    assert metrics["levels"]["10"] == {
        "groups": 1,
        "value": pytest.approx(0.25 * 3 / 4),
        "group_std": pytest.approx(0.5 * 3**0.5 / 4),
        "class": {"varied": 1},
        "trap": {"a": 1},
    }
    assert metrics["levels"]["25"] == {
        "groups": 2,
        "value": pytest.approx(0.25 * 6 / 8),
        "group_std": pytest.approx(0.125),
        "class": {"varied": 1, "tied": 1},
        "trap": {"b": 1},
    }


def test_a_bin_holds_its_upper_bound():
    assert histogram([0.0, 1e-9, 0.01, 0.0101, 0.03, 0.1, 0.3, 0.31, 0.5]) == {
        "0": 1,
        "0-0.01": 2,
        "0.01-0.03": 2,
        "0.03-0.1": 1,
        "0.1-0.3": 1,
        ">0.3": 2,
    }


@given(
    st.lists(
        st.tuples(st.sampled_from([0.1, 0.3, 0.6, 1.0]), st.sampled_from("ab")),
        min_size=2,
        max_size=20,
    ),
    st.integers(0, 19),
)
@example([(0.9, "a")] * 6, 4)  # what was said is not said again before it is due
def test_the_watch_for_traps_goes_on_identically(steps, cut):
    whole, first, second = (monitor_for("skip", temperature=1.0, alarm_steps=3) for _ in range(3))
    made = [trapped(*step) for step in steps]
    said, _ = alarms(whole, made[:cut]), alarms(first, made[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.collapse == (said[-1] if said else [])
    assert alarms(whole, made[cut:]) == alarms(second, made[cut:])
    assert whole.state_dict() == second.state_dict()


@given(
    st.lists(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=4), min_size=2, max_size=20),
    st.data(),
)
def test_state_goes_on_identically(steps, data):
    cut = data.draw(st.integers(0, len(steps) - 1))
    whole, first = (
        monitor_for("skip", temperature=1.0),
        monitor_for("skip", temperature=1.0),
    )
    for class_names in steps[:cut]:
        whole.observe([group(v) for v in class_names])
        first.observe([group(v) for v in class_names])
    second = monitor_for("skip", temperature=1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for class_names in steps[cut:]:
        assert whole.observe([group(v) for v in class_names]) == second.observe(
            [group(v) for v in class_names]
        )
    assert whole.state_dict() == second.state_dict()

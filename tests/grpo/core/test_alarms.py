"""The alarms of the variance monitor, and the traps that it watches for."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from variance_groups import group, monitor_for, step

from grpo.records import Completion, Group
from grpo.variance import (
    REMEDIES,
    TRAP_REMEDY,
    common_trap,
    histogram,
)
from tasks.base import Problem, Score


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


def truncated(group):
    completions = [replace(each, finish="length") for each in group.completions]
    return replace(group, completions=completions)


def alarms(monitor, steps):
    begins = ("ALARM", "note")
    return [[line for line in monitor.observe(step) if line.startswith(begins)] for step in steps]


def test_an_alarm_names_its_cause_and_is_repeated_less_and_less_often():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=3)
    said = alarms(monitor, [step(identical=3, varied=1)] * 24)
    due = {3: 3, 6: 6, 12: 12, 24: 24}  # step: for how long it has lasted
    assert [number for number, lines in enumerate(said, 1) if lines] == list(due)
    for number, lasted in due.items():
        (line,) = said[number - 1]
        assert line.startswith(f"ALARM: for {lasted} steps") and "75% identical" in line
        assert REMEDIES["identical"] in line
    assert monitor.collapse == said[-1]

    monitor.observe(step(varied=4))
    (line,) = alarms(monitor, [step(solved=4)] * 3)[-1]
    assert line.startswith("note: ") and REMEDIES["solved"] in line  # good news
    assert monitor.collapse == []  # said, but nothing to stop a run for


def test_the_alarm_of_masked_groups_names_truncation_and_is_no_collapse():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=1)
    ((line,),) = alarms(monitor, [step(masked=3, varied=1)])
    assert "(75% masked); the loss leaves truncated completions out" in line
    assert "--max-new-tokens" in line and monitor.collapse == []


def test_an_alarm_lists_the_classes_from_the_most_common_on():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=1)
    ((line,),) = alarms(monitor, [step(identical=1, failed=3, tied=5, varied=1)])
    assert "(50% tied, 30% failed, 10% identical)" in line


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
    whole = group("varied")
    cut = truncated(whole)
    assert alarms(monitor, [[cut, whole]] * 4) == [[]] * 4  # half of them
    said = alarms(monitor, [[cut, cut, cut, whole]] * 2)
    assert said[0] == [] and "75% of the completions are truncated" in said[1][0]
    assert "--max-new-tokens" in said[1][0] and monitor.collapse == []


def test_masked_groups_are_alarmed_once_and_not_as_truncated_as_well():
    monitor = monitor_for("skip", temperature=1.0, alarm_steps=2)
    cut_off = [truncated(each) for each in step(masked=4)]
    said = alarms(monitor, [cut_off] * 3)
    assert [len(lines) for lines in said] == [0, 1, 0] and REMEDIES["masked"] in said[1][0]

    # Once they are learned from, truncation is a cause of its own.
    said = alarms(monitor, [[truncated(each) for each in step(varied=4)]])
    assert "for 4 steps" in said[0][0] and REMEDIES["truncated"] in said[0][0]


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

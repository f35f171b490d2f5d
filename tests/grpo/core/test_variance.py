"""Groups without variance: their classes, what is done with them, the alarms."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_groups import copy_of, group_of

from grpo.config import Config
from grpo.records import CLASSES, summaries
from grpo.tasks.base import ABSTAINED, Score
from grpo.variance import (
    REMEDIES,
    TRAP_REMEDY,
    VarianceMonitor,
    by_level,
    classify,
    common_trap,
    reward_metrics,
)


def group(class_name, action="keep", distinct=None):
    """A group of eight completions: one text if it is identical or solved, else eight, or
    `distinct`.
    """
    distinct = distinct or (1 if class_name in ("identical", "solved") else 8)
    texts = [str(min(i, distinct - 1)) for i in range(8)]
    facts = {"class_name": class_name, "action": action}
    return group_of(texts, [Score(0.5)] * 8, **facts)


def class_of(rewards, texts, limits=(0, 1), finishes=("stop", "stop")):
    made = group_of(texts, [Score(reward, value=0.5) for reward in rewards])
    ends = zip(made.completions, finishes, strict=True)
    made.completions = [replace(completion, finish=finish) for completion, finish in ends]
    return classify(made, limits)


def monitor_for(on_degenerate="skip", **settings):
    return VarianceMonitor(Config(on_degenerate=on_degenerate, **settings))


def step(level=1, **counts):
    groups = [group(class_name) for class_name, n in counts.items() for _ in range(n)]
    return [replace(each, problem=replace(each.problem, level=level)) for each in groups]


@pytest.mark.parametrize(
    "rewards, texts, class_name",
    [
        ([0.1, 0.2], ["a", "b"], "varied"),
        ([1.0, 1.0], ["a", "a"], "solved"),  # though identical: there is nothing to mend
        ([1.0, 1.0], ["a", "b"], "solved"),
        ([0.5, 0.5], ["a", "a"], "identical"),
        ([0.0, 0.0], ["a", "a"], "identical"),  # one wrong text is the collapse, whatever it earns
        ([0.0, 0.0], ["a", "b"], "failed"),
        ([0.5, 0.5], ["a", "b"], "tied"),
        ([0.1, 0.2], ["a", "a"], "identical"),  # a judge's noise has no gradient
    ],
)
def test_classes_by_hand(rewards, texts, class_name):
    assert class_of(rewards, texts) == class_name


UNJUDGED = {"reason": ABSTAINED}


def partly_judged(judged, unjudged, value):
    """A group of different texts, of which the reward judged the first ones."""
    scores = [Score(value, exact=value == 1)] * judged + [Score(value, UNJUDGED)] * unjudged
    made = group("tied", distinct=8)
    return replace(made, completions=made.completions[: len(scores)], scores=scores)


@pytest.mark.parametrize(
    "judged, unjudged, value, class_name",
    [(4, 4, 1.0, "solved"), (1, 7, 1.0, "tied"), (4, 4, 0.0, "failed"), (0, 8, 0.5, "tied")],
)
def test_the_judged_completions_decide_the_class(judged, unjudged, value, class_name):
    made = partly_judged(judged, unjudged, value)
    assert classify(made, (0, 1)) == class_name
    if value != 0:
        assert classify(made, None) == class_name


def test_what_the_reward_did_not_judge_is_in_no_figure():
    made = partly_judged(1, 7, 1.0)
    made.scores[0] = Score(0.5, exact=False)
    none = partly_judged(0, 8, 0.5)
    for groups, found in [([made, none], (0.5, 0)), ([none], (None, None))]:
        figures = reward_metrics(groups)
        assert (figures["value"], figures["exact"]) == found
        assert figures["reward"] == 0.5
        assert by_level(groups)["1"]["value"] == found[0]
    lines = [(line["value"], line["exact"]) for line in summaries([made, none])]
    assert lines == [(0.5, 0), (None, None)]


@pytest.mark.parametrize("apart, class_name", [(1e-9, "tied"), (1e-5, "varied")])
@pytest.mark.parametrize("limits", [(0, 1), None, (0, 1e-3)])
def test_only_rounding_is_no_variance(apart, class_name, limits):
    scale = limits[1] if limits else 1e5
    assert class_of([0.5 * scale, (0.5 + apart) * scale], ["a", "b"], limits) == class_name


@pytest.mark.parametrize("limits, middle", [((-1, 0), -0.5), ((0, 100), 50)])
def test_solved_and_failed_are_the_ends_of_the_range(limits, middle):
    low, high = limits
    classes = [class_of([reward] * 2, ["a", "b"], limits) for reward in (low, middle, high)]
    assert classes == ["failed", "tied", "solved"]


@given(st.floats(-100, 100))
def test_an_unknown_range_has_no_ends(reward):
    assert class_of([reward, reward], ["a", "b"], None) == "tied"
    assert class_of([reward, reward + 1], ["a", "b"], None) == "varied"


@pytest.mark.parametrize("reward_range", [None, (0, 1.2)])
def test_right_answers_are_solved(reward_range):
    """Whatever they earn: only the task knows whether more can be had."""
    monitor = VarianceMonitor(Config(), reward_range)
    right = [replace(group("identical"), scores=[Score(0.9, exact=True)] * 8) for _ in range(4)]
    monitor.classify(right)
    assert {each.class_name for each in right} == {"solved"}

    right[0].scores = [*right[0].scores[1:], Score(0.9)]
    monitor.classify(right)
    assert right[0].class_name == "identical"


def test_an_answer_that_does_not_end_is_not_solved():
    assert class_of([1.0, 1.0], ["a", "b"], finishes=("stop", "length")) == "tied"


def test_copies_do_not_hide_an_alarm():
    monitor = monitor_for()
    copies = [copy_of(group("varied")) for _ in range(8)]
    # Three of four groups collapsed; of all twelve it would be a quarter.
    *_, said = [monitor.observe(step(varied=1, identical=3) + copies) for _ in range(5)]
    assert "75% identical" in said[-1]


def test_only_the_named_level_counts():
    groups = step(level=10, solved=12) + step(level=25, identical=4)
    monitor = monitor_for()
    *_, said = [monitor.observe(groups, 25) for _ in range(5)]
    assert "100% identical" in said[-1]

    monitor = monitor_for()
    *_, said = [monitor.observe(groups, 50) for _ in range(5)]
    assert "75% solved" in said[-1]  # nothing at that level: all groups count


@pytest.mark.parametrize("way", ["keep", "skip"])
def test_groups_without_variance_are_kept_or_skipped(way):
    varied, tied = (group_of("ab", [Score(0.5), Score(other)]) for other in (0.2, 0.5))
    monitor_for(way).classify([varied, tied])
    assert (varied.action, tied.action) == ("keep", way)


def scored(*traps, level=1):
    """A varied group whose completions are in these traps; those that are in none earn nothing."""
    scores = [
        Score(0.5, {"trap": trap}, 0.25) if trap else Score(0.0, {"trap": None}) for trap in traps
    ]
    texts = "x" * len(traps)
    return group_of(texts, scores, level=level, trap=common_trap(scores))


def trapped(share, name="sulks"):
    """A step of ten completions, that share of them in the trap."""
    inside = round(10 * share)
    return [scored(*[name] * inside, *[None] * (10 - inside))]


def truncated(group):
    completions = [replace(each, finish="length") for each in group.completions]
    return replace(group, completions=completions)


def alarms(monitor, steps):
    begins = ("ALARM", "note")
    return [[line for line in monitor.observe(step) if line.startswith(begins)] for step in steps]


def test_an_alarm_names_its_cause_and_is_repeated_less_and_less_often():
    monitor = monitor_for()
    said = alarms(monitor, [step(identical=1, failed=2, tied=4, varied=1)] * 40)
    due = [5, 10, 20, 40]
    assert [number for number, lines in enumerate(said, 1) if lines] == due
    for number in due:
        (line,) = said[number - 1]
        assert line.startswith(f"ALARM: for {number} steps") and REMEDIES["tied"] in line
        assert "(50% tied, 25% failed, 12% identical)" in line

    (line,) = alarms(monitor_for(), [step(solved=4)] * 5)[-1]
    assert line.startswith("note: ") and REMEDIES["solved"] in line  # good news


def test_the_highest_reward_is_that_of_any_step():
    monitor, first = monitor_for(), group("varied")
    first.scores = [Score(0.5)] * 8
    alarms(monitor, [[first, *step(failed=4)], step(failed=4)])
    assert monitor.best == 0.5


def test_one_alarm_does_not_hide_another():
    monitor = monitor_for()
    first = alarms(monitor, [step(solved=16)] * 5)
    assert REMEDIES["solved"] in first[-1][0]
    # the next level fails throughout, and an eighth of the groups still replays the solved one
    then = alarms(monitor, [step(failed=14, solved=2)] * 7)
    assert [number for number, lines in enumerate(then, 1) if lines] == [7]
    assert REMEDIES["failed"] in then[6][0]


def test_classes_that_take_turns_are_one_cause():
    *quiet, (line,) = alarms(monitor_for(), [step(tied=4), step(failed=4)] * 2 + [step(tied=4)])
    assert not any(quiet) and "(60% tied, 40% failed)" in line and REMEDIES["tied"] in line


def test_a_cause_that_returns_is_alarmed_again():
    monitor = monitor_for()
    *_, first = alarms(monitor, [step(failed=4)] * 5)
    assert not any(alarms(monitor, [step(failed=1, varied=3)] * 5))
    *_, second = alarms(monitor, [step(failed=4)] * 5)
    assert first == second and first


def test_truncated_completions_are_alarmed():
    monitor = monitor_for()
    whole = group("varied")
    cut = truncated(whole)
    assert not any(alarms(monitor, [[cut, whole]] * 6))  # half of them
    said = alarms(monitor, [[cut, cut, cut, whole]] * 5)
    assert not any(said[:4]) and "75% of the completions are truncated" in said[4][0]
    assert "--max-new-tokens" in said[4][0]


@pytest.mark.parametrize(
    "traps, common",
    [
        (["a", "a", None, None], "a"),
        (["a", None, None], None),
        (["a", "b", None], None),
        ([None, None], None),
        (["b", "a", "a"], "a"),
        (["b", "b", "a", "a"], "b"),  # half and half: the first of them
        (["copies A", "ignores A", None, None], "ignores a text"),
        (["copies A", "copies A", "ignores A", None], "copies A"),
        ([], None),
    ],
)
def test_the_trap_of_a_group_holds_half_of_it(traps, common):
    kinds = ["ignores a text" if trap and " " in trap else None for trap in traps]
    parts = [{"trap": trap, "trap_kind": kind} for trap, kind in zip(traps, kinds)]
    assert common_trap([Score(0.5, each) for each in parts]) == common
    assert common_trap([Score(0.5)]) is None  # of a task that names none


def test_the_alarm_names_the_trap_its_share_and_the_remedy():
    *quiet, (line,) = alarms(monitor_for(), [trapped(0.9)] * 4 + [trapped(0.5)])
    assert not any(quiet)
    assert (
        line == f"ALARM: for 5 steps 82% of the completions are in the trap 'sulks': {TRAP_REMEDY}"
    )


def test_a_trap_must_last_anew_after_a_step_without_it():
    monitor = monitor_for()
    shares = [0.9] * 5 + [0.4] + [0.9] * 5
    said = alarms(monitor, [trapped(share) for share in shares])
    assert [number for number, lines in enumerate(said, 1) if lines] == [5, 11]
    *_, said = alarms(monitor, [trapped(0.9, "mumbles")] * 5)  # another one is another alarm
    assert "the trap 'mumbles'" in said[0]


@pytest.mark.parametrize(
    "steps",
    [
        [trapped(0.4)] * 9,  # never half
        [*[trapped(0.9)] * 4, trapped(0.4)] * 3,  # not in a row
        [trapped(0.9), trapped(0.9, "mumbles")] * 5,  # not one and the same
        [[scored(None, None), copy_of(scored("sulks", "sulks"))]] * 9,
    ],
)
def test_no_alarm_without_a_lasting_trap(steps):
    assert not any(alarms(monitor_for(), steps))


def test_figures_of_a_step_by_hand():
    monitor = monitor_for()
    groups = [
        scored("a", "a", "a", None, level=10),
        scored("a", "b", None, None, level=25),
        scored("b", "b", "b", "b", level=25),
        copy_of(scored("c", "c", "c", "c", level=25)),
    ]
    groups[2].class_name, groups[2].action = "tied", "skip"
    monitor.observe(groups)
    metrics = monitor.metrics(groups)
    assert metrics["traps/a"] == 4 / 12 and metrics["traps/b"] == 5 / 12
    assert "traps/c" not in metrics and metrics["groups/trapped"] == 2
    assert [metrics[f"groups/{name}"] for name in ("count", "kept", "skipped")] == [3, 3, 1]
    assert metrics["groups/class/tied"] == 1 and metrics["wasted_tokens"] == 4
    # three rewards of 0.5 and one of 0: std 0.25; two of each: 0.5 / sqrt(3); and none
    assert metrics["levels"] == {
        "10": {
            "groups": 1,
            "value": pytest.approx(0.25 * 3 / 4),
            "group_std": pytest.approx(0.25),
            "class": {"varied": 1},
            "trap": {"a": 1},
        },
        "25": {
            "groups": 2,
            "value": pytest.approx(0.25 * 6 / 8),
            "group_std": pytest.approx(0.25 / 3**0.5),
            "class": {"varied": 1, "tied": 1},
            "trap": {"b": 1},
        },
    }
    monitor.observe(groups)
    assert monitor.metrics(groups)["wasted_tokens_total"] == 8


STEPS = st.one_of(
    st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 3), min_size=1).map(
        lambda counts: step(**counts)
    ),
    st.builds(trapped, st.sampled_from([0.1, 0.3, 0.6, 1.0]), st.sampled_from("ab")),
)


@given(st.lists(STEPS, min_size=2, max_size=20), st.integers(0, 19))
@settings(max_examples=40)
def test_a_restored_monitor_goes_on_identically(steps, cut):
    whole, second = monitor_for(), monitor_for()
    for made in steps[:cut]:
        whole.observe(made)
    second.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for made in steps[cut:]:
        assert whole.observe(made) == second.observe(made)
    assert whole.state_dict() == second.state_dict()

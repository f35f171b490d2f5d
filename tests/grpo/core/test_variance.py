"""Groups without variance: their classes, what is done with them, the temperature, the alarms."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.config import Config
from grpo.records import CLASSES, Completion, Group
from grpo.variance import (
    HEAT_STEPS,
    REMEDIES,
    TRAP_REMEDY,
    VarianceMonitor,
    classify,
    common_trap,
    group_class,
    histogram,
    lost_diversity,
)
from tasks.base import Problem, Score


def group(class_name, action="keep", attempt=0, tokens=3, distinct=None):
    """A group of eight completions: one text if it is identical or solved, else eight, or
    `distinct`.
    """
    distinct = distinct or (1 if class_name in ("identical", "solved") else 8)
    texts = [str(min(i, distinct - 1)) for i in range(8)]
    return Group(
        0,
        Problem("t", 1, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,) * tokens, (0.0,) * tokens, text, "stop") for text in texts],
        attempt,
        [Score(0.5)] * 8,
        class_name,
        action,
    )


def monitor_for(on_degenerate="skip", **settings):
    return VarianceMonitor(Config(on_degenerate=on_degenerate, **settings))


def step(level=1, **counts):
    groups = [group(class_name) for class_name, n in counts.items() for _ in range(n)]
    return [replace(each, problem=replace(each.problem, level=level)) for each in groups]


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
    assert classify([Score(reward) for reward in rewards], texts, (0, 1)) == class_name


@pytest.mark.parametrize("apart, class_name", [(1e-9, "tied"), (1e-5, "varied")])
def test_only_rounding_is_no_variance(apart, class_name):
    assert classify([Score(0.5), Score(0.5 + apart)], ["a", "b"], (0, 1)) == class_name


@pytest.mark.parametrize("reward_range", [None, (0, 1.2)])
def test_right_answers_are_solved_and_never_heated(reward_range):
    """Whatever they earn: only the task knows whether more can be had."""
    monitor = VarianceMonitor(Config(), reward_range)
    right = [replace(group("identical"), scores=[Score(0.9, exact=True)] * 8) for _ in range(4)]
    for _ in range(9):
        monitor.classify(right)
        monitor.observe(right)
    assert {each.class_name for each in right} == {"solved"} and monitor.temperature == 1.0

    right[0].scores = [*right[0].scores[1:], Score(0.9)]
    monitor.classify(right)
    assert right[0].class_name == "identical"


LEARNING = Config()
MASKING = Config(truncated="mask")
BY_TOKEN = Config(truncated="mask", credit="alignment")


@pytest.mark.parametrize(
    "rewards, ends, config, class_name",
    [
        ([0.0, 0.5, 0.25], "ttt", MASKING, "masked"),
        ([0.0, 0.5, 0.25], "ttt", LEARNING, "varied"),  # they are learned from
        ([0.0, 0.0, 0.5], "tts", MASKING, "varied"),  # 0.5 - 1/6
        ([0.0, 0.5, 0.5], "tss", MASKING, "varied"),  # equal, but not the mean
        ([0.0, 0.5, 0.25], "tts", MASKING, "masked"),  # the last one earned the mean
        ([0.0, 0.5, 0.25, 0.25], "ttss", MASKING, "masked"),
        ([0.0, 0.5, 0.25], "tts", BY_TOKEN, "varied"),  # some of its tokens may have an advantage
        ([0.0, 0.5, 0.25], "ttt", BY_TOKEN, "masked"),
        ([0.5, 0.5, 0.5], "ttt", MASKING, "tied"),  # nothing to learn, masked or not
        ([1.0, 1.0, 1.0], "sss", MASKING, "solved"),
        ([1.0, 1.0, 1.0], "sst", MASKING, "tied"),  # an answer that does not end is not solved
        ([1.0, 1.0, 1.0], "sst", LEARNING, "tied"),
    ],
)
def test_a_group_is_masked_if_the_loss_leaves_out_every_advantage(
    rewards, ends, config, class_name
):
    """`ends` tells for each completion whether it stopped (s) or was truncated (t)."""
    finish = {"s": "stop", "t": "length"}
    made = Group(
        0,
        Problem("t", 1, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,), (0.0,), str(i), finish[end]) for i, end in enumerate(ends)],
        scores=[Score(reward) for reward in rewards],
    )
    assert group_class(made, config, (0.0, 1.0)) == class_name


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
        if 0.25 < identical < 0.5 and failing < 0.5 and not monitor.gave_up_heat:  # hysteresis
            assert monitor.temperature == before
        for each in groups:
            hotter = each.class_name == "identical"
            assert 0.8 <= monitor.retry_temperature(each) <= 0.8 * 1.5
            assert hotter or monitor.retry_temperature(each) == 0.8


def test_temperature_rises_and_returns_by_hand(monkeypatch):
    monkeypatch.setattr("grpo.variance.HOTTEST", 1.25)
    monitor = monitor_for("skip")
    seen = []
    for counts in (
        dict(identical=2, varied=2),
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
    # 1.15, the ceiling; 3 of 8 lie between RELEASE and TRIGGER; 1.25 / 1.05, again; groups that
    # fail with different texts: the base; one rise, and tied groups end it
    assert seen == [1.15, 1.25, 1.25, 1.1905, 1.1338, 1.0, 1.0, 1.15, 1.0]


def temperatures(monitor, steps, share, reward):
    """Lead it through `steps` of 20 groups; return the temperature at which each is sampled.

    `share(step, is_hot)` of the groups are identical, and all earn `reward(is_hot)`.
    """
    seen = []
    for number in range(steps):
        seen.append(monitor.temperature)
        is_hot = monitor.temperature > 1
        identical = round(20 * share(number, is_hot))
        groups = step(identical=identical, varied=20 - identical)
        for each in groups:
            each.scores = [Score(reward(is_hot))] * 8
        monitor.observe(groups)
    return seen


@pytest.mark.parametrize(
    "share, reward",
    [
        (lambda number, is_hot: 1.0, lambda is_hot: 0.0),
        (lambda number, is_hot: 0.6, lambda is_hot: 0.915 if is_hot else 0.924),
        (lambda number, is_hot: (0.45, 0.55, 0.5)[number % 3], lambda is_hot: 0.5),
        (lambda number, is_hot: 0.1 if is_hot else 0.6, lambda is_hot: 0.4 if is_hot else 0.5),
    ],
    ids=["all wrong", "most wrong", "around the trigger", "at the cost of reward"],
)
def test_heat_that_gains_nothing_is_given_up(share, reward):
    monitor = monitor_for("resample")
    seen = temperatures(monitor, 100, share, reward)
    hot = [number for number, temperature in enumerate(seen) if temperature > 1]
    assert 0 < len(hot) <= HEAT_STEPS and max(hot) < 2 * HEAT_STEPS
    assert monitor.retry_temperature(group("identical")) == 1.0


def test_heat_that_gains_is_kept_and_rises_anew_once_diversity_was_back():
    """Heat halves the identical groups, and after 70 steps none is left."""
    monitor = monitor_for()
    seen = temperatures(monitor, 70, lambda number, is_hot: 0.4 if is_hot else 0.8, lambda _: 0.5)
    assert min(seen[1:]) > 1
    temperatures(monitor, 2 * HEAT_STEPS, lambda *_: 1.0, lambda _: 0.5)
    assert monitor.temperature == 1.0 and monitor.gave_up_heat  # by now it changes nothing

    temperatures(monitor, 14, lambda *_: 0.0, lambda _: 0.5)
    assert monitor.gave_up_heat  # in the mean of 20 steps, 30 % are still identical
    temperatures(monitor, 2, lambda *_: 0.0, lambda _: 0.5)
    monitor.observe(step(identical=4))
    assert monitor.temperature > 1.0


def test_heat_is_given_up_at_one_level_alone():
    monitor = monitor_for()
    for _ in range(HEAT_STEPS + 1):
        said = monitor.observe(step(level=1, identical=4), 1)
    assert said[0] == (
        "temperature 1.500 → 1.000: 20 steps of heat changed nothing: 100% → 100% of the groups "
        "lost diversity"
    )
    monitor.observe(step(level=2, identical=4), 2)
    assert monitor.temperature > 1.0
    monitor.observe(step(level=3, varied=4), 3)
    assert monitor.temperature == 1.0  # at once: its groups have lost nothing


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
        ("masked", 2, False),  # the remedy is a larger budget
    ],
)
def test_diversity_is_lost_with_few_distinct_texts_and_no_variance(class_name, distinct, lost):
    assert lost_diversity(group(class_name, distinct=distinct)) == lost
    monitor = monitor_for()
    monitor.observe([group(class_name, distinct=distinct)] * 4)
    assert (monitor.temperature > 1) == lost


def test_later_tries_neither_raise_the_temperature_nor_alarm():
    monitor = monitor_for("resample")
    tries = [group("identical", "skip", attempt) for attempt in (1, 2) for _ in range(4)]
    # one first try of four collapsed; of all twelve groups it would be three quarters
    said = [monitor.observe(step(varied=3, identical=1) + tries) for _ in range(6)]
    assert said == [[]] * 6 and monitor.temperature == 1.0


def test_only_the_named_level_counts():
    groups = step(level=10, solved=12) + step(level=25, identical=4)
    monitor = monitor_for()
    *_, said = [monitor.observe(groups, 25) for _ in range(5)]
    assert "100% identical" in said[-1] and monitor.temperature > 1

    monitor = monitor_for()
    monitor.observe(groups, 50)  # nothing at that level: all groups count
    assert monitor.temperature == 1.0


@pytest.mark.parametrize("class_name", CLASSES)
def test_decisions(class_name):
    def decisions(way):
        return [monitor_for(way).decide(class_name, attempt) for attempt in range(3)]

    assert decisions("keep") == ["keep"] * 3
    if class_name == "varied":
        assert decisions("skip") == decisions("resample") == ["keep"] * 3
        return
    assert decisions("skip") == ["skip"] * 3
    again = "skip" if class_name == "solved" else "resample"
    assert decisions("resample") == [again, again, "skip"]


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
    monitor = monitor_for()
    said = alarms(monitor, [step(identical=1, failed=2, tied=4, varied=1)] * 40)
    due = [5, 10, 20, 40]
    assert [number for number, lines in enumerate(said, 1) if lines] == due
    for number in due:
        (line,) = said[number - 1]
        assert line.startswith(f"ALARM: for {number} steps") and REMEDIES["tied"] in line
        assert "(50% tied, 25% failed, 12% identical)" in line

    (line,) = alarms(monitor, [step(varied=4)] + [step(solved=4)] * 5)[-1]
    assert line.startswith("note: ") and REMEDIES["solved"] in line  # good news


def test_one_alarm_does_not_hide_another():
    monitor = monitor_for()
    first = alarms(monitor, [step(solved=16)] * 5)
    assert REMEDIES["solved"] in first[-1][0]
    # the next level fails throughout, and an eighth of the groups still replays the solved one
    then = alarms(monitor, [step(failed=14, solved=2)] * 5)
    assert [bool(lines) for lines in then] == [False, False, True, False, False]
    assert REMEDIES["failed"] in then[2][0]


def test_a_cause_that_returns_is_alarmed_again():
    monitor = monitor_for()
    *_, first = alarms(monitor, [step(failed=4)] * 5)
    assert not any(alarms(monitor, [step(failed=1, varied=3)] * 5))  # down to RELEASE
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


def test_masked_groups_are_alarmed_once_and_not_as_truncated_as_well():
    monitor = monitor_for()
    said = alarms(monitor, [[truncated(each) for each in step(masked=4)]] * 6)
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 1, 0]
    assert "(100% masked); the loss leaves truncated completions out" in said[4][0]

    # Once they are learned from, truncation is a cause of its own.
    said = alarms(monitor, [[truncated(each) for each in step(varied=4)]] * 4)
    assert "for 10 steps" in said[3][0] and REMEDIES["truncated"] in said[3][0]


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
    steps = [trapped(0.9)] * 4 + [trapped(0.5, paid=1.0, value=0.75)]
    *quiet, (line,) = alarms(monitor_for(), steps)
    assert not any(quiet)
    # 36 completions earned 0.5 and five 1.0, 0.561 in the mean; of the scores it is 0.311
    assert (
        line == "ALARM: for 5 steps 82% of the completions are in the trap 'sulks', reward 0.56 "
        f"(score 0.31): {TRAP_REMEDY}"
    )


def test_the_alarm_of_a_trap_lasts_until_it_clears():
    monitor = monitor_for()
    # 0.4 is no longer most, but does not clear the alarm; 0.2 does
    shares = [0.5] * 5 + [0.4] + [0.9] * 5 + [0.2] + [0.9] * 5
    said = alarms(monitor, [trapped(share) for share in shares])
    assert [number for number, lines in enumerate(said, 1) if lines] == [5, 17]
    *_, said = alarms(monitor, [trapped(0.9, "mumbles")] * 5)  # another one is another alarm
    assert "the trap 'mumbles'" in said[0]


@pytest.mark.parametrize(
    "steps",
    [
        [trapped(0.4)] * 9,  # never half
        [*[trapped(0.9)] * 4, trapped(0.4)] * 3,  # not in a row
        [trapped(0.9), trapped(0.9, "mumbles")] * 5,  # not one and the same
        [[scored(None, None), scored("sulks", "sulks", attempt=1)]] * 9,  # later tries
    ],
)
def test_no_alarm_without_a_lasting_trap(steps):
    assert not any(alarms(monitor_for(), steps))


def test_a_bin_holds_its_upper_bound():
    assert histogram([0.0, 1e-9, 0.01, 0.0101, 0.03, 0.1, 0.3, 0.31, 0.5]) == {
        "0": 1,
        "0-0.01": 2,
        "0.01-0.03": 2,
        "0.03-0.1": 1,
        "0.1-0.3": 1,
        ">0.3": 2,
    }


def test_figures_of_a_step_by_hand():
    monitor = monitor_for()
    groups = [
        scored("a", "a", "a", None, level=10),
        scored("a", "b", None, None, level=25),
        scored("b", "b", "b", "b", level=25),
        scored("c", "c", "c", "c", level=25, attempt=1),
    ]
    groups[2].class_name, groups[2].action = "tied", "resample"
    metrics = monitor.metrics(groups)
    assert metrics["traps/a"] == 4 / 12 and metrics["traps/b"] == 5 / 12
    assert "traps/c" not in metrics and metrics["groups/trapped"] == 2  # of first tries
    assert [metrics[f"groups/{name}"] for name in ("count", "kept", "resampled")] == [3, 3, 1]
    assert metrics["groups/class/tied"] == 1 and metrics["wasted_tokens"] == 4
    # three rewards of 0.5 and one of 0: std 0.5 * sqrt(3) / 4; two of each: 0.25; and none
    assert [count for count in metrics["group_std/hist"].values() if count] == [1, 2]
    assert metrics["levels"] == {
        "10": {
            "groups": 1,
            "value": pytest.approx(0.25 * 3 / 4),
            "group_std": pytest.approx(0.5 * 3**0.5 / 4),
            "class": {"varied": 1},
            "trap": {"a": 1},
        },
        "25": {
            "groups": 2,
            "value": pytest.approx(0.25 * 6 / 8),
            "group_std": pytest.approx(0.125),
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


@given(
    st.sampled_from([0, HEAT_STEPS - 1, HEAT_STEPS + 5]),
    st.lists(STEPS, min_size=2, max_size=20),
    st.integers(0, 19),
)
@settings(max_examples=40)
def test_a_restored_monitor_goes_on_identically(before, steps, cut):
    whole, second = monitor_for(), monitor_for()
    temperatures(whole, before, lambda *_: 0.6, lambda _: 0.5)  # in a trial of heat
    for made in steps[:cut]:
        whole.observe(made)
    second.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for made in steps[cut:]:
        assert whole.observe(made) == second.observe(made)
    assert whole.state_dict() == second.state_dict()

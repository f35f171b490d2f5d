"""Groups without variance: their classes, what is done with them, and the temperature."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from variance_groups import group, monitor_for, step

from grpo.records import CLASSES, Completion, Group
from grpo.variance import HEAT_STEPS, ClassRule, classify, group_class, lost_diversity
from tasks.base import Problem, Score


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
    monitor = monitor_for("skip")
    right = [replace(group("identical"), scores=[Score(0.9, exact=True)] * 8) for _ in range(4)]
    for _ in range(9):
        monitor.classify(right, reward_range)
        monitor.observe(right)
    assert {each.class_name for each in right} == {"solved"} and monitor.temperature == 1.0

    right[0].scores = [*right[0].scores[1:], Score(0.9)]
    monitor.classify(right, reward_range)
    assert right[0].class_name == "identical"


MASKING = ClassRule(masks_truncated=True)
BY_TOKEN = ClassRule(masks_truncated=True, credits_tokens=True)


@pytest.mark.parametrize(
    "rewards, ends, rule, class_name",
    [
        ([0.0, 0.5, 0.25], "ttt", MASKING, "masked"),
        ([0.0, 0.5, 0.25], "ttt", ClassRule(), "varied"),  # they are learned from
        ([0.0, 0.0, 0.5], "tts", MASKING, "varied"),  # 0.5 - 1/6
        ([0.0, 0.5, 0.5], "tss", MASKING, "varied"),  # equal, but not the mean
        ([0.0, 0.5, 0.25], "tts", MASKING, "masked"),  # the last one earned the mean
        ([0.0, 0.5, 0.25, 0.25], "ttss", MASKING, "masked"),
        ([0.0, 0.5, 0.25], "tts", BY_TOKEN, "varied"),  # some of its tokens may have an advantage
        ([0.0, 0.5, 0.25], "ttt", BY_TOKEN, "masked"),
        ([0.5, 0.5, 0.5], "ttt", MASKING, "tied"),  # nothing to learn, masked or not
        ([1.0, 1.0, 1.0], "sss", MASKING, "solved"),
        ([1.0, 1.0, 1.0], "sst", MASKING, "tied"),  # an answer that does not end is not solved
        ([1.0, 1.0, 1.0], "sst", ClassRule(), "tied"),
    ],
)
def test_a_group_is_masked_if_the_loss_leaves_out_every_advantage(rewards, ends, rule, class_name):
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
    assert group_class(made, rule, (0.0, 1.0)) == class_name


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
    seen = temperatures(monitor, 300, share, reward)
    hot = [number for number, temperature in enumerate(seen) if temperature > 1]
    assert 0 < len(hot) <= HEAT_STEPS and max(hot) < 2 * HEAT_STEPS
    assert monitor.retry_temperature(group("identical")) == 1.0


def test_heat_that_gains_is_kept_and_rises_anew_once_diversity_was_back():
    """Heat halves the identical groups, and after 70 steps none is left."""
    monitor = monitor_for("skip")
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
    monitor = monitor_for("skip")
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
    monitor = monitor_for("skip", temperature=1.0)
    monitor.observe([group(class_name, distinct=distinct)] * 4)
    assert (monitor.temperature > 1) == lost


def test_solved_groups_of_one_text_are_not_called_diverse():
    monitor = monitor_for("skip", temperature=1.0, temperature_factor=1.2, cooling=1.2)
    monitor.observe(step(identical=4))
    (line,) = monitor.observe([group("solved", distinct=1)] * 4)
    assert line == "temperature 1.200 → 1.000: only 0% of the groups lost their diversity"


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


@pytest.mark.parametrize("cut", [1, HEAT_STEPS - 1, HEAT_STEPS + 1, HEAT_STEPS + 5])
def test_the_trial_of_heat_goes_on_identically(cut):
    whole, second = monitor_for("skip"), monitor_for("skip")
    temperatures(whole, cut, lambda *_: 0.6, lambda _: 0.5)
    second.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    seen = [temperatures(each, 50, lambda *_: 0.6, lambda _: 0.5) for each in (whole, second)]
    assert seen[0] == seen[1] and whole.state_dict() == second.state_dict()

"""When a run ends early, because nothing can be trained on or everything is solved."""

import json

from hypothesis import given
from hypothesis import strategies as st

from grpo.ending import EarlyStop
from grpo.records import Completion, Group
from grpo.variance import REMEDIES
from tasks.base import Problem, Score


def group(class_name="varied", action="keep", attempt=0, value=0.5):
    return Group(
        0,
        Problem("t", 1, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,), (0.0,), "x", "stop")] * 2,
        attempt,
        [Score(0.0 if class_name == "failed" else value)] * 2,
        class_name,
        action,
    )


def observe(stop, *steps, level=1):
    for groups in steps:
        stop.observe(groups, level)
    return stop


def test_a_run_is_stopped_when_nothing_was_trained_on():
    stuck = [group("failed", "skip")] * 3 + [group("identical", "skip")]
    stop = observe(EarlyStop(3), stuck, stuck)
    assert stop.stopped == ""
    observe(stop, stuck)
    assert stop.stopped.startswith("no group could be trained on for 3 steps (75% failed, 25%")
    assert REMEDIES["failed"] in stop.stopped and stop.exhausted == ""

    observe(stop, [*stuck, group()])  # one trained group
    assert stop.stopped == ""


def test_kept_groups_without_variance_train_nothing():
    assert observe(EarlyStop(2), *[[group("tied", "keep")]] * 2).stopped


def test_masked_groups_train_nothing():
    masked = [group("masked", "skip")] * 2 + [group("tied", "skip")]
    stop = observe(EarlyStop(2), masked, masked)
    assert stop.stopped.startswith("no group could be trained on for 2 steps (67% masked, 33% tied")
    assert stop.stopped.endswith(REMEDIES["masked"]) and stop.exhausted == ""


def test_a_later_try_that_varies_counts():
    tries = [group("tied", "resample"), group("varied", "keep", attempt=1)]
    assert observe(EarlyStop(1), tries).stopped == ""


def test_solved_groups_are_no_failure():
    stop = observe(EarlyStop(2), *[[group("solved", "skip", value=1.0)] * 16] * 2)
    assert stop.stopped == "" and "solved for 2 steps" in stop.exhausted
    assert stop.solved_steps == 0  # too few steps to say
    # replayed solved groups do not excuse the current level
    mixed = [group("solved", "skip", value=1.0)] * 8 + [group("failed", "skip")] * 7
    stop = observe(EarlyStop(2), mixed, mixed)
    assert REMEDIES["failed"] in stop.stopped and stop.exhausted == ""
    assert "rows of your own (--data) need easier ones" in stop.stopped  # they may have one level


def test_solved_is_what_nineteen_of_twenty_groups_of_ten_steps_are():
    solved, varied = group("solved", "skip", value=1.0), group()
    nearly = [solved] * 9 + [varied]
    stop = observe(EarlyStop(50), *[nearly] * 5, *[[solved] * 10] * 4)
    assert stop.solved_steps == 0  # of nine steps
    observe(stop, [solved] * 10)
    assert stop.solved_steps == 1  # 95 of 100
    restored = EarlyStop(50)
    restored.load_state_dict(json.loads(json.dumps(stop.state_dict())))
    for each in (stop, restored):
        observe(each, nearly)  # takes the place of the first
        assert each.solved_steps == 2
        observe(each, nearly[1:])
        assert each.solved_steps == 0  # 94 of 99


def test_solved_steps_of_one_level_say_nothing_about_the_next():
    solved = [group("solved", "skip", value=1.0)]
    stop = observe(EarlyStop(50), *[solved] * 12)
    assert stop.solved_steps == 3
    observe(stop, *[solved] * 9, level=2)
    assert stop.solved_steps == 0
    assert observe(stop, solved, level=2).solved_steps == 1


def test_steps_without_a_trained_group_count_whatever_their_level():
    failed, solved = [group("failed", "skip")], [group("solved", "skip", value=1.0)]
    stop = observe(EarlyStop(4), failed, failed)
    observe(stop, solved, level=2)
    assert stop.stopped == ""
    observe(stop, failed, level=1)
    assert stop.stopped.startswith("no group could be trained on for 4 steps (75% failed, 25% solv")


def test_solved_groups_of_one_level_are_no_untrained_steps_of_the_next():
    failed, solved = [group("failed", "skip")], [group("solved", "skip", value=1.0)]
    stop = observe(EarlyStop(3), solved, solved)
    observe(stop, failed, failed, level=2)
    assert stop.stopped == stop.exhausted == ""
    assert "for 3 steps (100% failed" in observe(stop, failed, level=2).stopped


def test_without_patience_a_run_makes_all_its_steps():
    stop = observe(EarlyStop(0), *[[group("failed", "skip")]] * 50)
    assert stop.stopped == stop.exhausted == ""


@given(
    st.lists(st.sampled_from(["varied", "failed", "solved", "tied"]), max_size=12),
    st.integers(0, 12),
)
def test_a_restored_state_goes_on_identically(classes, cut):
    steps = [[group(name, "keep" if name == "varied" else "skip")] for name in classes]
    whole, first, second = EarlyStop(3), EarlyStop(3), EarlyStop(3)
    observe(whole, *steps)
    observe(first, *steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    observe(second, *steps[cut:])
    assert whole.state_dict() == second.state_dict()
    assert whole.stopped == second.stopped

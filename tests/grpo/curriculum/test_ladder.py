"""The ladder: promotion, replay and steps back."""

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo import curriculum
from grpo.curriculum import Ladder
from grpo.records import StepSummary

MANY = 46  # groups that the running mean needs at the mark of 0.9: twice log(0.025) / log(0.85)


def ladder_of(levels, promote_by="running", promote_at=0.9):
    return Ladder(levels, promote_by, promote_at)


@pytest.fixture()
def quick(monkeypatch):
    """Ladders whose windows and patience are short."""
    monkeypatch.setattr(curriculum, "WINDOW", 1)
    monkeypatch.setattr(curriculum, "COLLAPSE_STEPS", 2)
    monkeypatch.setattr(curriculum, "CHECK_EVERY", 1)


def observe(curriculum, step, values, collapsed=(False,)):
    """Let it observe a step whose groups at the current level `collapsed` or not; return the
    lines of what it decided."""
    summary = StepSummary(step, values, collapsed={curriculum.level: list(collapsed)})
    return [decision.line for decision in curriculum.observe(summary)]


def validate(curriculum, step, mean, low):
    return [
        decision.line
        for decision in curriculum.observe_validation(
            step, {"mean": mean, "ci_low": low, "ci_high": 1.0, "n": 64}
        )
    ]


def test_promotion_by_hand():
    ladder = ladder_of([10, 25])
    assert observe(ladder, 1, {10: [1.0] * 26}) == []
    assert observe(ladder, 2, {10: [0.6] * 10}) == []
    assert observe(ladder, 3, {25: [0.1]}) == []  # nothing seen of this level
    # 46 groups in 3 steps, mean 42 / 46 = 0.913; but the interval begins at 0.828, below 0.85
    assert observe(ladder, 4, {10: [1.0] * 10}) == []
    # 66 groups; without the first step there would be 40, fewer than are needed, so it stays
    (said,) = observe(ladder, 5, {10: [1.0] * 20})
    figures = r"running mean 0.939 \[0.87\d, 0.9[67]\d\] of 66 groups in 4 steps"
    assert re.fullmatch(f"step 5: level 10 → 25, {figures}", said)
    assert ladder.level == 25
    assert observe(ladder, 6, {25: [1.0] * MANY}) == []  # the window began anew
    assert not ladder.wants_validation(10)


def test_few_prompts_do_not_climb_by_luck():
    # The true mean is 0.85. By the mean of three steps alone, at least 95 of 100 such runs climb
    # within 100 steps.
    climbed = 0
    for seed in range(100):
        ladder, rng = ladder_of([10, 25]), random.Random(seed)
        for step in range(1, 101):
            observe(ladder, step, {10: [rng.betavariate(5.1, 0.9) for _ in range(2)]})
        climbed += ladder.position
    assert climbed <= 5


def test_promotion_by_held_out_score_asks_for_evidence():
    ladder = ladder_of([10, 25], "heldout")
    assert not ladder.wants_validation(10)  # nothing was trained yet
    observe(ladder, 1, {10: [0.84]})
    assert not ladder.wants_validation(10)  # hopeless: more than 0.05 below the mark
    assert (
        observe(ladder, 2, {10: [0.88]}) == []
        and ladder.wants_validation(10)
        and not ladder.wants_validation(11)
    )  # (0.84 + 0.88) / 2 = 0.86
    assert validate(ladder, 10, 0.899, 0.86) == [
        "step 10: level 10, held-out mean 0.899 [0.860, 1.000] of 64 problems; promotion needs a "
        "mean of at least 0.9 and an interval that begins at 0.85 or above"
    ]
    assert (
        validate(ladder, 10, 0.91, 0.849)[0].startswith("step 10: level 10, ")
        and ladder.level == 10
    )
    assert validate(ladder, 10, 0.9, 0.85) == [
        "step 10: level 10 → 25, held-out mean 0.900 [0.850, 1.000] of 64 problems"
    ]
    observe(ladder, 6, {25: [1.0]})
    assert not ladder.wants_validation(10)  # the last level


def test_step_back_on_collapse(quick):
    ladder = ladder_of([10, 25])
    observe(ladder, 1, {10: [0.98] * MANY})
    assert ladder.level == 25
    most, half = [True] * 9 + [False], [True, False]
    assert observe(ladder, 2, {25: [0.5]}, most) == []
    assert observe(ladder, 3, {25: [0.5]}, half) == []  # broken off: the count begins anew
    assert observe(ladder, 4, {25: [0.5]}, [True]) == []
    assert observe(ladder, 5, {25: [0.5]}, most) == [
        "step 5: level 25 → 10, at least 90% of the level's groups collapsed in 2 steps in a row"
    ]
    for number in range(6, 12):
        observe(ladder, number, {10: [0.0]}, [True])
    assert ladder.level == 10  # below the first level there is none


def test_replayed_groups_do_not_hide_a_collapse(quick):
    ladder = ladder_of([10, 25])
    ladder.position = 1
    for step in (1, 2):
        collapsed = {10: [False] * 4, 25: [True] * 12}  # three quarters of the step's groups
        decisions = ladder.observe(StepSummary(step, {10: [0.98], 25: [0.0]}, collapsed=collapsed))
    assert [decision.kind for decision in decisions] == ["collapse"]
    assert decisions[0].figures == {"steps": 2, "share": 1.0}


def test_each_step_back_doubles_the_evidence_that_is_asked_for(quick):
    ladder = ladder_of([10, 25])

    def steps_until_it_moves():
        level, steps = ladder.level, 0
        while ladder.level == level:
            steps += 1
            observe(ladder, steps, {10: [0.98] * MANY, 25: [0.0] * MANY}, [level == 25])
        return steps

    # up at once; then down after 2, 4, 8 collapsed steps, and up again after 4, 8, 16 steps of
    # practice
    assert [steps_until_it_moves() for _ in range(7)] == [1, 2, 4, 4, 8, 8, 16]


def test_practice_ends_when_the_level_below_is_solved(quick):
    ladder = ladder_of([10, 25])
    ladder.position = 1
    for step in (1, 2):
        observe(ladder, step, {25: [0.0]}, [True])
    assert ladder.level == 10
    assert observe(ladder, 3, {10: [0.98] * MANY}) == []  # four steps of practice are due
    (said,) = observe(ladder, 4, {10: [1.0] * MANY})
    assert "level 10 → 25, running mean 1.000" in said


def test_a_level_with_too_few_held_out_problems_is_left_by_the_running_mean():
    ladder = ladder_of([1, 2, 3], "heldout", 0.97)
    assert ladder.levels_to_check == [1, 2] and ladder.note_problems(2, 45) == ""
    assert ladder.note_problems(1, 37) == (
        "level 1 has 37 held-out problems, and promotion at 0.97 needs at least 45: the running "
        "mean of its training scores decides instead"
    )
    resumed = ladder_of([1, 2, 3], "heldout", 0.97)
    resumed.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    for each in (ladder, resumed):
        said = [observe(each, step, {1: [1.0] * 40}) for step in (1, 2, 3)]
        assert not any(said[:2]) and "level 1 → 2, running mean 1.000" in said[2][0]
        for step in (8, 9, 10):
            assert observe(each, step, {2: [1.0] * 40}) == []
        assert each.wants_validation(10)


def test_a_level_out_of_reach_is_tried_less_and_less_often():
    """A policy that masters 10 words and fails at 25, 200 steps of 16 prompts, as in training."""
    ladder, moves = ladder_of([10, 25]), []
    for step in range(1, 201):
        levels = Counter(ladder.levels_for(0, step, 16))
        values = {level: [0.98 if level == 10 else 0.02] * n for level, n in levels.items()}
        collapsed = {level: [level == 25] * n for level, n in levels.items()}
        moves += ladder.observe(StepSummary(step, values, collapsed=collapsed))
    assert [(move.step, move.after) for move in moves] == [
        (3, 25), (11, 10), (27, 25), (43, 10), (75, 25), (107, 10), (171, 25)
    ]  # fmt: skip


@given(st.integers(0, 99), st.integers(1, 500), st.integers(1, 16), st.integers(0, 2))
def test_levels_are_a_pure_function_and_never_above(seed, step, count, position):
    ladder = ladder_of([10, 25, 50])
    ladder.position = position
    levels = ladder.levels_for(seed, step, count)
    assert levels == ladder.levels_for(seed, step, count) and len(levels) == count
    assert set(ladder.levels_for(seed, step, count, 16)) <= set(ladder.levels[: position + 1])
    assert levels[0] == ladder.level and set(levels) <= set(ladder.levels[: position + 1])


def test_replay_share():
    # 3,500 draws with chance 0.25: outside 0.22 ... 0.28 with probability below 1e-4 (4.1 standard
    # deviations of 0.0073)
    ladder = ladder_of([10, 25])
    ladder.position = 1
    drawn = [level for step in range(500) for level in ladder.levels_for(3, step, 8)[1:]]
    assert 0.22 < drawn.count(10) / len(drawn) < 0.28


def test_seeds_steps_and_further_prompts_of_a_step_draw_other_levels():
    ladder = ladder_of([10, 25])
    ladder.position = 1
    drawn = {
        tuple(ladder.levels_for(seed, step, 200, earlier))
        for seed in range(4)
        for step in range(4)
        for earlier in (0, 200)
    }
    # Two of 199 draws with chance 1/4 each agree with a probability below 1e-40.
    assert len(drawn) == 32


def test_replay_prefers_the_level_with_the_lowest_score():
    # About 4,000 replays with weights 1.1 - 1.0 and 1.1 - 0.7: 1 of 5 at level 10; outside 0.17 ...
    # 0.23 with probability below 1e-5 (4.7 of 0.0063)
    ladder = ladder_of([10, 25, 50])
    ladder.position = 2
    observe(ladder, 1, {10: [1.0], 25: [0.6, 0.8]})
    drawn = Counter(level for step in range(500) for level in ladder.levels_for(3, step, 33)[1:])
    assert 0.17 < drawn[10] / (drawn[10] + drawn[25]) < 0.23


STEPS = st.lists(
    st.tuples(st.sampled_from([10, 25, 50]), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5)),
    min_size=2,
    max_size=40,
)


def through(curriculum, steps, start=0):
    """Lead it through `steps`; return all that it said and drew."""
    said = []
    for step, (level, value, share, width) in enumerate(steps, start=start):
        said.append(curriculum.levels_for(0, step, 6))
        collapsed = {curriculum.level: [share > 0.5]}
        summary = StepSummary(step, {level: [value] * 9}, collapsed)
        said += [decision.to_json() for decision in curriculum.observe(summary)]
        if curriculum.wants_validation(step):
            said += [
                decision.to_json()
                for decision in curriculum.observe_validation(
                    step, {"mean": value, "ci_low": value - width / 4, "ci_high": 1, "n": 9}
                )
            ]
        assert set(said[-1] if isinstance(said[-1], list) else []) <= {
            10,
            25,
            50,
        } and curriculum.level in (10, 25, 50)
    return said


@pytest.mark.parametrize("promote_by", ["running", "heldout"])
@given(steps=STEPS, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_state_goes_on_identically_and_levels_never_leave_the_ladder(
    quick, promote_by, steps, data
):
    whole, first, second = (ladder_of([10, 25, 50], promote_by, 0.6) for _ in range(3))
    cut = data.draw(st.integers(0, len(steps) - 1))
    through(whole, steps[:cut])
    through(first, steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert through(whole, steps[cut:], cut) == through(second, steps[cut:], cut)
    assert whole.state_dict() == second.state_dict()


def test_the_levels_are_part_of_the_state():
    """A pre-flight may have put easier levels before those that were asked for."""
    resumed = ladder_of([5, 10])
    resumed.load_state_dict(json.loads(json.dumps(ladder_of([3, 5, 10]).state_dict())))
    assert resumed.levels == [3, 5, 10] and resumed.level == 3


def test_training_stays_above_a_solved_level():
    """It would learn nothing there: 10 words are solved, no group varies at 25, 300 steps."""
    ladder, decisions = ladder_of([10, 25]), []
    for step in range(1, 301):
        levels = Counter(ladder.levels_for(0, step, 16))
        values = {level: [float(level == 10)] * n for level, n in levels.items()}
        decisions += ladder.observe(StepSummary(step, values, {25: [True] * levels[25]}))
    moves = [(each.step, each.after) for each in decisions if each.before != each.after]
    assert moves == [(3, 25)] and ladder.steps_before_last == 3

    said = [each for each in decisions if each.kind == "collapse"]
    assert 1 < len(said) < 6  # after 8, 16, 32, ... collapsed steps in a row
    assert said[0].line.endswith("level 10 is solved, so going back would teach nothing")

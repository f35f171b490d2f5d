import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.curriculum import Curriculum, parse_rungs, ramp_to
from tasks.base import UserError


def test_ramp_and_rungs():
    assert [ramp_to(level) for level in (6, 10, 25, 40)] == [[6], [10], [10, 25], [10, 25, 40]]
    assert ramp_to(500) == [10, 25, 50, 100, 200, 500]
    assert parse_rungs("10,25, 50") == [10, 25, 50]


@pytest.mark.parametrize("text", ["", "a", "10,,25", "25,10", "10,10", "0,5", "-1"])
def test_bad_rungs(text):
    with pytest.raises(UserError, match="--curriculum .*: give rising numbers"):
        parse_rungs(text)


def test_promotion_by_hand():
    ladder = Curriculum([10, 25], promote_at=0.9, window=3)
    assert ladder.observe(1, {10: [1.0, 1.0]}, 0) == [] and ladder.observe(2, {10: [1.0]}, 0) == []  # no full window yet
    assert ladder.observe(3, {25: [0.1]}, 0) == []  # nothing seen of this rung
    # mean of 1.0, 1.0 and (0.6 + 0.8) / 2 = 0.7 is exactly 0.9
    assert ladder.observe(4, {10: [0.6, 0.8]}, 0) == ["step 4: level 10 → 25, running mean 0.900 over 3 steps"]
    assert ladder.level == 25
    assert ladder.observe(5, {25: [1.0]}, 0) == []  # the top has nowhere to go, and the window began anew


def test_promotion_by_held_out_score_alone():
    ladder = Curriculum([10, 25], promote_by="heldout", promote_at=0.9, window=1)
    assert ladder.observe(1, {10: [1.0]}, 0) == []
    assert ladder.observe_heldout(1, 25, 0.95, 200) == [] and ladder.observe_heldout(1, 10, 0.899, 200) == []
    assert ladder.observe_heldout(2, 10, 0.9, 200) == ["step 2: level 10 → 25, held-out mean 0.900 of 200 problems"]
    assert Curriculum([10, 25]).observe_heldout(1, 10, 1.0, 200) == []


def test_step_back_on_collapse():
    ladder = Curriculum([10, 25], window=1, collapse_at=0.9, collapse_steps=2)
    ladder.observe(1, {10: [1.0]}, 0)
    assert ladder.level == 25
    assert ladder.observe(2, {25: [0.5]}, 0.9) == []
    assert ladder.observe(3, {25: [0.5]}, 0.5) == []  # broken off: the count begins anew
    assert ladder.observe(4, {25: [0.5]}, 1.0) == []
    assert ladder.observe(5, {25: [0.5]}, 0.9) == ["step 5: level 25 → 10, 2 steps with 90% of the groups collapsed"]
    for number in range(6, 12):
        ladder.observe(number, {10: [0.0]}, 1.0)
    assert ladder.level == 10  # below the first rung there is none


@given(st.integers(0, 99), st.integers(1, 500), st.integers(1, 16), st.integers(0, 2))
def test_levels_are_a_pure_function_and_never_above(seed, step, count, rung):
    ladder = Curriculum([10, 25, 50], replay=0.5)
    ladder.rung = rung
    levels = ladder.levels_for(seed, step, count)
    assert levels == ladder.levels_for(seed, step, count) and len(levels) == count
    assert levels[0] == ladder.level and set(levels) <= set(ladder.rungs[:rung + 1])


def test_replay_share():
    # 3,500 draws with chance 0.25: outside 0.22 ... 0.28 with probability below 1e-4 (4.1 standard deviations of 0.0073)
    ladder = Curriculum([10, 25], replay=0.25)
    ladder.rung = 1
    drawn = [level for step in range(500) for level in ladder.levels_for(3, step, 8)[1:]]
    assert 0.22 < drawn.count(10) / len(drawn) < 0.28


@given(st.lists(st.tuples(st.sampled_from([10, 25, 50]), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=40), st.data())
def test_state_goes_on_identically(steps, data):
    make = lambda: Curriculum([10, 25, 50], promote_at=0.6, window=2, collapse_steps=2)  # noqa: E731
    whole, first, second = make(), make(), make()
    cut = data.draw(st.integers(0, len(steps) - 1))
    for number, (level, value, share) in enumerate(steps[:cut]):
        whole.observe(number, {level: [value]}, share)
        first.observe(number, {level: [value]}, share)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for number, (level, value, share) in enumerate(steps[cut:]):
        assert whole.observe(number, {level: [value]}, share) == second.observe(number, {level: [value]}, share)
    assert whole.state_dict() == second.state_dict()

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.curriculum import LADDER, Curriculum, is_auto, parse_rungs, ramp_to
from grpo.records import Outcome
from grpo.servo import EXPLORE, Servo
from tasks.base import UserError


def observe(curriculum, step, values, collapsed=0.0, **figures):
    """Let it observe a step; return the lines of what it decided."""
    return [
        decision.line
        for decision in curriculum.observe(Outcome(step, values, collapsed=collapsed, **figures))
    ]


def judge(curriculum, step, mean, low):
    return [
        decision.line
        for decision in curriculum.judge(
            step, {"mean": mean, "ci_low": low, "ci_high": 1.0, "n": 64}
        )
    ]


def test_ramp_and_rungs():
    assert [ramp_to(level) for level in (6, 10, 25, 40)] == [[6], [10], [10, 25], [10, 25, 40]]
    assert ramp_to(500) == [10, 25, 50, 100, 200, 500]
    assert parse_rungs("10,25, 50") == [10, 25, 50]
    assert (
        parse_rungs("auto") == list(LADDER)
        and parse_rungs("auto:25-60") == [25, 50, 60]
        and parse_rungs("auto:3-5") == [3, 5]
    )
    assert is_auto("auto") and is_auto("auto:1-2") and not is_auto("10,25") and not is_auto(None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "10,,25",
        "25,10",
        "10,10",
        "0,5",
        "-1",
        "auto:",
        "auto:10",
        "auto:50-10",
        "auto:5-5",
        "auto:1-2-3",
    ],
)
def test_bad_rungs(text):
    with pytest.raises(UserError, match="--curriculum .*: give rising numbers"):
        parse_rungs(text)


def test_promotion_by_hand():
    ladder = Curriculum([10, 25], promote_at=0.9, window=3)
    assert (
        observe(ladder, 1, {10: [1.0, 1.0]}) == [] and observe(ladder, 2, {10: [1.0]}) == []
    )  # no full window yet
    assert observe(ladder, 3, {25: [0.1]}) == []  # nothing seen of this rung
    # mean of 1.0, 1.0 and (0.6 + 0.8) / 2 = 0.7 is exactly 0.9
    assert observe(ladder, 4, {10: [0.6, 0.8]}) == [
        "step 4: level 10 → 25, running mean 0.900 over 3 steps"
    ]
    assert ladder.level == 25
    assert (
        observe(ladder, 5, {25: [1.0]}) == []
    )  # the top has nowhere to go, and the window began anew
    assert not ladder.wants_look(10) and not ladder.ended


def test_scores_of_one_rung_do_not_climb_the_next():
    ladder = Curriculum([10, 25, 50], promote_at=0.9, window=2)
    assert (
        observe(ladder, 1, {10: [1.0]}) == []
        and len(observe(ladder, 2, {10: [1.0]})) == 1
        and ladder.level == 25
    )
    assert observe(ladder, 3, {25: [1.0]}) == []  # one step of this rung is no window yet
    assert observe(ladder, 4, {25: [1.0]}) == [
        "step 4: level 25 → 50, running mean 1.000 over 2 steps"
    ]


def test_promotion_by_held_out_score_asks_for_evidence():
    ladder = Curriculum([10, 25], promote_by="heldout", promote_at=0.9, promote_every=5, window=2)
    assert not ladder.wants_look(5)  # nothing was trained yet
    observe(ladder, 1, {10: [0.84]})
    assert not ladder.wants_look(5)  # hopeless: more than 0.05 below the mark
    assert (
        observe(ladder, 2, {10: [0.88]}) == [] and ladder.wants_look(5) and not ladder.wants_look(6)
    )  # (0.84 + 0.88) / 2 = 0.86
    assert judge(ladder, 5, 0.899, 0.86) == [
        "step 5: level 10, held-out mean 0.899 [0.860, 1.000] of 64 problems; 0.9 is asked for, and an interval from 0.85 on"
    ]
    assert judge(ladder, 5, 0.91, 0.849)[0].startswith("step 5: level 10, ") and ladder.level == 10
    assert judge(ladder, 5, 0.9, 0.85) == [
        "step 5: level 10 → 25, held-out mean 0.900 [0.850, 1.000] of 64 problems"
    ]
    observe(ladder, 6, {25: [1.0]})
    assert not ladder.wants_look(10)  # the last rung, and nothing ends with it


def test_the_last_rung_is_climbed_once():
    for promote_by in ("running", "heldout"):
        ladder = Curriculum([10], promote_by=promote_by, promote_every=1, window=1, stop=True)
        said = observe(ladder, 1, {10: [0.95]})
        if promote_by == "heldout":
            assert said == [] and ladder.wants_look(1)
            said = judge(ladder, 1, 0.95, 0.9)
        assert (
            said[0].startswith("step 1: level 10, the last rung is climbed: ")
            and ladder.ended in said[0]
        )
        assert not ladder.wants_look(2)


def test_step_back_on_collapse():
    ladder = Curriculum([10, 25], window=1, collapse_at=0.9, collapse_steps=2)
    observe(ladder, 1, {10: [1.0]})
    assert ladder.level == 25
    assert observe(ladder, 2, {25: [0.5]}, 0.9) == []
    assert observe(ladder, 3, {25: [0.5]}, 0.5) == []  # broken off: the count begins anew
    assert observe(ladder, 4, {25: [0.5]}, 1.0) == []
    assert observe(ladder, 5, {25: [0.5]}, 0.9) == [
        "step 5: level 25 → 10, 2 steps with 90% of the groups collapsed"
    ]
    for number in range(6, 12):
        observe(ladder, number, {10: [0.0]}, 1.0)
    assert ladder.level == 10  # below the first rung there is none


def test_a_budget_counts_all_steps_of_its_rung_and_then_goes_on():
    ladder = Curriculum([10, 25], window=1, collapse_steps=1, rung_tokens=250)
    assert observe(ladder, 1, {10: [0.2]}, tokens=100) == []
    assert observe(ladder, 2, {10: [0.95]}, tokens=100) == [
        "step 2: level 10 → 25, running mean 0.950 over 1 steps"
    ]
    assert observe(ladder, 3, {25: [0.3]}, 1.0, tokens=100)[0].startswith(
        "step 3: level 25 → 10, 1 steps with"
    )
    assert observe(ladder, 4, {10: [0.6]}, tokens=70) == [  # 100 + 100 + 70
        "step 4: level 10 → 25, the budget of the rung is spent: 270 of 250 tokens, 3 steps; its last mean score is 0.600"
    ]
    assert (
        observe(ladder, 5, {25: [0.3]}, 1.0, tokens=100) == []
    )  # no step back to a rung whose budget is spent
    assert observe(ladder, 6, {25: [0.4]}, tokens=50) == [
        "step 6: level 25, the budget of the last rung is spent: 250 of 250 tokens, 3 steps; its last mean score is 0.400"
    ]
    assert ladder.ended.startswith("the budget of the last rung is spent")


def test_a_budget_of_time():
    ladder = Curriculum([10, 25], rung_seconds=120)
    assert observe(ladder, 1, {10: [0.2]}, seconds=90, tokens=7) == []
    assert observe(ladder, 2, {10: [0.2]}, seconds=90, tokens=7) == [
        "step 2: level 10 → 25, the budget of the rung is spent: 3.0 of 2 minutes, 14 tokens, 2 steps; its last mean score is 0.200"
    ]


@given(st.integers(0, 99), st.integers(1, 500), st.integers(1, 16), st.integers(0, 2))
def test_levels_are_a_pure_function_and_never_above(seed, step, count, rung):
    ladder = Curriculum([10, 25, 50], replay=0.5)
    ladder.rung = rung
    levels = ladder.levels_for(seed, step, count)
    assert levels == ladder.levels_for(seed, step, count) and len(levels) == count
    assert set(ladder.levels_for(seed, step, count, 16)) <= set(ladder.rungs[: rung + 1])
    assert levels[0] == ladder.level and set(levels) <= set(ladder.rungs[: rung + 1])


def test_replay_share():
    # 3,500 draws with chance 0.25: outside 0.22 ... 0.28 with probability below 1e-4 (4.1 standard deviations of 0.0073)
    ladder = Curriculum([10, 25], replay=0.25)
    ladder.rung = 1
    drawn = [level for step in range(500) for level in ladder.levels_for(3, step, 8)[1:]]
    assert 0.22 < drawn.count(10) / len(drawn) < 0.28


def test_further_prompts_of_a_step_have_levels_of_their_own():
    ladder = Curriculum([10, 25], replay=0.5)
    ladder.rung = 1
    for curriculum in (ladder, Servo([10, 25])):
        assert (
            curriculum.levels_for(0, 1, 40)
            != curriculum.levels_for(0, 1, 40, 40)
            == curriculum.levels_for(0, 1, 40, 40)
        )


def test_neighbouring_seeds_and_steps_draw_other_levels():
    ladder = Curriculum([10, 25], replay=0.5)
    ladder.rung = 1
    drawn = {tuple(ladder.levels_for(seed, step, 60)) for seed in range(4) for step in range(4)}
    assert (
        len(drawn) == 16
    )  # of 59 draws with chance 1/2 each: two agree with a probability below 1e-15


def test_replay_prefers_the_rung_with_the_lowest_score():
    # 4,000 replays with weights 1.1 - 1.0 and 1.1 - 0.7: 1 of 5 at level 10; outside 0.17 ... 0.23 with probability below 1e-5 (4.7 of 0.0063)
    ladder = Curriculum([10, 25, 50], replay=0.999)
    ladder.rung = 2
    observe(ladder, 1, {10: [1.0], 25: [0.6, 0.8]})
    drawn = Counter(level for step in range(500) for level in ladder.levels_for(3, step, 9)[1:])
    assert 0.17 < drawn[10] / (drawn[10] + drawn[25]) < 0.23 and drawn[50] < 20


LEVELS = st.sampled_from([10, 25, 50])
STEPS = st.lists(
    st.tuples(LEVELS, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 300)),
    min_size=2,
    max_size=40,
)
MAKERS = {
    "running": lambda: Curriculum([10, 25, 50], promote_at=0.6, window=2, collapse_steps=2),
    "heldout": lambda: Curriculum(
        [10, 25, 50],
        promote_by="heldout",
        promote_at=0.6,
        promote_every=2,
        collapse_steps=2,
        stop=True,
    ),
    "budget": lambda: Curriculum(
        [10, 25, 50], promote_at=0.6, window=2, collapse_steps=2, rung_tokens=500, rung_seconds=9
    ),
    "servo": lambda: Servo([10, 25, 50], mastered_at=0.6),
}


def through(curriculum, steps, start=0):
    """Lead it through `steps`; return all that it said and drew."""
    said = []
    for step, (level, value, share, spread, tokens) in enumerate(steps, start=start):
        said.append(curriculum.levels_for(0, step, 6))
        outcome = Outcome(step, {level: [value]}, {level: [spread]}, share, tokens / 100, tokens)
        said += [decision.to_json() for decision in curriculum.observe(outcome)]
        if curriculum.wants_look(step):
            said += [
                decision.to_json()
                for decision in curriculum.judge(
                    step, {"mean": value, "ci_low": value - spread / 4, "ci_high": 1, "n": 9}
                )
            ]
        assert set(said[-1] if isinstance(said[-1], list) else []) <= {
            10,
            25,
            50,
        } and curriculum.level in (10, 25, 50)
    return said


@pytest.mark.parametrize("kind", MAKERS)
@given(STEPS, st.data())
def test_state_goes_on_identically_and_levels_never_leave_the_rungs(kind, steps, data):
    whole, first, second = (MAKERS[kind]() for _ in range(3))
    cut = data.draw(st.integers(0, len(steps) - 1))
    through(whole, steps[:cut])
    through(first, steps[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert through(whole, steps[cut:], cut) == through(second, steps[cut:], cut)
    assert whole.state_dict() == second.state_dict()


@given(STEPS)
def test_no_rung_takes_more_than_its_budget_and_a_step(steps):
    ladder = MAKERS["budget"]()
    for step, (level, value, share, _, tokens) in enumerate(steps):
        if ladder.ended:
            break
        ladder.observe(Outcome(step, {level: [value]}, {}, share, tokens / 100, tokens))
    # a rung can be met again once it is spent: from the rung above, whose budget went with the step that went back; then for a step
    assert all(tokens < 500 + 300 + 300 for _, _, tokens in ladder.spent)


def lessons(curriculum, steps, count, *, seed=0, dead=()):
    """Train a simulated policy that knows 6 words: a group's spread is that of a score, practice pays by spread; `dead` levels teach nothing.

    Return the length that it writes half right in the end, and how many prompts each level had.
    """
    rng, skill, drawn = random.Random(seed), math.log2(6), Counter()
    for step in range(1, steps + 1):
        values, spreads = {}, {}
        for level in curriculum.levels_for(seed, step, count):
            score = 1 / (1 + math.exp(-2.5 * (skill + 1 - math.log2(level))))
            spread = (
                0.5 * math.sqrt(score * (1 - score)) * rng.uniform(0.7, 1.3) * (level not in dead)
            )
            skill += 0.02 * spread
            values.setdefault(level, []).append(score)
            spreads.setdefault(level, []).append(spread)
            drawn[level] += 1
        curriculum.observe(Outcome(step, values, spreads))
    return 2**skill, drawn


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count, steps", [(16, 250), (1, 4000)])
def test_the_servo_climbs(seed, count, steps):
    words, drawn = lessons(Servo(list(LADDER)), steps, count, seed=seed)
    assert words > 500
    assert (
        lessons(Curriculum([500]), steps, count, seed=seed)[0] < 20
    )  # where the same lessons at the last level lead
    assert max(drawn, key=drawn.get) in (200, 500) and min(drawn[level] for level in LADDER) > 0


@pytest.mark.parametrize("dead", [(25,), (50, 100)])
def test_a_level_that_teaches_nothing_does_not_hold_the_servo_up(dead):
    assert lessons(Servo([10, 25, 50, 100, 200]), 400, 16, dead=dead)[0] > 200


def test_the_servo_by_hand():
    servo = Servo([10, 25, 50], replay=0.25)
    assert set(servo.levels_for(0, 1, 50)) == {10, 25}  # nothing is mastered, and 25 is explored
    assert [
        d.line
        for d in servo.observe(Outcome(1, {10: [0.5] * 4, 25: [0.2]}, {10: [0.1] * 4, 25: [0.3]}))
    ] == [
        # the largest spread is 0.3, half of it 0.15, with the weight of one group: (1 * 0.3 + 0.15) / 2 and (4 * 0.1 + 0.15) / 5
        "step 1: level 10 → 25, expected spread within groups 0.225, against 0.110"
    ]
    assert servo.expected(50) == pytest.approx(0.15)
    servo.observe(
        Outcome(2, {10: [1.0] * 99}, {10: [0.0] * 99})
    )  # 10 is mastered now: (4 * 0.95 * 0.5 + 99) / (4 * 0.95 + 99) = 0.98
    assert servo.known[10][0] == 12 and servo.known[25][0] == pytest.approx(
        0.95
    )  # weights: at most 12, and fading
    # 4,000 prompts: 0.25 replay and 0.15 exploration, with standard deviations of 0.0068 and 0.0056; outside with a probability below 1e-4
    drawn = Counter(level for step in range(250) for level in servo.levels_for(3, step, 16))
    assert abs(drawn[10] / 4000 - 0.25) < 0.03 and abs(drawn[50] / 4000 - EXPLORE) < 0.025
    assert drawn[10] + drawn[25] + drawn[50] == 4000

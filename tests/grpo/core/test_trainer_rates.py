"""The trainer: its learning rate."""

from types import SimpleNamespace

import pytest
from forced import trainer_for
from hypothesis import given
from hypothesis import strategies as st

from grpo.config import Config
from grpo.records import StepSummary
from grpo.trainer import Trainer, build_curriculum


def rates(policy, steps, **options):
    """The share of the learning rate at each step of a run."""
    trainer = trainer_for(policy, **{"steps": steps} | options)
    return [round(trainer.lr_factor(step), 4) for step in range(1, steps + 1)]


def test_the_rate_is_constant_after_the_warm_up(tiny_policy):
    trainer = trainer_for(tiny_policy, warmup=1)
    assert trainer.step().metrics["learning_rate"] == pytest.approx(0.5e-3)  # half of 1e-3
    assert rates(tiny_policy, 4, warmup=1) == [0.5, 1.0, 1.0, 1.0]
    assert rates(tiny_policy, 4, warmup=0) == 4 * [1.0]
    # A run that goes on for longer than was planned is the longer run.
    assert rates(tiny_policy, 7)[:2] == rates(tiny_policy, 2)


def test_cosine_falls_from_the_full_rate_at_the_end_of_the_warm_up(tiny_policy):
    # (1 + cos(pi * k / 4)) / 2 for k = 0, 1, 2, 3
    assert rates(tiny_policy, 4, warmup=0, schedule="cosine") == [1.0, 0.8536, 0.5, 0.1464]
    assert rates(tiny_policy, 6, warmup=2, schedule="cosine") == [
        *(0.3333, 0.6667),
        *(1.0, 0.8536, 0.5, 0.1464),
    ]


def test_the_rate_stays_low_if_a_loop_by_hand_goes_on(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=4, warmup=0, schedule="cosine")
    assert [round(trainer.lr_factor(step), 4) for step in (4, 5, 6, 9)] == [0.1464, 0, 0, 0]


def rates_of(trainer, climbs=()):
    """Return the factor of each step of a ladder that climbs after the steps `climbs`."""
    shares = []
    for step in range(1, trainer.config.steps + 1):
        shares.append(round(trainer.lr_factor(step), 4))
        trainer.curriculum.observe(StepSummary(step, {trainer.curriculum.level: [0.5]}))
        if step in climbs:
            trainer.curriculum._move(+1, step, "promotion", "")
    return shares


def test_on_a_ladder_cosine_begins_at_the_last_level(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=7, warmup=1, schedule="cosine")
    trainer.curriculum = build_curriculum(trainer.config, [3, 5, 10])
    # The last level is reached after step 3.
    assert rates_of(trainer, climbs=(1, 3)) == [0.5, 1.0, 1.0, 1.0, 0.8536, 0.5, 0.1464]


def test_a_ladder_that_does_not_climb_falls_after_half_of_the_steps(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=8, warmup=1, schedule="cosine")
    trainer.curriculum = build_curriculum(trainer.config, [3, 5, 10])
    assert rates_of(trainer) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8536, 0.5, 0.1464]


def test_a_ladder_that_climbs_late_falls_on_from_half_of_the_steps(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=8, warmup=1, schedule="cosine")
    trainer.curriculum = build_curriculum(trainer.config, [3, 5])
    assert rates_of(trainer, climbs=(6,)) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8536, 0.5, 0.1464]


def test_the_rate_does_not_rise_again_when_a_ladder_steps_back(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=40, warmup=0, schedule="cosine")
    trainer.curriculum = build_curriculum(trainer.config, [3, 5])
    ladder, shares = trainer.curriculum, []
    for step in range(1, 41):
        shares.append(trainer.lr_factor(step))
        collapsed = {5: [step in range(12, 20)]}
        ladder.observe(StepSummary(step, {ladder.level: [0.5]}, collapsed))
        if step in (10, 25):
            ladder._move(+1, step, "promotion", "")
        if step == 22:
            assert ladder.level == 3
            ladder.load_state_dict(ladder.state_dict())
    assert ladder.level == 5 and ladder.steps_before_last == 10
    assert shares == sorted(shares, reverse=True) and shares[10] == 1 > shares[11]


@given(steps=st.integers(1, 40), warmup=st.integers(0, 60))
def test_cosine_reaches_the_full_rate_however_short_the_run(steps, warmup):
    config = Config(steps=steps, warmup=warmup, schedule="cosine")
    trainer = SimpleNamespace(config=config, curriculum=build_curriculum(config, [10]))
    shares = [Trainer.lr_factor(trainer, step) for step in range(1, steps + 1)]
    peak = shares.index(max(shares))
    assert shares[peak] == 1.0 and all(0 < share <= 1 for share in shares)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert peak == min(warmup, steps - 1)

"""The trainer: which groups it keeps, skips, and samples again."""

import copy

import pytest
import torch
from forced import trainer_for, weights

from grpo import trainer as trainer_module
from grpo.model.load import load_policy
from grpo.trainer import update_settings


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_skipped_groups_change_nothing_by_one_bit(tiny_model, beta):
    """Issue: gradient, denominator and KL of a step with skipped groups are those of a step
    without these groups.
    """
    with_them, without = (
        trainer_for(
            load_policy(str(tiny_model), device="cpu", keep_reference=True),
            beta=beta,
        )
        for _ in range(2)
    )
    a = with_them.step()
    without.rollout = lambda *_: [
        copy.deepcopy(group) for group in a.groups if group.index % 2 == 0
    ]
    b = without.step()
    assert (
        a.metrics["groups/skipped"] == 2
        and b.metrics["groups/skipped"] == 0
        and a.metrics["grad_norm"] > 0
    )
    assert (
        a.metrics["loss"] == b.metrics["loss"] and a.metrics["grad_norm"] == b.metrics["grad_norm"]
    )
    assert a.metrics.get("kl") == b.metrics.get("kl")
    assert all(
        torch.equal(x, y)
        for x, y in zip(weights(with_them.policy), weights(without.policy), strict=True)
    )
    assert a.metrics["wasted_tokens"] == sum(group.tokens for group in a.groups if group.index % 2)


def test_kept_groups_stay_in_the_denominator(tiny_model):
    norms = {}
    for policy in ("keep", "skip"):
        trainer = trainer_for(
            load_policy(str(tiny_model), device="cpu"),
            on_degenerate=policy,
            loss="dr_grpo",
            max_grad_norm=0.0,
        )
        norms[policy] = trainer.step().metrics["grad_norm"]
    # dr_grpo weighs every token by 1 / (rows * budget): 8 of 16 rows add nothing to the sum, but
    # double the rows
    assert norms["keep"] == pytest.approx(norms["skip"] / 2, rel=1e-5)


def test_dr_grpo_divides_by_the_same_number_in_every_step(tiny_policy, monkeypatch):
    divisors = []

    def noted(config, *, max_length, **others):
        divisors.append(max_length)
        return update_settings(config, max_length=max_length, **others)

    monkeypatch.setattr(trainer_module, "update_settings", noted)
    trainer = trainer_for(tiny_policy, loss="dr_grpo", max_new_tokens=None, steps=3, prompts=2)

    def budget(problem):
        return trainer.stream.budget(tiny_policy.encode(problem), problem)

    budgets = [budget(group.problem) for _ in range(3) for group in trainer.step().groups]
    assert len(set(budgets)) > 1 and divisors == [divisors[0]] * 3
    first = [trainer.stream.supply.at(index, 1) for index in range(16)]
    assert divisors[0] == max(map(budget, first))

    given = trainer_for(tiny_policy, loss="dr_grpo", max_new_tokens=31)
    given.step()
    assert divisors[-1] == 31


@pytest.fixture()
def every_loss_is_lost_diversity(monkeypatch):
    """The groups of `Forced` tie with different texts; here they pass for texts that repeat."""
    monkeypatch.setattr("grpo.variance.lost_diversity", lambda group: group.class_name != "varied")


def test_ties_are_drawn_again_at_the_base_temperature(tiny_policy):
    trainer = trainer_for(tiny_policy, on_degenerate="resample", retries=1, temperature_factor=1.2)
    temperatures = {group.temperature for _ in range(2) for group in trainer.step().groups}
    assert temperatures == {1.0}


def test_groups_that_lost_their_diversity_are_drawn_again_hotter_then_skipped(
    tiny_policy, every_loss_is_lost_diversity
):
    report = trainer_for(
        tiny_policy, on_degenerate="resample", retries=2, temperature_factor=1.2
    ).step()
    tries = sorted(
        (group.index, group.attempt, group.action, round(group.temperature, 6))
        for group in report.groups
    )
    assert tries == [
        (0, 0, "keep", 1.0),
        (1, 0, "resample", 1.0),
        (1, 1, "resample", 1.2),
        (1, 2, "skip", 1.44),
        (2, 0, "keep", 1.0),
        (3, 0, "resample", 1.0),
        (3, 1, "resample", 1.2),
        (3, 2, "skip", 1.44),
    ]
    assert report.metrics["groups/resampled"] == 4 and report.metrics["groups/count"] == 4


def test_each_try_is_drawn_with_its_own_numbers(tiny_policy):
    report = trainer_for(
        tiny_policy, on_degenerate="resample", retries=2, temperature_factor=1.0
    ).step()
    tries = {
        tuple(c.tokens for c in group.completions) for group in report.groups if group.index == 1
    }
    assert len(tries) == 3  # at one temperature


def test_a_second_try_that_varies_is_learned_from(tiny_policy, every_loss_is_lost_diversity):
    report = trainer_for(
        tiny_policy, stuck=1, on_degenerate="resample", temperature_factor=1.2
    ).step()
    tries = sorted(
        (group.index, group.attempt, group.action, group.temperature) for group in report.groups
    )
    assert tries == [
        (0, 0, "keep", 1.0),
        (1, 0, "resample", 1.0),
        (1, 1, "keep", 1.2),
        (2, 0, "keep", 1.0),
        (3, 0, "resample", 1.0),
        (3, 1, "keep", 1.2),
    ]
    assert all(
        len(group.advantages) == (4 if group.action == "keep" else 0) for group in report.groups
    )
    assert report.metrics["groups/kept"] == 4
    # a try is scored at its own temperature, and figures of reward are those of first tries
    assert report.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert report.metrics["reward"] == pytest.approx((0.15 + 0.5 + 0.15 + 0.5) / 4)


def test_solved_groups_are_not_drawn_again(all_end, tiny_policy):
    report = trainer_for(tiny_policy, odd=1.0, on_degenerate="resample").step()
    assert {group.action for group in report.groups if group.index % 2} == {"skip"}
    assert report.metrics["groups/class/solved"] == 2 and len(report.groups) == 4


@pytest.mark.parametrize("wanted, drawn, kept", [(0, 2, 1), (1, 2, 1), (3, 6, 3), (9, 8, 4)])
def test_dynamic_sampling_draws_on_until_enough_groups_vary(tiny_policy, wanted, drawn, kept):
    trainer = trainer_for(
        tiny_policy, prompts=2, dynamic_sampling=wanted
    )  # one of each two prompts varies; four times two are the most
    report = trainer.step()
    assert [group.index for group in report.groups] == list(
        range(drawn)
    ) and trainer.stream.next_index == drawn
    assert report.metrics["groups/kept"] == kept and report.metrics["groups/count"] == drawn
    assert all(bool(group.advantages) == (group.index % 2 == 0) for group in report.groups)
    assert trainer.step().groups[0].index == drawn  # no problem comes twice


def test_dynamic_sampling_draws_at_once_what_the_last_step_needed(tiny_policy):
    """One of each two prompts varies. What a step draws at once is noted as (first, count)."""

    def drawing(**options):
        trainer = trainer_for(tiny_policy, prompts=2, **options)
        drawn, rollout = [], trainer.rollout

        def noted(step, problems, timer):
            drawn.append((problems[0][0], len(problems)))
            return rollout(step, problems, timer)

        trainer.rollout = noted
        return trainer, drawn

    trainer, drawn = drawing(dynamic_sampling=2)
    trainer.step()
    assert drawn == [(0, 2), (2, 2)]  # nothing is known yet, so two are expected to vary
    trainer.step()
    assert drawn[2:] == [(4, 4)]

    resumed, drawn = drawing(dynamic_sampling=2)
    resumed.restore(trainer.state())
    resumed.step()
    assert drawn == [(8, 4)]

    nothing_varied, drawn = drawing(dynamic_sampling=2)
    nothing_varied.kept_share = 0.0
    nothing_varied.step()
    assert drawn == [(0, 8)]  # the most that a step may take

    keeping, drawn = drawing(dynamic_sampling=2, on_degenerate="keep")
    keeping.step()
    assert drawn == [(0, 2), (2, 2)]  # a group that is kept without variance does not count

    without, drawn = drawing(dynamic_sampling=0)
    without.kept_share = 0.0
    without.step()
    assert drawn == [(0, 2)]


@pytest.mark.parametrize(
    "share, missing, drawn, batches",
    [(1.0, 8, 0, 1), (0.25, 8, 0, 2), (0.25, 3, 32, 1), (0.25, 8, 32, 2), (0.01, 8, 48, 1)],
)
def test_batches_are_those_that_the_share_of_varying_groups_takes(
    tiny_policy, share, missing, drawn, batches
):
    trainer = trainer_for(tiny_policy, prompts=16, dynamic_sampling=8)
    trainer.kept_share = share
    assert trainer.batches(missing, drawn) == batches


def test_dynamic_sampling_keeps_within_the_tokens_of_a_step(tiny_policy):
    alone = trainer_for(tiny_policy, prompts=2, dynamic_sampling=9)
    assert len(alone.step().groups) == 8
    trainer = trainer_for(tiny_policy, prompts=2, dynamic_sampling=9, step_tokens=5 * 4 * 24)
    assert len(trainer.step().groups) == 5 and trainer.step().groups[0].index == 5


@pytest.mark.parametrize("on_degenerate", ["skip", "resample"])
def test_a_step_without_a_group_to_learn_from_leaves_the_weights(tiny_policy, on_degenerate):
    trainer = trainer_for(tiny_policy, prompts=2, on_degenerate=on_degenerate)
    trainer.task.drawn = dict.fromkeys(trainer.task.drawn, 1)
    before = weights(tiny_policy)
    report = trainer.step()
    assert "loss" not in report.metrics and report.metrics["groups/kept"] == 0
    assert all(torch.equal(x, y) for x, y in zip(before, weights(tiny_policy), strict=True))

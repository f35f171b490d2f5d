"""The loop on a task that can be forced: degenerate groups, retries, schedule, state."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from forced import Forced, trainer_for, weights
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import loading

from grpo import trainer as trainer_module
from grpo.config import Config
from grpo.curriculum.ladder import Ladder
from grpo.learn.loss import LOSSES
from grpo.model.load import load_policy
from grpo.records import StepSummary
from grpo.rollout.generate import budget_for
from grpo.trainer import Trainer
from grpo.training.metrics import StepTimer, step_summary
from tasks.base import Problem, Score, UserError
from tasks.supply import Supply


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_skipped_groups_change_nothing_by_one_bit(tiny_model, beta):
    """Issue: gradient, denominator and KL of a step with skipped groups are those of a step
    without these groups.
    """
    with_them, without = (
        trainer_for(
            load_policy(str(tiny_model), device="cpu", options=loading(keep_reference=True)),
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


def test_solved_groups_are_not_drawn_again(tiny_policy):
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


def test_advantages_are_kept_beside_rewards(tiny_policy):
    report = trainer_for(tiny_policy, scale="none").step()
    group = next(group for group in report.groups if group.index == 0)
    assert group.rewards == pytest.approx([0, 0.1, 0.2, 0.3])
    assert group.advantages == pytest.approx([-0.15, -0.05, 0.05, 0.15])
    assert next(group for group in report.groups if group.index == 1).advantages == []


class Credited(Forced):
    """Rewards as in Forced, of which the first letter of an answer earns the half."""

    def credits(self, problem, completions):
        return [((1, 0.05 * i),) if text else () for i, text in enumerate(completions)]


def test_credit_by_alignment_reaches_tokens_and_scores(tiny_policy):
    trainer = trainer_for(tiny_policy, kind=Credited, credit="alignment", scale="none")
    report = trainer.step()
    group = next(group for group in report.groups if group.index == 0)
    assert [len(row) for row in group.advantages] == [len(c.tokens) for c in group.completions]
    assert [row[0] for row in group.advantages] == pytest.approx([-0.15, -0.05, 0.05, 0.15])
    assert len({a for row in group.advantages for a in row}) > 4
    assert [score.credits for score in group.scores] == trainer.task.credits(
        group.problem, group.texts
    )
    assert math.isfinite(report.metrics["loss"]) and report.metrics["grad_norm"] > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_a_finite_step(tiny_model, loss):
    policy = load_policy(str(tiny_model), device="cpu", options=loading(keep_reference=True))
    before = weights(policy)
    metrics = trainer_for(policy, loss=loss, beta=0.1).step().metrics
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert all(p.isfinite().all() for p in policy.parameters)
    assert not any(torch.equal(x, y) for x, y in zip(before, weights(policy), strict=True))


def test_epochs_are_updates_on_one_rollout(tiny_policy, monkeypatch):
    passes = []

    def watched(*args, **options):
        passes.append(plain_update(*args, **options))
        return passes[-1]

    plain_update = trainer_module.update
    monkeypatch.setattr(trainer_module, "update", watched)
    trainer = trainer_for(tiny_policy, epochs=2)
    metrics = trainer.step().metrics
    assert {int(entry["step"]) for entry in trainer.optimizer.inner.state.values()} == {2}
    on_policy, off_policy = (one["sampling/sampling_logp_difference/max"] for one in passes)
    assert on_policy < 1e-5 and off_policy > 1e-3  # the log of the ratio
    assert (
        metrics["sampling/sampling_logp_difference/max"] == on_policy
        and metrics["loss"] == passes[1]["loss"]
    )


def test_problems_are_a_pure_function_of_seed_step_and_state(tiny_policy):
    one, two, other = (
        trainer_for(tiny_policy),
        trainer_for(tiny_policy),
        trainer_for(tiny_policy, seed=1),
    )
    assert not {p.key for _, p in one.problems(1)} & {p.key for _, p in other.problems(1)}
    for trainer in (one, two):
        trainer.stream.next_index = 8
    assert one.problems(3) == two.problems(3)
    assert [index for index, _ in one.problems(3)] == [8, 9, 10, 11]


def test_a_step_takes_the_prompts_that_its_tokens_allow_and_none_comes_twice(tiny_policy):
    trainer = trainer_for(tiny_policy, step_tokens=200)  # 4 completions of 24 tokens: 96 a prompt
    assert [index for index, _ in trainer.problems(1)] == [0, 1]
    first, second = trainer.step(), trainer.step()
    assert [sorted({group.index for group in report.groups}) for report in (first, second)] == [
        [0, 1],
        [2, 3],
    ]
    assert (
        second.metrics["groups/count"] == 2
        and trainer.stream.next_index == len(trainer.stream.seen) == 4
    )
    counts = {
        tokens: len(trainer_for(tiny_policy, step_tokens=tokens).problems(1))
        for tokens in (1, 96, 191, 192, 383, 384, 9999)
    }
    assert counts == {1: 1, 96: 1, 191: 1, 192: 2, 383: 3, 384: 4, 9999: 4}


def test_problems_that_do_not_fit_are_passed_over(tiny_policy):
    problems = [
        Problem("forced", 1, "p", "x " * (1100 if i in (1, 2, 5) else 1), str(i)) for i in range(8)
    ]
    trainer = trainer_for(tiny_policy, prompts=2)
    trainer.stream.supply = Supply(trainer.task, seed=0, dataset=problems)
    trainer.stream.supply.at = lambda index, level: problems[index]
    trainer.task.drawn = {problem.key: 0 for problem in problems}
    reports = [trainer.step() for _ in range(2)]
    assert [[group.index for group in report.groups] for report in reports] == [
        [0, 3],
        [4, 6],
    ] and trainer.stream.next_index == 7


def test_the_largest_budget_counts(tiny_policy):
    problems = [Problem("forced", 1, "p", "one " * words, str(words)) for words in (1, 12, 1)]
    budgets = [
        budget_for(tiny_policy, tiny_policy.encode("p"), problem.target) for problem in problems
    ]
    trainer = trainer_for(tiny_policy, step_tokens=3 * 4 * budgets[1] - 1, max_new_tokens=None)
    assert sum(budgets) < 3 * budgets[1] - 1 and trainer.stream.affordable(problems) == 2
    assert (
        trainer_for(
            tiny_policy, step_tokens=3 * 4 * budgets[1], max_new_tokens=None
        ).stream.affordable(problems)
        == 3
    )


def test_the_curriculum_sees_first_tries_and_the_tokens_of_all(tiny_policy):
    report = trainer_for(tiny_policy, stuck=1, on_degenerate="resample").step()
    outcome = step_summary(1, report.groups, seconds=2.0)
    assert (
        outcome.values == {1: pytest.approx([0.15, 0.5, 0.15, 0.5])}
        and outcome.collapsed == {1: [False, True, False, True]}
        and outcome.seconds == 2
    )
    assert (
        outcome.tokens
        == report.metrics["num_tokens"]
        > sum(group.tokens for group in report.groups if not group.attempt)
    )


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


def test_on_a_ladder_cosine_begins_at_the_last_level(tiny_policy):
    trainer = trainer_for(tiny_policy, steps=7, warmup=1, schedule="cosine")
    trainer.curriculum = Ladder([3, 5, 10])
    shares = []
    for step in range(1, 8):
        shares.append(round(trainer.lr_factor(step), 4))
        trainer.curriculum.observe(StepSummary(step, {trainer.curriculum.level: [0.5]}))
        if step in (1, 3):  # up; the last level is reached after step 3
            trainer.curriculum._climb(step, "")
    assert shares == [0.5, 1.0, 1.0, 1.0, 0.8536, 0.5, 0.1464]


@given(steps=st.integers(1, 40), warmup=st.integers(0, 60))
def test_cosine_reaches_the_full_rate_however_short_the_run(steps, warmup):
    config = Config(steps=steps, warmup=warmup, schedule="cosine")
    trainer = SimpleNamespace(config=config, curriculum=Ladder([10]))
    shares = [Trainer.lr_factor(trainer, step) for step in range(1, steps + 1)]
    peak = shares.index(max(shares))
    assert shares[peak] == 1.0 and all(0 < share <= 1 for share in shares)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert peak == min(warmup, steps - 1)


def test_state_survives_json(tiny_policy):
    trainer = trainer_for(tiny_policy)
    trainer.step()
    other = trainer_for(tiny_policy)
    other.restore(json.loads(json.dumps(trainer.state())))
    assert other.state() == trainer.state() and other.done == 1
    assert (
        list(other.stream.seen)
        == [problem.key for _, problem in trainer_for(tiny_policy).problems(1)]
        and other.stream.next_index == 4
    )


def test_shuffled_rewards_are_permuted_over_the_batch_and_the_scores_stay_true(tiny_policy):
    true = {
        (g.index, i): score
        for g in trainer_for(tiny_policy).rollout(
            1, trainer_for(tiny_policy).problems(1), StepTimer()
        )
        for i, score in enumerate(g.scores)
    }
    trainer = trainer_for(tiny_policy, control="shuffled-rewards")
    groups = trainer.rollout(1, trainer.problems(1), StepTimer())
    paid = {(g.index, i): score for g in groups for i, score in enumerate(g.scores)}
    assert sorted(score.reward for score in paid.values()) == sorted(
        score.reward for score in true.values()
    )
    values = {score.value for score in true.values()}
    assert (
        values == {score.reward for score in true.values()} and len(values) == 5
    )  # 0, 0.1, 0.2, 0.3 and the 0.5 of odd ones
    moved = [place for place in true if paid[place].reward != true[place].reward]
    assert len(moved) > 4 and all(paid[place].value == true[place].value for place in true)
    # over the batch, not within groups: some group was paid what another one had earned
    assert any(
        sorted(paid[g, i].reward for i in range(4)) != sorted(true[g, i].reward for i in range(4))
        for g in range(4)
    )
    again = trainer_for(tiny_policy, control="shuffled-rewards")
    assert [g.rewards for g in again.rollout(1, again.problems(1), StepTimer())] == [
        g.rewards for g in groups
    ]


def test_a_constant_reward_teaches_nothing(tiny_policy):
    before = weights(tiny_policy)
    metrics = (
        trainer_for(tiny_policy, control="constant-reward", on_degenerate="keep").step().metrics
    )
    assert (
        metrics["reward"] == 0.5
        and metrics["reward_std"] == 0
        and metrics["control"] == "constant-reward"
    )
    assert all(torch.equal(x, y) for x, y in zip(before, weights(tiny_policy), strict=True))


class Penalised(Forced):
    """Even problems vary below 0, odd ones earn `odd`."""

    reward_range = (-1.0, 0.0)

    def score(self, problem, completions):
        return [
            replace(score, reward=score.reward - 1) for score in super().score(problem, completions)
        ]


@pytest.mark.parametrize("odd, class_name", [(1.0, "solved"), (0.0, "failed"), (0.5, "tied")])
def test_groups_are_judged_on_the_scale_of_the_task(tiny_policy, odd, class_name):
    trainer = trainer_for(tiny_policy, odd=odd, kind=Penalised)
    judged = Counter(group.class_name for group in trainer.step().groups)
    assert judged == {"varied": 2, class_name: 2}


def test_a_constant_reward_lies_in_the_middle_of_the_range(tiny_policy):
    trainer = trainer_for(tiny_policy, kind=Penalised, control="constant-reward")
    assert trainer.step().metrics["reward"] == -0.5


def test_a_real_run_is_not_marked(tiny_policy):
    assert "control" not in trainer_for(tiny_policy).step().metrics


def test_repeated_problems_are_counted(tiny_policy):
    problems = [Problem("forced", 1, "p", "x", str(i)) for i in range(6)]
    trainer = trainer_for(tiny_policy)
    trainer.stream.supply = Supply(trainer.task, seed=0, dataset=problems)
    trainer.task.drawn = {problem.key: 0 for problem in problems}
    first, second = (trainer.step().metrics for _ in range(2))
    assert (first["problems/seen"], first["problems/repeated"]) == (4, 0)
    assert (second["problems/seen"], second["problems/repeated"]) == (6, 0.5)


def test_out_of_memory_makes_smaller_micro_batches_then_forgets_then_says_so(
    tiny_policy, monkeypatch
):
    trainer = trainer_for(tiny_policy, micro_tokens=1000)
    tried = []

    def hungry(policy, optimizer, groups, settings, before):
        micro_tokens = settings.micro_tokens
        tried.append((micro_tokens, tiny_policy.gradient_checkpointing))
        if (
            not (micro_tokens < 200 and tiny_policy.gradient_checkpointing)
            or tried.count(tried[-1]) > 1
        ):
            raise torch.OutOfMemoryError("no room")
        return plain_update(policy, optimizer, groups, settings, before)

    plain_update = trainer_module.update
    monkeypatch.setattr(trainer_module, "update", hungry)
    report = trainer.step()
    assert math.isfinite(report.metrics["loss"])
    sizes = [micro_tokens for micro_tokens, _ in tried]
    assert sizes == sorted(sizes, reverse=True) and sizes[:2] == [1000, 500]
    assert [forgetful for _, forgetful in tried] == [False] * (len(tried) - 1) + [True] and sizes[
        -1
    ] == sizes[-2]
    assert (
        report.events[0]
        == "out of memory: micro-batches of 500 tokens from now on (the gradient stays the same)"
    )
    assert (
        report.events[len(tried) - 2]
        == "out of memory: gradient checkpointing from now on (the gradient stays the same)"
    )
    with pytest.raises(
        UserError, match="out of memory in the update of a single completion of .* tokens"
    ):
        trainer.step()


def test_a_run_without_a_trained_group_stops_with_its_cause(tiny_policy):
    trainer = trainer_for(tiny_policy, odd=0.5, patience=2, prompts=1)
    trainer.task.score = lambda problem, texts: [Score(0.0) for _ in texts]
    trainer.step()
    assert not trainer.ended
    report = trainer.step()
    assert trainer.stopped.startswith("no group could be trained on for 2 steps (100% failed")
    assert report.metrics["stopped"] == trainer.stopped == trainer.ended

    resumed = trainer_for(tiny_policy, patience=3, prompts=1)
    resumed.restore(json.loads(json.dumps(trainer.state())))
    assert not resumed.ended  # by more patience it goes on
    resumed.task.score = trainer.task.score
    resumed.step()
    assert "for 3 steps" in resumed.stopped


def test_a_control_run_stops_when_nothing_varies_but_never_counts_as_solved(tiny_policy):
    trainer = trainer_for(tiny_policy, patience=4, control="constant-reward")
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    for _ in range(3):
        trainer.step()
        assert not trainer.ended and not trainer.seems_solved
    trainer.step()
    assert "no group could be trained on for 4 steps" in trainer.stopped
    assert not trainer.seems_solved


def test_solved_steps_at_the_last_level_call_for_a_held_out_check(tiny_policy):
    trainer = trainer_for(tiny_policy, patience=9, prompts=1, promote_every=2)
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    asked = []
    for _ in range(7):
        trainer.step()
        asked.append(trainer.seems_solved)
    # after three solved steps, then every promote_every steps while it lasts
    assert asked == [False, False, True, False, True, False, True]
    trainer.curriculum.levels.append(2)
    assert not trainer.seems_solved

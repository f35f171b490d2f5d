"""The trainer: one step, from the problems to the update, which groups it keeps, and its state."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from forced import Forced, trainer_for, weights

from grpo import trainer as trainer_module
from grpo.config import Config, resolve_config
from grpo.curriculum import draw_answers, survey
from grpo.data.errors import UserError
from grpo.ending import figures_of
from grpo.evaluate import budgets
from grpo.learn.loss import LOSSES
from grpo.model.load import load_policy
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.base import Score, TaskError
from grpo.tasks.interleave import Interleave
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer


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
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
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
    trainer = trainer_for(tiny_policy, epochs=2, schedule="constant")
    metrics = trainer.step().metrics
    assert {int(entry["step"]) for entry in trainer.optimizer.inner.state.values()} == {2}
    on_policy, off_policy = (one["sampling/sampling_logp_difference/max"] for one in passes)
    assert on_policy < 1e-5 and off_policy > 1e-3  # the log of the ratio
    assert metrics["sampling/sampling_logp_difference/max"] == on_policy
    assert metrics["parity/kl"] == passes[0]["parity/kl"] < passes[1]["parity/kl"]

    # Everything else is the mean over the updates, as in TRL.
    assert passes[0]["clip_ratio/high_mean"] == 0 < passes[1]["clip_ratio/high_mean"]
    for name in ("loss", "grad_norm", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        first, second = (one[name] for one in passes)
        assert first != second and metrics[name] == pytest.approx((first + second) / 2), name


def test_state_survives_json(tiny_policy):
    trainer = trainer_for(tiny_policy)
    trainer.step()
    other = trainer_for(tiny_policy)
    other.restore(json.loads(json.dumps(trainer.state())))
    assert other.state() == trainer.state() and other.done == 1
    assert other.stream.seen == {p.key for _, p in trainer_for(tiny_policy).problems(1)}
    assert other.stream.next_index == 4


def test_every_completion_of_a_step_is_drawn_with_its_own_numbers(tiny_policy, monkeypatch):
    drawn = []
    monkeypatch.setattr("grpo.trainer.sample_groups", lambda *_, keys, **__: drawn.extend(keys))
    trainer = trainer_for(tiny_policy)
    trainer.sample(1, trainer.problems(1))
    keys = [key for group in drawn for key in group]
    assert len(set(keys)) == trainer.prompts * trainer.config.group_size


def test_each_batch_of_a_control_experiment_is_shuffled_by_its_own_numbers(
    tiny_policy, monkeypatch
):
    keys = []
    trainer = trainer_for(tiny_policy, prompts=2, dynamic_sampling=2)
    monkeypatch.setattr(trainer.monitor, "apply_control", lambda _, key: keys.append(key))
    trainer.step()
    assert keys == ["0/1/0/0", "0/1/0/2"]


@pytest.mark.parametrize("wanted, drawn, kept", [(0, 2, 1), (1, 2, 1), (3, 6, 3), (9, 8, 4)])
def test_dynamic_sampling_draws_on_until_enough_groups_vary(tiny_policy, wanted, drawn, kept):
    # One of each two prompts varies; four times two are the most.
    trainer = trainer_for(tiny_policy, prompts=2, dynamic_sampling=wanted)
    report = trainer.step()
    assert [group.index for group in report.groups] == list(range(drawn))
    assert trainer.stream.next_index == drawn
    assert report.metrics["groups/kept"] == kept and report.metrics["groups/count"] == drawn
    assert all(bool(group.advantages) == (group.index % 2 == 0) for group in report.groups)
    assert trainer.step().groups[0].index == drawn  # no problem comes twice


@pytest.mark.parametrize(
    "share, missing, drawn, batches",
    [(1.0, 8, 0, 1), (0.25, 8, 0, 2), (0.25, 3, 32, 1), (0.25, 8, 32, 2), (0.01, 8, 48, 1)],
)
def test_batches_are_those_that_the_share_of_varying_groups_takes(
    tiny_policy, share, missing, drawn, batches
):
    trainer = trainer_for(tiny_policy, prompts=16, dynamic_sampling=8)
    assert trainer.batches_needed(missing, drawn, share) == batches


def test_a_step_without_a_group_to_learn_from_leaves_the_weights(tiny_policy):
    trainer = trainer_for(tiny_policy, prompts=2)
    trainer.task.drawn = dict.fromkeys(trainer.task.drawn, 1)
    before = weights(tiny_policy)
    report = trainer.step()
    assert "loss" not in report.metrics and report.metrics["groups/kept"] == 0
    assert all(torch.equal(x, y) for x, y in zip(before, weights(tiny_policy), strict=True))


def test_dr_grpo_divides_by_the_same_number_in_every_step(tiny_policy):
    trainer = trainer_for(tiny_policy, loss="dr_grpo", max_new_tokens=None, prompts=2)
    largest = trainer.update_settings.max_length
    first = [trainer.stream.supply.at(index, 1) for index in range(16)]
    found = budgets(tiny_policy, trainer.task, first, None)
    assert largest == max(found) > min(found)
    trainer.step()
    assert trainer.update_settings.max_length == largest

    given = trainer_for(tiny_policy, loss="dr_grpo", max_new_tokens=31)
    assert given.update_settings.max_length == 31


class Penalised(Forced):
    """Even problems vary below 0, odd ones earn `odd`."""

    reward_range = (-1.0, 0.0)

    def score(self, problem, completions):
        return [
            replace(score, reward=score.reward - 1) for score in super().score(problem, completions)
        ]


@pytest.mark.parametrize("kind, middle", [(Forced, 0.5), (Penalised, -0.5)])
def test_a_constant_reward_lies_in_the_middle_of_the_range_and_teaches_nothing(
    tiny_policy, kind, middle
):
    before = weights(tiny_policy)
    control = dict(control="constant-reward", on_degenerate="keep")
    metrics = trainer_for(tiny_policy, kind=kind, **control).step().metrics
    assert (metrics["reward"], metrics["reward_std"]) == (middle, 0)
    assert metrics["control"] == "constant-reward"
    assert all(torch.equal(x, y) for x, y in zip(before, weights(tiny_policy), strict=True))


@pytest.mark.parametrize("odd, class_name", [(1.0, "solved"), (0.0, "failed"), (0.5, "tied")])
def test_groups_are_judged_on_the_scale_of_the_task(all_end, tiny_policy, odd, class_name):
    trainer = trainer_for(tiny_policy, odd=odd, kind=Penalised)
    judged = Counter(group.class_name for group in trainer.step().groups)
    assert judged == {"varied": 2, class_name: 2}


def test_a_solved_level_opens_the_next_and_only_the_last_one_ends_the_run(tiny_policy):
    tiny_policy.stops = tuple(range(tiny_policy.vocabulary))  # a token ends each answer
    trainer = trainer_for(
        tiny_policy, patience=9, prompts=16, curriculum="1,2", schedule="constant"
    )
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    reports = [trainer.step() for _ in range(9)]
    kinds = [(d.kind, d.before, d.after) for report in reports for d in report.decisions]
    assert kinds == [("open", 1, 2)]
    assert trainer.ended == "every training group was solved for 9 steps"


def test_a_step_takes_the_rate_times_the_share_of_its_groups_that_vary(tiny_policy):
    for schedule, factor in [("cosine", 0.5), ("constant", 1.0)]:
        trainer = trainer_for(tiny_policy, learning_rate=1e-3, schedule=schedule)
        report = trainer.step()
        assert report.metrics["groups/class/varied"] / trainer.prompts == 0.5
        assert report.metrics["learning_rate"] == pytest.approx(1e-3 / 6 * factor)


@pytest.mark.parametrize("mixed, level", [(True, None), (False, 1)])
def test_every_group_of_a_mixed_data_set_is_watched(tiny_policy, mixed, level):
    trainer = trainer_for(tiny_policy)
    trainer.stream.supply.mixed = mixed
    watched = []
    trainer.monitor.observe = lambda groups, level: watched.append(level) or []
    trainer.step()
    assert watched == [level]


@pytest.mark.parametrize("reached, falls, last", [(None, 30, 40), (12, 12, 22), (35, 30, 40)])
def test_the_rate_falls_to_zero_from_the_goal_on_or_in_the_last_steps(
    tiny_policy, monkeypatch, reached, falls, last
):
    monkeypatch.setattr(trainer_module, "ANNEAL_STEPS", 10)
    trainer = trainer_for(tiny_policy, steps=40, schedule="cosine", learning_rate=1e-3)
    trainer.curriculum.anneal_from = reached
    rates = [round(trainer.learning_rate(step) / 1e-3, 4) for step in range(1, last + 1)]
    assert rates[:6] == [0.1667, 0.3333, 0.5, 0.6667, 0.8333, 1.0]
    assert rates[5 : falls + 1] == [1.0] * (falls - 4)
    assert rates[falls:] == sorted(rates[falls:], reverse=True) and rates[-1] < 0.05

    trainer.done = last - 1
    assert trainer.ended == ""
    trainer.done = last
    assert trainer.ended == ("the learning rate has fallen to zero" if last < 40 else "")

    constant = trainer_for(tiny_policy, steps=40, schedule="constant", learning_rate=1e-3)
    constant.curriculum.anneal_from = 12
    constant.done = 30
    assert constant.learning_rate(30) == 1e-3 and constant.ended == ""


def test_skipped_groups_change_nothing_by_one_bit(tiny_model):
    """Gradient, denominator and KL are those of a step without these groups."""
    with_them, without = (
        trainer_for(load_policy(str(tiny_model), device="cpu", keep_reference=True), beta=0.1)
        for _ in range(2)
    )
    a = with_them.step()
    without.rollout = lambda *_: [copy.deepcopy(each) for each in a.groups if each.index % 2 == 0]
    b = without.step()
    assert [each.metrics["groups/skipped"] for each in (a, b)] == [2, 0]
    for name in ("loss", "grad_norm", "kl"):
        assert a.metrics[name] == b.metrics[name] and a.metrics["grad_norm"] > 0
    for one, other in zip(weights(with_them.policy), weights(without.policy), strict=True):
        assert torch.equal(one, other)


def test_kept_groups_stay_in_the_denominator(tiny_model):
    """dr_grpo weighs every token by 1 / (rows * budget): kept groups double the rows."""
    norms = []
    for way in ("keep", "skip"):
        policy = load_policy(str(tiny_model), device="cpu")
        trainer = trainer_for(policy, on_degenerate=way, loss="dr_grpo")
        trainer.update_settings = replace(trainer.update_settings, max_grad_norm=0.0)
        norms.append(trainer.step().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1] / 2, rel=1e-5)


def test_shuffled_rewards_are_permuted_over_the_batch_and_the_scores_stay_true(tiny_policy):
    def rollout(control):
        trainer = trainer_for(tiny_policy, control=control)
        groups = trainer.rollout(1, trainer.problems(1))
        return sorted(groups, key=lambda group: group.index)

    true, paid = rollout("none"), rollout("shuffled-rewards")
    assert [g.rewards for g in paid] == [g.rewards for g in rollout("shuffled-rewards")]
    values = [[score.value for score in group.scores] for group in paid]
    assert values == [group.rewards for group in true] != [group.rewards for group in paid]
    assert sorted(sum(values, [])) == sorted(reward for group in paid for reward in group.rewards)
    # over the batch, not within groups
    assert any(sorted(a.rewards) != sorted(b.rewards) for a, b in zip(true, paid))


@pytest.mark.parametrize(
    "varied_share, options, drawn",
    [
        (1.0, {}, [(0, 2), (2, 2)]),  # two are expected to vary, and one does
        (0.5, {}, [(0, 4)]),
        (0.0, {}, [(0, 8)]),  # the most that a step may take
        (1.0, {"on_degenerate": "keep"}, [(0, 2), (2, 2)]),  # kept without variance: not counted
        (0.0, {"dynamic_sampling": 0}, [(0, 2)]),
    ],
)
def test_dynamic_sampling_draws_at_once_what_the_last_step_needed(
    tiny_policy, varied_share, options, drawn
):
    """One of each two prompts varies. What a step draws at once is noted as (first, count)."""
    trainer = trainer_for(tiny_policy, prompts=2, **{"dynamic_sampling": 2} | options)
    trainer.restore(trainer.state() | {"varied_share": varied_share})
    noted, rollout = [], trainer.rollout
    trainer.rollout = lambda step, problems: (
        noted.append((problems[0][0], len(problems))) or rollout(step, problems)
    )
    trainer.step()
    assert noted == drawn


def test_windows_are_the_default_where_answers_may_be_shown():
    def window(**options):
        return resolve_config(Config(**{"model": "m", "level": 100} | options), Interleave()).window

    assert (window(), window(level=25), window(window=7)) == (50, 0, 7)
    assert window(level=None, curriculum="10,26") == 50
    assert window(model="builtin") == window(reward_alone=True) == window(window=0) == 0
    assert window(control="shuffled-rewards") == 0
    assert resolve_config(Config(model="m"), Arithmetic()).window == 0


def test_groups_begin_within_long_answers(tiny_policy):
    def trainer(**options):
        settings = {"task": "interleave", "level": 10, "window": 4, "steps": 4, "group_size": 2}
        settings |= {"learning_rate": 1e-3, "prompts": 32, "dynamic_sampling": 0}
        config = Config(**settings | options)
        return Trainer(config, Supply(Interleave(), seed=0), tiny_policy)

    problems = trainer().problems(1)
    assert problems == trainer().problems(1) != trainer(seed=1).problems(1)
    shown = [len(problem.begun.split()) for _, problem in problems]
    assert min(shown) == 0 and max(shown) == 16 and len(set(shown)) > 6
    assert {len(problem.target.split()) for _, problem in problems} == {4}

    metrics = (one := trainer()).step().metrics
    assert metrics["groups/windows"] == sum(n > 0 for n in shown)
    assert figures_of([metrics])["windows"] == metrics["groups/windows"] / 32
    assert {group.problem.key for group in one.current} == {problem.key for _, problem in problems}
    assert metrics["completions/mean_length"] < max(len(p.target) for _, p in problems)
    # What the warm start imitates, and what the pre-flight samples, are such windows, too.
    answers = draw_answers(one.stream, 10, 8)
    assert {len(answer.completions[0].text.split()) for answer in answers} == {4}
    assert all(answer.scores[0].exact for answer in answers)
    _, surveyed = survey(tiny_policy, one.stream.supply, one.config, [10])
    lengths = {group.problem.level: len(group.problem.target.split()) for group in surveyed}
    assert (lengths[1], lengths[2], lengths[3], lengths[10]) == (2, 4, 4, 4)

    expected = [group.problem.expected for group in one.current]
    assert metrics["windows/expected"] == pytest.approx(fmean(expected)) and 0 < min(expected)

    trainer(level=2).check_fit()  # answers that are no longer than a window are whole
    assert all(not problem.begun for _, problem in trainer(level=2).problems(1))

    with pytest.raises(UserError, match="window: task forced has no windows"):
        trainer_for(tiny_policy, window=4).check_fit()
    with pytest.raises(UserError, match="window 4: the beginnings of answers are not shown"):
        Config(window=4, reward_alone=True)


@pytest.mark.parametrize("method", ["draft", "is_enough", "window", "unended", "credits"])
def test_what_an_optional_method_raises_is_one_line(tiny_policy, method):
    def broken(*_):
        raise KeyError("gone")

    task = Interleave()
    setattr(task, method, broken)
    options = {"credit": "alignment", "on_degenerate": "keep"} if method == "credits" else {}
    options |= {"level": 4, "window": 4, "steps": 1, "prompts": 2, "group_size": 2}
    config = Config(task="interleave", **options)
    trainer = Trainer(config, Supply(task, seed=0), tiny_policy)
    with pytest.raises(
        TaskError, match=rf"^task interleave: {method}\(\) raised KeyError: 'gone' "
    ):
        trainer.step()

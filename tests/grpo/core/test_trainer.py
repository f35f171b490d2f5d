"""The trainer: one step, from the problems to the update, and its state."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from forced import Forced, trainer_for, weights

from grpo import trainer as trainer_module
from grpo.learn.loss import LOSSES
from grpo.model.load import load_policy
from grpo.records import Group
from grpo.rollout.budget import budget_for
from grpo.run.conclusion import supply_line
from grpo.trainer import step_summary
from tasks.base import Problem
from tasks.supply import Supply


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
    trainer = trainer_for(tiny_policy, epochs=2)
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


def test_the_factor_on_the_loss_is_the_last_updates(tiny_policy, monkeypatch):
    factors = iter([64.0, 32.0])

    def watched(*args, **options):
        return plain_update(*args, **options) | {"loss_scale": next(factors)}

    plain_update = trainer_module.update
    monkeypatch.setattr(trainer_module, "update", watched)
    assert trainer_for(tiny_policy, epochs=2).step().metrics["loss_scale"] == 32


def test_parity_is_measured_before_the_weights_change(tiny_policy):
    metrics = trainer_for(tiny_policy, epochs=2).step().metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


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

    (warning,) = trainer.stream.take_warnings()  # of the first alone, and never again
    assert warning.startswith("problem 1 is left out of training, as is every problem whose ")
    trainer.stream.at(5, 1)
    assert trainer.stream.take_warnings() == []


def test_a_prompt_that_leaves_little_room_is_named_once(tiny_policy):
    trainer = trainer_for(tiny_policy, prompts=2, max_new_tokens=24)
    problems = [Problem("forced", 1, "p" if i < 2 else "p p p", "", str(i)) for i in range(4)]
    trainer.stream.supply.at = lambda index, level: problems[index]
    trainer.task.drawn = {problem.key: 0 for problem in problems}
    tiny_policy.context = len(tiny_policy.encode(problems[0])) + 12

    trainer.step()
    assert trainer.stream.take_warnings() == []  # half of the budget is enough
    report = trainer.step()
    (warning,) = trainer.stream.take_warnings()
    assert warning.startswith("problem 2: its prompt takes ")
    longest = max(len(each.tokens) for group in report.groups for each in group.completions)
    assert longest == tiny_policy.context - len(tiny_policy.encode(problems[2]))
    assert f"leaves a completion {longest} instead of 24" in warning


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


def test_the_curriculum_sees_first_tries_and_tokens_are_those_of_all(tiny_policy):
    report = trainer_for(tiny_policy, stuck=1, on_degenerate="resample").step()
    outcome = step_summary(1, report.groups)
    assert outcome.values == {1: pytest.approx([0.15, 0.5, 0.15, 0.5])}
    assert outcome.collapsed == {1: [False, True, False, True]}
    first = sum(group.tokens for group in report.groups if not group.attempt)
    assert report.metrics["num_tokens"] == sum(group.tokens for group in report.groups) > first


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


def test_the_share_of_a_family_is_that_of_its_level(tiny_policy, tmp_path):
    """Three problems of level 1, one of them twice, and then one of two that exist at level 2."""
    trainer = trainer_for(tiny_policy)
    stream = trainer.stream
    stream.supply.family_size = {1: 10, 2: 2}.get
    easy = [Problem("forced", 1, "p", "x", key) for key in ("a", "b", "c", "b")]
    stream.mark_seen(list(enumerate(easy)))
    other = trainer_for(tiny_policy)
    other.restore(json.loads(json.dumps(trainer.state())))
    assert other.stream.trained == {1: 3}

    hard = Group(4, Problem("forced", 2, "p", "x", "d"), (1,), 1.0, [])
    assert stream.metrics([hard], 2) == {
        "problems/seen": 4,
        "problems/repeated": 0.0,
        "problems/family_share": 1 / 2,
    }
    stream.mark_seen([(4, hard.problem)])
    line = supply_line(tmp_path, trainer, 2)
    assert line == "trained on 4 unique problems in 0 draws, 50.0% of the 2 that exist at level 2"


def test_repeated_problems_are_counted(tiny_policy):
    problems = [Problem("forced", 1, "p", "x", str(i)) for i in range(6)]
    trainer = trainer_for(tiny_policy)
    trainer.stream.supply = Supply(trainer.task, seed=0, dataset=problems)
    trainer.task.drawn = {problem.key: 0 for problem in problems}
    first, second = (trainer.step().metrics for _ in range(2))
    assert (first["problems/seen"], first["problems/repeated"]) == (4, 0)
    assert (second["problems/seen"], second["problems/repeated"]) == (6, 0.5)


def test_the_decoder_is_freed_if_there_is_one(tiny_policy):
    freed = []
    assert not tiny_policy.free_decoder()
    tiny_policy.decoder.step = SimpleNamespace(free=lambda: freed.append(1))
    assert tiny_policy.free_decoder() and freed == [1]

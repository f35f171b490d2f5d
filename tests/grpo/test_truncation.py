"""Truncated completions: the soft penalty by hand, and what the loss leaves out."""

from dataclasses import replace

import pytest
import torch
from forced import trainer_for, weights
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.learn.batch import BatchSettings, micro_batches
from grpo.learn.loss import LOSSES
from grpo.model.load import load_policy
from grpo.records import Completion, Group
from grpo.training.truncation import PENALTY, add_soft_penalty, soft_penalty
from grpo.verdict import HeldOut, reach_verdict
from tasks.base import Problem, Score

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (16384, 0.0),  # the paper's lengths: L_max = 20480, L_cache = 4096
        (17408, -0.25),  # (16384 - 17408) / 4096
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
    ],
)
def test_the_penalty_is_equation_13(length, penalty):
    assert soft_penalty(length, budget=20480, tokens=4096) == penalty
    assert soft_penalty(length, budget=20480) == penalty  # a fifth of the budget


@given(st.integers(1, 300), st.one_of(st.none(), st.integers(1, 400)))
def test_the_penalty_falls_in_even_steps_from_0_to_minus_1(budget, tokens):
    penalties = [soft_penalty(n, budget=budget, tokens=tokens) for n in range(budget + 3)]
    rises = min(budget, tokens or max(1, round(budget / 5)))
    assert penalties[: budget - rises + 1] == [0.0] * (budget - rises + 1)
    assert penalties[budget:] == [-1.0] * 3
    steps = [a - b for a, b in zip(penalties, penalties[1:])][budget - rises : budget]
    assert steps == pytest.approx([1 / rises] * rises)


def group_of(index, rows, prompt=(1, 2)):
    """A group of rows (length, is truncated), whose numbers tell where they come from."""
    completions = [
        Completion(
            tuple(100 * index + 10 * i + t for t in range(length)),
            tuple(-0.1 * (i + t) for t in range(length)),
            "",
            "length" if is_truncated else "stop",
        )
        for i, (length, is_truncated) in enumerate(rows)
    ]
    scores = [Score(0.1 * i, {"trap": None}, value=0.5) for i in range(len(rows))]
    advantages = [float(index + i) for i in range(len(rows))]
    problem = Problem("t", 1, "p", "x", str(index))
    return Group(index, problem, prompt, 1.0, completions, scores=scores, advantages=advantages)


def test_the_penalty_lowers_rewards_and_is_kept_beside_them():
    group = group_of(1, [(5, False), (9, False), (10, True)])
    add_soft_penalty([group], lambda group: 10, 4)
    assert group.rewards == pytest.approx([0.0, 0.1 - 0.75, 0.2 - 1.0])
    assert [score.parts[PENALTY] for score in group.scores] == [0.0, -0.75, -1.0]
    assert {score.value for score in group.scores} == {0.5}
    assert all("trap" in score.parts for score in group.scores)


def batches(groups, kind="dapo", micro_tokens=0, masks_truncated=False, **ranks):
    settings = BatchSettings(kind, 9, micro_tokens, masks_truncated)
    return list(micro_batches(groups, settings, device=CPU, **ranks))


def test_masked_completions_by_hand():
    groups = [group_of(1, [(2, False), (5, True), (3, False)]), group_of(2, [(4, True)] * 3)]
    (batch,) = batches(groups, masks_truncated=True)
    assert batch.prompts == [(1, 2)] and batch.row_ids == [(1, 0), (1, 2)]
    assert batch.tokens_RT.tolist() == [[100, 101, 0], [120, 121, 122]]
    assert batch.advantages.tolist() == [1.0, 3.0]  # of the group, truncated ones included
    assert batch.weights_R.tolist() == [1 / 5] * 2  # 2 + 3 tokens
    assert len(batches(groups)[0].row_ids) == 6  # the default leaves out nothing
    assert batches(groups[1:], masks_truncated=True) == []


ROWS = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=3, max_size=3)


@given(
    st.lists(ROWS, min_size=1, max_size=4),
    st.sampled_from(LOSSES),
    st.sampled_from([0, 5, 12]),
    st.integers(1, 2),
)
@example([[(1, True)] * 3], "dr_grpo", 0, 1)  # nothing is left
def test_a_step_with_masked_completions_is_the_step_without_them(lists, kind, micro_tokens, ranks):
    groups = [group_of(number, rows) for number, rows in enumerate(lists, start=1)]
    without = []
    for group in groups:
        kept = [i for i, each in enumerate(group.completions) if not each.is_truncated]
        if kept:
            completions = [group.completions[i] for i in kept]
            advantages = [group.advantages[i] for i in kept]
            without.append(replace(group, completions=completions, advantages=advantages))

    def rows_of(groups, **more):
        return sorted(
            (tokens, float(batch.advantages[row]), float(batch.weights_R[row]))
            for rank in range(ranks)
            for batch in batches(groups, kind, micro_tokens, rank=rank, ranks=ranks, **more)
            for row, tokens in enumerate(batch.completions)
        )

    assert rows_of(groups, masks_truncated=True) == (rows_of(without) if without else [])


def cut_off(trainer, is_cut):
    """Let the sampler mark the completions of which `is_cut(sample)` is true as truncated."""
    sample = trainer.sampler.sample

    def marked(*arguments):
        groups = sample(*arguments)
        for group in groups:
            group.completions = [
                replace(each, finish="length" if is_cut(i) else "stop")
                for i, each in enumerate(group.completions)
            ]
        return groups

    trainer.sampler.sample = marked
    return trainer


def test_masked_completions_count_in_the_groups_mean_and_not_in_the_update(tiny_model):
    """The weights after the step are those of an update by the other completions, whose advantages
    are still those of the whole group.
    """
    policies = [load_policy(str(tiny_model), device="cpu") for _ in range(2)]
    masking = cut_off(trainer_for(policies[0], truncated="mask", scale="none"), lambda i: i >= 2)
    report = masking.step()
    kept = [group for group in report.groups if group.action == "keep"]
    assert kept[0].advantages == pytest.approx([-0.15, -0.05, 0.05, 0.15])
    assert report.metrics["completions/masked_ratio"] == 0.5

    other = trainer_for(policies[1], scale="none")
    without = [
        replace(
            group,
            completions=group.completions[:2],
            scores=group.scores[:2],
            advantages=group.advantages[:2],
        )
        for group in kept
    ]
    metrics = other.update_policy(without, other.learning_rate(1))
    assert metrics["loss"] == report.metrics["loss"] and metrics["grad_norm"] > 0
    assert all(
        torch.equal(a, b) for a, b in zip(weights(policies[0]), weights(policies[1]), strict=True)
    )


@pytest.mark.parametrize("on_degenerate, kept", [("skip", 0), ("keep", 4)])
def test_a_step_of_truncated_completions_alone_leaves_the_weights(tiny_policy, on_degenerate, kept):
    before = weights(tiny_policy)
    options = dict(truncated="mask", on_degenerate=on_degenerate, patience=2)
    trainer = cut_off(trainer_for(tiny_policy, **options), lambda i: True)
    reports = [trainer.step(), trainer.step()]
    for report in reports:
        assert "loss" not in report.metrics and report.metrics["groups/kept"] == kept
        assert report.metrics["groups/class/masked"] == report.metrics["groups/class/tied"] == 2
        assert report.metrics.get("completions/masked_ratio", 1.0) == 1.0  # of the groups kept
    assert all(torch.equal(a, b) for a, b in zip(before, weights(tiny_policy), strict=True))

    # The early stop and the verdict agree that nothing was learned.
    assert "no group could be trained on for 2 steps" in reports[1].metrics["stopped"]
    metrics = [report.metrics for report in reports]
    verdict = reach_verdict(1, HeldOut(), metrics, was_solved=False)
    assert (verdict.updated, verdict.steps) == (0, 2)


def test_dynamic_sampling_draws_on_for_groups_that_are_masked(tiny_policy):
    """Without truncation problems 0, 2, 4 and 6 would be trained on; those of 0 and 4 are cut."""
    options = dict(truncated="mask", prompts=2, dynamic_sampling=2)
    trainer = trainer_for(tiny_policy, **options)
    sample = trainer.sampler.sample

    def cut(*arguments):
        groups = sample(*arguments)
        for group in groups:
            finish = "length" if group.index % 4 == 0 else "stop"
            group.completions = [replace(each, finish=finish) for each in group.completions]
        return groups

    trainer.sampler.sample = cut
    report = trainer.step()
    actions = {group.index: (group.class_name, group.action) for group in report.groups}
    assert [actions[index] for index in (0, 2, 4, 6)] == [
        ("masked", "skip"),
        ("varied", "keep"),
    ] * 2
    assert len(actions) == 8 and report.metrics["groups/kept"] == 2
    untaught = sum(group.tokens for group in report.groups if group.index % 4 != 2)
    assert report.metrics["wasted_tokens"] == untaught
    assert report.metrics["completions/masked_ratio"] == 0.0 and "loss" in report.metrics


def test_the_soft_penalty_of_a_run(tiny_policy):
    trainer = trainer_for(tiny_policy, truncated="soft-penalty", soft_penalty_tokens=20)
    report = trainer.step()
    plain = trainer_for(tiny_policy).step()
    assert "reward/length_penalty" not in plain.metrics
    penalties = []
    for group in report.groups:
        for score, completion in zip(group.scores, group.completions, strict=True):
            penalty = soft_penalty(len(completion.tokens), budget=24, tokens=20)
            assert score.parts[PENALTY] == penalty
            penalties.append(penalty)
    mean = sum(penalties) / len(penalties)
    assert report.metrics["reward/length_penalty"] == pytest.approx(mean) and mean < 0
    assert report.metrics["reward"] < report.metrics["value"]


def test_the_penalty_is_shuffled_with_the_rewards_of_a_control_experiment(tiny_policy):
    """It would be information otherwise."""
    options = dict(truncated="soft-penalty", control="constant-reward", on_degenerate="keep")
    report = trainer_for(tiny_policy, **options).step()
    assert {reward for group in report.groups for reward in group.rewards} == {0.5}

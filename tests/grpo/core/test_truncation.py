"""Truncated completions: what they earn, and what the loss leaves out."""

from dataclasses import replace

import pytest
import torch
from forced import trainer_for, weights
from hypothesis import given
from hypothesis import strategies as st

from grpo.config import Config
from grpo.curriculum import survey
from grpo.ending import HeldOut, is_solved, reach_verdict
from grpo.evaluate import score_groups, summarise
from grpo.learn.batch import micro_batches
from grpo.model.load import load_policy
from grpo.model.prompts import text_of
from grpo.records import Completion, Group, truncated_share
from grpo.tools.table import repeated_figures
from grpo.trainer import Parts, StepTimer, Trainer
from tasks.base import SPLITS, Problem, Score
from tasks.interleave import Interleave, interleaved
from tasks.registry import explain
from tasks.rows import Rows
from tasks.scoring import CUT_OFF, scores_of
from tasks.supply import Supply

CPU = torch.device("cpu")


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


def batches(groups, kind="dapo", micro_tokens=0, masks_truncated=False, **ranks):
    cut = {"micro_tokens": micro_tokens, "masks_truncated": masks_truncated}
    return list(micro_batches(groups, kind, max_length=9, device=CPU, **cut, **ranks))


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


def cut_off(trainer, is_cut):
    """Let the sampler mark the completions of which `is_cut(sample)` is true as truncated."""
    sample = trainer.sample

    def marked(*arguments):
        groups = sample(*arguments)
        for group in groups:
            group.completions = [
                replace(each, finish="length" if is_cut(i) else "stop")
                for i, each in enumerate(group.completions)
            ]
        return groups

    trainer.sample = marked
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


# ---- an answer needs an end


def ended_and_cut(task, problem, texts):
    """The scores of `texts` as completions that ended, and as ones that the budget cut off."""
    found = []
    for finish in ("stop", "length"):
        made = [Completion((1,), (0.0,), text, finish) for text in texts]
        group = Group(0, problem, (1,), 1.0, made)
        score_groups(task, [group])
        found.append(group.scores)
    return found


WORDS = st.lists(st.sampled_from(["a", "b", "owl", "e\u0301", "1"]), min_size=1, max_size=8)
SPACES = st.text(" \n\t\u2003", max_size=4)


@given(WORDS, WORDS, WORDS, SPACES, st.sampled_from(Interleave.rewards))
def test_the_last_word_of_interleave_counts_once_the_answer_has_ended(a, b, other, space, reward):
    task = Interleave(reward, documents=[])
    problem = task.problem(a, b)
    right = problem.target.split()
    texts = [" ".join(words) + space for words in (right, [*right, "x"], right[:-1], other, [])]
    ended, cut = ended_and_cut(task, problem, texts)
    assert ended == scores_of(task, problem, texts) and ended[0].exact
    assert cut[1:3] == ended[1:3] and cut[4] == ended[4]
    assert not any(score.exact or score.value == 1 for score in cut)

    shorter = ended[2]
    assert cut[0].reward == shorter.reward < 1 and cut[0].value == shorter.value
    assert cut[0].parts["reason"] == CUT_OFF and cut[0].parts["trap"] is None
    if reward in ("prefix", "similarity"):
        assert cut[0].reward == pytest.approx((len(right) - 1) / len(right))
    assert explain("interleave", problem, texts[0], cut[0], reward).endswith(CUT_OFF)


@given(st.lists(st.floats(0, 1) | st.just(1.0), min_size=1, max_size=6))
def test_the_reward_of_a_users_function_stays_and_only_an_end_makes_it_exact(rewards):
    task = Rows([{"prompt": "p"}], reward_functions=[lambda completion: float(completion)])
    (problem,) = [each for split in SPLITS for each in task.problems(split)]
    ended, cut = ended_and_cut(task, problem, list(map(str, rewards)))
    assert [score.reward for score in cut] == [score.reward for score in ended] == rewards
    assert [score.value for score in cut] == [score.value for score in ended]
    assert not any(score.exact for score in cut)
    assert all(score.exact for score in ended if score.reward == 1)


def writes_newlines(policy, shares=lambda sample: True):
    """A `generate` that writes right answers; those of `shares` go on in newlines to the budget."""

    def generate(policy, request, *others):
        answers = []
        for prompt, keys, budget in zip(request.prompts, request.keys, request.budgets):
            a, b = [
                line[3:].split() for line in decoded(prompt).split("\n") if line[:2] in ("A:", "B:")
            ]
            right = policy.target_tokens(" ".join(interleaved(a, b)))
            rest = (newline,) * (budget - len(right))
            answers.append(
                [
                    made((*right, *rest), "length") if shares(i) else made((*right, end), "stop")
                    for i in range(len(keys))
                ]
            )
        return answers

    def decoded(prompt):
        return text_of(policy.tokenizer, prompt).replace("<|end|>", "\n")

    def made(tokens, finish):
        return Completion(tokens, (0.0,) * len(tokens), policy.decode(tokens), finish)

    (newline,), end = policy.target_tokens("\n")[-1:], policy.end
    return generate


SHORT = dict(task="interleave", level=3, ramp=False, prompts=2, group_size=4, steps=2)


@pytest.mark.parametrize("truncated", ["learn", "mask"])
def test_a_policy_that_writes_newlines_to_the_budget_solves_nothing(
    tiny_policy, monkeypatch, truncated
):
    monkeypatch.setattr("grpo.rollout.generate.generate", writes_newlines(tiny_policy))
    task = Interleave()
    config = Config(**SHORT, learning_rate=0.0, truncated=truncated, patience=2)
    trainer = Trainer(config, Parts(task), tiny_policy)
    report = trainer.step()
    assert truncated_share(report.groups) == 1 and report.metrics["exact"] == 0
    assert report.metrics["reward"] == pytest.approx(4 / 5)  # of 5 pairs the last is missing
    assert {group.class_name for group in report.groups} == {"identical"}
    assert trainer.end.solved_steps == 0 and not trainer.end.exhausted

    (*_, row), groups = survey(tiny_policy, Supply(task, seed=0), config, [3])
    assert row.exact == row.any_exact == 0 and not row.is_solved and not row.is_within_reach
    assert summarise(groups)["exact"] == 0
    assert repeated_figures(groups)["pass_at"][-1]["mean"] == 0
    line = {"mean": 0.98, "ci_low": 0.97, "truncated": 1.0}
    assert not is_solved(line) and is_solved(line | {"truncated": 0.0})


@pytest.mark.parametrize("reward", Interleave.rewards)
def test_credits_of_an_answer_that_is_cut_off_add_up_to_its_reward(
    tiny_policy, monkeypatch, reward
):
    cuts = writes_newlines(tiny_policy, shares=lambda sample: sample >= 2)
    monkeypatch.setattr("grpo.rollout.generate.generate", cuts)
    config = Config(**SHORT, learning_rate=0.0, credit="alignment", reward=reward)
    trainer = Trainer(config, Parts(Interleave(reward)), tiny_policy)
    groups = trainer.rollout(1, trainer.problems(1), StepTimer())
    by_group = trainer.compute_advantages(groups)
    for group, advantages in zip(groups, by_group, strict=True):
        assert group.class_name == "varied"
        ended, cut = group.scores[0], group.scores[2]
        constant = 0.0 if reward == "prefix" else 0.5  # the end of the text settles it
        for score in (ended, cut):
            assert sum(amount for _, amount in score.credits) + constant == pytest.approx(
                score.reward
            )
        assert ended.reward == 1 > cut.reward

        # The token that ends the answer is better than the newline in its place.
        last = len(group.completions[0].tokens) - 1
        assert advantages[0][last] > 0 > advantages[2][last]
        assert advantages[2][last + 1 :] == [0.0] * len(advantages[2][last + 1 :])

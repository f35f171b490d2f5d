"""Truncated completions: what they earn, because an answer needs an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.config import Config
from grpo.curriculum import is_within_reach, survey
from grpo.ending import solves_level
from grpo.evaluate import score_groups, summarise
from grpo.model.prompts import text_of
from grpo.records import Completion, Group, truncated_share
from grpo.tasks.base import CUT_OFF, SPLITS, scores_of
from grpo.tasks.interleave import Interleave, interleaved
from grpo.tasks.registry import explain
from grpo.tasks.rows import Rows
from grpo.tasks.supply import Supply
from grpo.tools.evaluate import figures_of
from grpo.trainer import Trainer


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
    task = Interleave(reward)
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


def test_an_answer_that_ends_where_a_window_does_is_not_right():
    """What comes behind a window belongs to the answer, too."""
    task = Interleave()
    whole = task.problem(list("abcd"), list("efgh"))
    for start, is_right in (0, False), (2, False), (4, True):
        part = task.window(whole, 4, start)
        (ended, _), (cut, _) = ended_and_cut(task, part, [part.target, "x"])
        assert ended.exact is is_right and not cut.exact
        assert (ended.reward == 1) is is_right


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


SHORT = dict(task="interleave", level=3, prompts=2, group_size=4, steps=2)


def test_a_policy_that_writes_newlines_to_the_budget_solves_nothing(tiny_policy, monkeypatch):
    monkeypatch.setattr("grpo.rollout.generate.generate", writes_newlines(tiny_policy))
    task = Interleave()
    config = Config(**SHORT, learning_rate=0.0, patience=2)
    trainer = Trainer(config, Supply(task, seed=0), tiny_policy)
    report = trainer.step()
    assert truncated_share(report.groups) == 1 and report.metrics["exact"] == 0
    assert report.metrics["reward"] == pytest.approx(4 / 5)  # of 5 pairs the last is missing
    assert {group.class_name for group in report.groups} == {"identical"}
    assert trainer.end.solved_steps == 0 and not trainer.ended

    (*_, row), groups = survey(tiny_policy, Supply(task, seed=0), config, [3])
    assert row["exact"] == row["any_exact"] == 0 and not is_within_reach(row)
    assert summarise(groups)["exact"] == 0
    assert figures_of(groups)["pass_at"][-1]["mean"] == 0
    line = {"mean": 0.98, "ci_low": 0.97, "n": 200, "truncated": 1.0}
    assert not solves_level(line) and solves_level(line | {"truncated": 0.0})


@pytest.mark.parametrize("reward", Interleave.rewards)
def test_credits_of_an_answer_that_is_cut_off_add_up_to_its_reward(
    tiny_policy, monkeypatch, reward
):
    cuts = writes_newlines(tiny_policy, shares=lambda sample: sample >= 2)
    monkeypatch.setattr("grpo.rollout.generate.generate", cuts)
    config = Config(**SHORT, learning_rate=0.0, credit="alignment", reward=reward)
    trainer = Trainer(config, Supply(Interleave(reward), seed=0), tiny_policy)
    groups = trainer.rollout(1, trainer.problems(1))
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

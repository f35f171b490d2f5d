"""The trainer: control experiments, and runs that end early."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from forced import Forced, trainer_for, weights

from grpo.trainer import StepTimer
from tasks.base import Score


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
def test_groups_are_judged_on_the_scale_of_the_task(all_end, tiny_policy, odd, class_name):
    trainer = trainer_for(tiny_policy, odd=odd, kind=Penalised)
    judged = Counter(group.class_name for group in trainer.step().groups)
    assert judged == {"varied": 2, class_name: 2}


def test_a_constant_reward_lies_in_the_middle_of_the_range(tiny_policy):
    trainer = trainer_for(tiny_policy, kind=Penalised, control="constant-reward")
    assert trainer.step().metrics["reward"] == -0.5


def test_a_real_run_is_not_marked(tiny_policy):
    assert "control" not in trainer_for(tiny_policy).step().metrics


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


def test_a_control_run_stops_when_nothing_varies(tiny_policy):
    trainer = trainer_for(tiny_policy, patience=4, control="constant-reward")
    trainer.task.score = lambda problem, texts: [Score(0.9) for _ in texts]
    for _ in range(3):
        trainer.step()
        assert not trainer.ended
    trainer.step()
    assert "no group could be trained on for 4 steps" in trainer.stopped


@pytest.mark.parametrize("options", [{"patience": 0}, {"control": "shuffled-rewards"}])
def test_a_run_that_never_stops_and_a_control_run_never_count_as_solved(
    all_end, tiny_policy, options
):
    trainer = trainer_for(tiny_policy, **{"patience": 20, "prompts": 1} | options)
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    for _ in range(10):
        trainer.step()
    assert trainer.early_stop.solved_steps == 1 and not trainer.seems_solved


def test_solved_steps_at_the_last_level_call_for_a_held_out_check(all_end, tiny_policy):
    trainer = trainer_for(tiny_policy, patience=20, prompts=1, promote_every=2)
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    asked = []
    for _ in range(14):
        trainer.step()
        asked.append(trainer.seems_solved)
    # after ten solved steps, then every promote_every steps while it lasts
    assert asked == [False] * 9 + [True, False, True, False, True]
    trainer.curriculum.levels.append(2)
    assert not trainer.seems_solved


def test_a_promotion_does_not_make_the_next_level_seem_solved(all_end, tiny_policy):
    trainer = trainer_for(tiny_policy, patience=20, prompts=1)
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    for _ in range(10):
        trainer.step()
    assert trainer.seems_solved
    trainer.curriculum.levels.append(2)
    trainer.curriculum.position = 1
    assert not trainer.seems_solved  # no step of level 2 has been made


class Impossible(Forced):
    """Level 1 is solved, level 2 earns nothing."""

    def score(self, problem, completions):
        return [Score(float(problem.level == 1)) for _ in completions]


@pytest.mark.parametrize("moves_back", [False, True])
def test_patience_counts_steps_without_an_update_at_every_level(tiny_policy, moves_back):
    trainer = trainer_for(tiny_policy, kind=Impossible, patience=5, prompts=4, curriculum="1,2")
    trainer.curriculum.move_on(0, "")
    if moves_back:  # at every step
        trainer.curriculum.observe = lambda summary: [
            trainer.curriculum._move(1 if trainer.curriculum.level == 1 else -1, 0, "", "")
        ]
    steps = 0
    while not trainer.ended:
        trainer.step()
        steps += 1
    assert steps == 5 and "no group could be trained on for 5 steps" in trainer.stopped
    said = "level 2 was not learned after level 1: "
    assert trainer.stopped.startswith(said) == (trainer.curriculum.level == 2)


def test_a_run_goes_on_after_solved_steps_of_a_level_that_is_not_the_last(all_end, tiny_policy):
    trainer = trainer_for(tiny_policy, patience=3, prompts=1, curriculum="1,2")
    trainer.task.score = lambda problem, texts: [Score(1.0) for _ in texts]
    reports = [trainer.step() for _ in range(3)]
    assert [decision.line for report in reports for decision in report.decisions] == [
        "step 3: level 1 → 2, every training group was solved for 3 steps"
    ]
    assert trainer.early_stop.exhausted and not trainer.ended  # no step of level 2 has been made
    trainer.step()
    assert not trainer.early_stop.exhausted and not trainer.ended
    for _ in range(2):
        trainer.step()
    assert trainer.ended == "every training group was solved for 3 steps"


@pytest.mark.parametrize("mixed, level", [(True, None), (False, 1)])
def test_every_group_of_a_mixed_data_set_is_watched(tiny_policy, mixed, level):
    trainer = trainer_for(tiny_policy, mixed=mixed)
    watched = []
    trainer.monitor.observe = lambda groups, level: watched.append(level) or []
    trainer.step()
    assert watched == [level]

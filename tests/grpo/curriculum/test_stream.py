"""The stream of training problems."""

import json

import pytest
from forced import trainer_for

from grpo.config import Config
from grpo.curriculum import ProblemStream
from grpo.tasks.base import Problem, Score
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply


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

    (event,) = [event for report in reports for event in report.events]  # of the first alone
    assert event.startswith("problem 1 is left out of training, as is every problem whose ")


@pytest.mark.parametrize("levels, value, count", [([1, 2], 0.89, 1), ([1, 2], 0.9, 0), ([1], 0, 0)])
def test_a_ladder_that_right_answers_cannot_climb_is_warned_of(
    tiny_policy, monkeypatch, levels, value, count
):
    monkeypatch.setattr(tiny_policy, "notes", [])
    task = load_task("arithmetic")
    task.score = lambda problem, texts: [Score(value) for _ in texts]
    stream = ProblemStream(Config(), tiny_policy, Supply(task, seed=0))
    stream.check(levels)
    assert sum("opens at a mean of 0.9: unless" in line for line in tiny_policy.notes) == count


def test_the_share_of_a_family_is_that_of_its_level(tiny_policy):
    """Three problems of level 1, one of them twice, and then one of two that exist at level 2."""
    trainer = trainer_for(tiny_policy)
    stream = trainer.stream
    stream.supply.family_size = {1: 10, 2: 2}.get
    easy = [Problem("forced", 1, "p", "x", key) for key in ("a", "b", "c", "b")]
    stream.mark_seen(list(enumerate(easy)))
    other = trainer_for(tiny_policy)
    other.restore(json.loads(json.dumps(trainer.state())))
    assert other.stream.trained == {1: 3}

    assert stream.mark_seen([(4, Problem("forced", 2, "p", "x", "d"))]) == 0.0
    assert stream.metrics(2) == {"problems/seen": 4, "problems/family_share": 1 / 2}


def test_repeated_problems_are_counted(tiny_policy):
    problems = [Problem("forced", 1, "p", "x", str(i)) for i in range(6)]
    trainer = trainer_for(tiny_policy)
    trainer.stream.supply = Supply(trainer.task, seed=0, dataset=problems)
    trainer.task.drawn = {problem.key: 0 for problem in problems}
    first, second = (trainer.step().metrics for _ in range(2))
    assert (first["problems/seen"], first["problems/repeated"]) == (4, 0)
    assert (second["problems/seen"], second["problems/repeated"]) == (6, 0.5)

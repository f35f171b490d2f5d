"""The levels of the prompts: where groups vary, and when a harder level opens; their problems."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from forced import trainer_for
from sample_groups import copy_of, group_of

from grpo.config import Config
from grpo.curriculum import (
    ANNEAL_AT,
    FLOOR,
    MEMORY,
    OPEN_AT,
    WINDOW,
    Curriculum,
    ProblemStream,
    easier_levels,
)
from grpo.statistics import problems_needed
from grpo.tasks.base import ABSTAINED, EXPECTED, Problem, Score
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply

MANY = 2 * problems_needed(OPEN_AT)  # groups that the running mean needs


def group(level, value=0.5, class_name="varied", action="keep"):
    facts = {"class_name": class_name, "action": action}
    return group_of("xx", [Score(value, value=value)] * 2, level=level, **facts)


def groups(level, count, value=0.5, **options):
    return [group(level, value, **options) for _ in range(count)]


def open_to(levels, level, **varied):
    curriculum = Curriculum(levels, level)
    curriculum.varied.update({int(name[1:]): share for name, share in varied.items()})
    return curriculum


# The draw.


@pytest.mark.parametrize(
    "varied, weights",
    [
        (dict(l1=0.5, l2=0.2, l3=0.9), {1: 0.5, 2: 0.2, 3: 0.9}),
        (dict(l1=0.0, l2=0.01, l3=0.9), {1: FLOOR, 2: FLOOR, 3: 0.9}),
        (dict(l1=0.5, l2=0.3, l3=0.0), {1: 0.5, 2: 0.3, 3: 0.4}),  # a third of 1.2
        (dict(l1=0.0, l2=0.0, l3=0.0), {1: FLOOR, 2: FLOOR, 3: FLOOR}),
    ],
)
def test_weights_by_hand(varied, weights):
    assert open_to([1, 2, 3, 5], 3, **varied).weights == pytest.approx(weights)


def test_levels_are_drawn_by_weight_and_the_first_is_the_hardest():
    curriculum = open_to([1, 2, 3, 5], 3, l1=0.1, l2=0.4, l3=0.5)
    drawn = Counter()
    for step in range(500):
        first, *others = curriculum.levels_for(3, step, 9)
        assert first == 3
        drawn.update(others)
    # Of 4,000 draws each share is within 0.04 with a probability above 1 - 1e-6 (5 deviations).
    shares = {level: count / drawn.total() for level, count in drawn.items()}
    assert shares == pytest.approx({1: 0.1, 2: 0.4, 3: 0.5}, abs=0.04)


def test_each_seed_step_and_batch_has_a_draw_of_its_own():
    curriculum = open_to([1, 2, 3], 3)
    keys = [(seed, step, 50, drawn) for seed in (0, 1) for step in (1, 2) for drawn in (0, 50)]
    draws = [curriculum.levels_for(*key) for key in keys]
    assert draws == [curriculum.levels_for(*key) for key in keys]
    # 49 draws of three levels agree by chance with a probability below 1e-22.
    assert len({tuple(levels[1:]) for levels in draws}) == len(keys)
    # Of later batches the first prompt is drawn, too: all of 20 at level 3 has chance 1e-9.
    assert {curriculum.levels_for(0, step, 1, 8)[0] for step in range(20)} != {3}


def test_shares_leave_out_copies_and_demonstrations_count_as_varied():
    curriculum = open_to([1, 2], 2)
    tied = group(1, 0.3, "tied", "skip")
    curriculum.observe(1, [tied, copy_of(group(1)), group(7)])
    # A level of the dataset alone is passed.
    assert curriculum.varied == {1: pytest.approx(1 - MEMORY), 2: 1.0}
    curriculum.observe(2, [group(1, 0.8, "tied", "demonstrate")])
    assert curriculum.varied[1] == pytest.approx(1 - MEMORY + MEMORY**2)


def test_the_first_draw_goes_by_the_shares_of_a_survey():
    curriculum = Curriculum([1, 5, 10], 10, {1: 0.25, 10: 0.5, 99: 1.0})
    assert curriculum.varied == {1: 0.25, 5: 1.0, 10: 0.5}
    assert curriculum.weights == {1: 0.25, 5: 1.0, 10: pytest.approx(1.25 / 2)}


# Opening.


def through(curriculum, steps):
    """Lead the curriculum through lists of groups; return its decisions."""
    return [each for step, one in enumerate(steps, 1) for each in curriculum.observe(step, one)]


def test_a_level_opens_at_the_mark_with_evidence():
    curriculum = Curriculum([10, 25, 50])
    few = [groups(10, 4, OPEN_AT + 0.02)] * WINDOW
    assert through(curriculum, few) == []  # the interval of 12 groups is too wide
    enough = [groups(10, MANY, OPEN_AT + 0.02), []]
    (opened,) = through(curriculum, enough)
    assert (opened.kind, opened.before, opened.after) == ("open", 10, 25)
    assert f"of {8 + MANY} groups in 3 steps" in opened.why  # the first step has left
    assert curriculum.level == 25 and not curriculum.is_last
    # The window starts over, and groups of easier levels do not count.
    assert through(curriculum, [groups(10, MANY, 1.0)] * 5) == []
    assert through(curriculum, [groups(25, MANY, OPEN_AT - 0.01)] * 5) == []


def test_a_window_counts_as_what_the_whole_answer_is_expected_to_score():
    def windows(level, value):
        return [
            replace(each, problem=replace(each.problem, data={EXPECTED: value}))
            for each in groups(level, MANY, 1.0, class_name="solved")
        ]

    curriculum = Curriculum([10, 25])
    steps = [windows(10, OPEN_AT - 0.01)] * 5 + [windows(10, OPEN_AT + 0.02)] * 3
    steps += [windows(25, ANNEAL_AT - 0.01)] * 5 + [windows(25, ANNEAL_AT + 0.02)] * 3
    opened, fallen = through(curriculum, steps)
    assert (opened.kind, fallen.kind) == ("open", "anneal")
    assert 5 < opened.step <= 8 and 13 < fallen.step


def test_steps_that_the_interval_does_not_need_leave_the_window():
    curriculum = Curriculum([10, 25])
    assert through(curriculum, [groups(10, MANY, 0.0)] + [groups(10, MANY, 1.0)] * 2) == []
    assert through(curriculum, [groups(10, MANY, 1.0)])[0].kind == "open"


def test_what_the_reward_did_not_judge_opens_no_level():
    def partly(judged, unjudged, value):
        scores = [Score(value)] * judged + [Score(1.0, {"reason": ABSTAINED})] * unjudged
        return [replace(group(10), scores=scores)] * MANY

    assert through(Curriculum([10, 25]), [partly(1, 15, 1.0)] * WINDOW) == []
    assert through(Curriculum([10, 25]), [partly(8, 8, 0.85)] * WINDOW) == []
    assert through(Curriculum([10, 25]), [partly(8, 8, 1.0) + partly(0, 16, 0.0)] * WINDOW)


def test_few_prompts_do_not_open_a_level_by_luck():
    # The true mean is 0.85. By the mean of three steps alone nearly all of the runs would open.
    opened = 0
    for seed in range(100):
        curriculum, rng = Curriculum([10, 25]), random.Random(seed)
        steps = [[group(10, rng.betavariate(5.1, 0.9)) for _ in range(2)] for _ in range(100)]
        opened += bool(through(curriculum, steps))
    assert opened <= 5


def test_a_solved_group_counts_as_one_whatever_its_score():
    for class_name, count in (("solved", 1), ("tied", 0)):
        curriculum = Curriculum([10, 25])
        steps = [groups(10, MANY, 0.7, class_name=class_name)] * WINDOW
        assert len(through(curriculum, steps)) == count


def simulate(shares, steps=60):
    """Train a policy of which a share of the groups varies at each level; return the varied
    groups of each step."""
    curriculum, rng, taught = Curriculum(sorted(shares), max(shares)), random.Random(1), []
    for step in range(1, steps + 1):
        sampled = [
            group(level, class_name="varied" if rng.random() < shares[level] else "tied")
            for level in curriculum.levels_for(0, step, 16)
        ]
        curriculum.observe(step, sampled)
        taught.append(sum(one.class_name == "varied" for one in sampled))
    return taught


@pytest.mark.parametrize(
    "shares, least",
    [
        ({1: 0.0, 2: 0.0, 3: 0.0, 5: 0.9}, 12),  # easier levels are solved
        ({1: 0.0, 2: 0.9, 3: 0.0, 5: 0.0}, 6),  # all but a third of the prompts can vary
    ],
)
def test_no_run_stays_where_nothing_varies(shares, least):
    taught = simulate(shares)
    assert min(taught[25:]) > 0
    assert sum(taught[25:]) / len(taught[25:]) > least


# The goal, and the learning rate.


def test_the_learning_rate_falls_from_the_step_at_which_the_goal_is_reached():
    curriculum = Curriculum([10, 25], 25)
    middle = (OPEN_AT + ANNEAL_AT) / 2
    assert through(curriculum, [groups(25, MANY, middle)] * WINDOW) == []
    assert curriculum.anneal_from is None
    steps = [groups(25, MANY, 1.0)] * 6
    (decision,) = through(curriculum, steps)  # once
    assert (decision.kind, decision.before, decision.after) == ("anneal", 25, 25)
    assert decision.why.endswith("the learning rate falls from now on")
    assert curriculum.anneal_from == decision.step

    # Before the last level is open, no score lets it fall.
    assert [each.kind for each in through(Curriculum([10, 25]), [groups(10, MANY, 1.0)] * 3)] == [
        "open"
    ]


# The state.


def test_a_resumed_curriculum_makes_the_same_decisions():
    rng = random.Random(5)
    steps = [
        [group(rng.choice([5, 10, 25]), min(1.0, 0.75 + step / 90)) for _ in range(16)]
        for step in range(60)
    ]
    whole = Curriculum([5, 10, 25])
    through(whole, steps[:20])
    resumed = Curriculum([10])  # a pre-flight has added a level
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    decisions = through(whole, steps[20:])
    assert decisions == through(resumed, steps[20:]) and decisions
    assert whole.state_dict() == resumed.state_dict()
    assert whole.levels_for(0, 61, 40) == resumed.levels_for(0, 61, 40)


def test_a_level_that_is_solved_is_not_easier_but_done():
    surveyed = {"kind": "preflight", "figures": {"levels": [{"level": 5, "exact": 0.9}]}}
    opened = {"kind": "open", "from": 10, "figures": {}}
    offered = [5, 10, 25]
    assert easier_levels(offered, 25, []) == (5, 10)
    assert easier_levels(offered, 25, [surveyed]) == (10,)
    assert easier_levels(offered, 25, [surveyed, opened]) == ()
    assert easier_levels(offered, 25, [surveyed, opened], has_half_way=True) == (17,)
    assert easier_levels(offered, 5, [], has_half_way=True) == ()  # it never left the first


# The stream of problems.


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

    resumed = trainer_for(tiny_policy, prompts=2)
    resumed.restore(json.loads(json.dumps(trainer.state())))
    resumed.stream.supply = trainer.stream.supply
    assert resumed.stream.take(5, [1])[0][0] == 6 and resumed.stream.take_events() == []


def test_a_step_draws_each_problem_once(tiny_policy):
    trainer = trainer_for(tiny_policy, prompts=4)
    drawn, make = [], trainer.stream.supply.at

    def at(index, level):
        drawn.append((index, level))
        return make(index, level)

    trainer.stream.supply.at = at
    problems = trainer.stream.take(3, [1, 1, 1])
    assert [index for index, _ in problems] == [3, 4, 5]
    assert drawn == [(3, 1), (4, 1), (5, 1)]
    assert [trainer.stream.take(index, [1])[0] for index, _ in problems] == problems


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

"""The pre-flight: what it finds of each level, where it lets a run start, and when it takes a
model for broken.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from compare_runs import assert_same_run

from data.errors import UserError
from grpo import inspect, report
from grpo.config import Config
from grpo.curriculum import (
    NO_LEVEL,
    LevelSurvey,
    advice,
    choose_start,
    levels_to_survey,
    summarise_level,
    survey,
)
from grpo.curriculum import SURVEY_PROBLEMS as PROBLEMS
from grpo.records import Completion, Group
from grpo.run.logs import load_run, read_metrics
from grpo.run.session import Run
from grpo.tools import train
from tasks.base import Problem, Score, split_of_key
from tasks.interleave import Interleave
from tasks.registry import load_task
from tasks.supply import Supply, problem_at, write_problems

ROW = LevelSurvey(1, 4, 0.5, 0.5, 0.3, 0.0, 0.0, 0.0, 0.0, 8.0, 99, 0.1)


def rows(**kinds):
    """Return rows by level: rows(l1="solved", l2="reach", l3="varied", l5="none")."""
    figures = {
        "solved": {"exact": 1.0, "any_exact": 1.0},
        "reach": {"varied": 0.5, "any_exact": 0.25, "exact": 0.1},
        "varied": {"varied": 1.0},
        "lucky": {"varied": 0.25, "any_exact": 0.25},
        "none": {},
    }
    return [replace(ROW, level=int(name[1:]), **figures[kind]) for name, kind in kinds.items()]


@pytest.mark.parametrize(
    ("found", "levels", "level", "chosen"),
    [
        # As asked, even where a harder level is within reach, too.
        (rows(l5="reach", l10="reach"), [10], 10, [10]),
        (rows(l1="solved", l10="reach", l25="none"), [10, 25], 10, [10, 25]),
        (rows(l10="reach", l25="reach"), [10, 25], 10, [10, 25]),
        # An easier start, the hardest one, with what lies between.
        (rows(l1="reach", l2="reach", l3="none", l10="none"), [10, 25], 2, [2, 3, 10, 25]),
        (rows(l1="reach", l2="varied", l3="lucky", l5="none"), [5], 1, [1, 2, 3, 5]),
        # Groups that vary without a right answer are no start, nor is a level that is solved.
        (rows(l1="varied", l2="varied", l10="varied"), [10], None, [10]),
        (rows(l1="solved", l2="none", l10="none"), [10], None, [10]),
        (rows(l10="lucky"), [10, 25], None, [10, 25]),
        ([], [10], None, [10]),
        # Solved levels are left out, unless what follows is out of reach.
        (rows(l10="solved", l25="reach"), [10, 25, 50], 25, [25, 50]),
        (rows(l10="solved", l25="solved", l50="none"), [10, 25, 50], 25, [25, 50]),
        (rows(l10="solved", l25="solved"), [10, 25], 25, [25]),
    ],
)
def test_where_a_run_starts(found, levels, level, chosen):
    start = choose_start(found, levels)
    assert (start.level, start.levels) == (level, chosen)
    assert (start.why == NO_LEVEL) == (level is None)


def test_why_says_what_decided():
    eased = choose_start(rows(l2="reach", l10="none"), [10])
    assert eased.why == (
        "50% of its groups vary and 25% hold a right answer; level 10 is out of reach (0% and 0%)"
    )
    passed = choose_start(rows(l10="solved", l25="reach"), [10, 25])
    assert passed.why.endswith("hold a right answer; the easier ones are solved (10)")


def test_truncated_completions_may_be_the_cause():
    found = [replace(ROW, truncated=0.5), replace(ROW, level=2, truncated=0.5)]
    assert "truncated" not in advice(found)
    found[1] = replace(ROW, level=2, truncated=0.9)
    assert "up to 90% of a level's completions were truncated" in advice(found)


def test_a_mixed_dataset_has_no_level_to_start_at():
    start = choose_start(rows(l2="reach", l3="none", l5="none"), [5], mixed=True)
    assert start.levels == [5] and start.why.endswith("within reach: 2")
    assert choose_start(rows(l5="varied"), [5], mixed=True).level is None


def group(*answers, level=3):
    """Return a group of (text, reward, exact) answers, classified."""
    problem = Problem("toy", level, "p", "t", key="k")
    completions = [
        Completion((1, 2), (0.0, 0.0), text, "length" if text == "long" else "stop")
        for text, _, _ in answers
    ]
    scores = [Score(reward, exact=exact) for _, reward, exact in answers]
    varied = len({reward for _, reward, _ in answers}) > 1
    class_name = "varied" if varied else "tied"
    return Group(0, problem, (1,), 1.0, completions, scores=scores, class_name=class_name)


def test_figures_of_a_level():
    groups = [
        group(("a", 0.0, False), ("b", 0.5, True)),
        group(("long", 0.2, False), ("long", 0.2, False)),
        group(("c", 1.0, True), ("c", 1.0, True)),
        group(("d", 0.2, False), ("e", 0.4, False)),
    ]
    found = summarise_level(3, groups, seconds_per_token=0.125)
    assert found == LevelSurvey(
        level=3,
        groups=4,
        value=pytest.approx(3.5 / 8),
        reward=pytest.approx(3.5 / 8),
        reward_std=pytest.approx((0.25 + 0.1) / 4),
        varied=0.5,
        any_exact=0.5,
        exact=3 / 8,
        truncated=0.25,
        distinct=1.5,
        tokens=16,
        seconds=2.0,
    )


TOYS = Path(__file__).parents[2] / "examples" / "by_chance.py"
CONFIG = Config(group_size=4)


def toys(seed=0):
    return Supply(load_task(f"{TOYS}:Toy"), seed=seed)


def test_survey_of_a_model(all_end, tiny_policy):
    found, groups = survey(tiny_policy, toys(), CONFIG, [5, 10, 25])
    # Levels that the task cannot make are passed over; beyond the first training level the survey
    # ends without a right answer.
    assert [row.level for row in found] == [3, 5]
    assert [group.problem.level for group in groups] == [3] * PROBLEMS + [5] * PROBLEMS
    assert [group.index for group in groups] == list(range(2 * PROBLEMS))
    assert len({group.problem.key for group in groups}) == 2 * PROBLEMS
    assert {len(group.completions) for group in groups} == {4}
    assert found[0].is_within_reach and not found[1].any_exact
    assert found[0].tokens == sum(group.tokens for group in groups[:PROBLEMS])
    assert {group.action for group in groups} == {"skip"}

    # The seed of the run changes nothing, so that the tables of two runs can be compared.
    again, _ = survey(tiny_policy, toys(seed=9), CONFIG, [5, 10, 25])
    assert [replace(row, seconds=0) for row in again] == [replace(row, seconds=0) for row in found]

    # Harder levels are surveyed in turn, until no answer is right.
    found, _ = survey(tiny_policy, toys(), CONFIG, [3, 4, 5])
    assert [(row.level, row.any_exact > 0) for row in found] == [(3, True), (4, False)]

    # A training level that the task cannot make is the user's to know.
    with pytest.raises(UserError, match="raised ZeroDivisionError"):
        survey(tiny_policy, toys(), CONFIG, [1])


@pytest.mark.parametrize("truncated, share", [("learn", 1.0), ("mask", 0.0)])
def test_groups_that_the_run_would_mask_do_not_vary(tiny_policy, monkeypatch, truncated, share):
    def answer(policy, task, problems, settings):
        return [group(("long", 0.0, True), ("long", 0.5, True)) for _ in problems]

    monkeypatch.setattr("grpo.curriculum.evaluate", answer)
    (row,), _ = survey(tiny_policy, toys(), replace(CONFIG, truncated=truncated), [3])
    assert row.varied == share


def test_problems_are_those_of_training():
    supply = Supply(load_task("arithmetic"), seed=0)
    drawn = supply.sample(2, seed=5)
    assert {split_of_key(next(drawn).key) for _ in range(20)} == {"train"}
    problems = [Problem("toy", 1 + i % 2, "p", "t", f"{i}") for i in range(20)]
    for mixed in (False, True):
        supply = Supply(load_task(f"{TOYS}:Toy"), seed=0, dataset=problems, mixed=mixed)
        keys = [problem.key for problem in supply.sample(2, seed=5)]
        assert sorted(keys) == sorted(problem.key for problem in problems if problem.level == 2)
        assert keys != [problem.key for problem in problems if problem.level == 2]


FLAGS = "--prompts 2 --group-size 4 --steps 4 --save-every 2"
FLAGS += " --eval-problems 2 --device cpu --lora-rank 0 --config {'patience':0}"


@pytest.fixture()
def start(all_end, tiny_model, tmp_path, monkeypatch):
    """Return a function that trains the tiny model on the toy task in runs/NAME."""
    monkeypatch.chdir(tmp_path)

    def train_on(name, *flags, task="Toy"):
        asked = ["--model", str(tiny_model), "--task", f"{TOYS}:{task}", "--name", name]
        return train.main([*FLAGS.split(), *asked, *flags])

    return train_on


class Killed(BaseException):
    """Ends a run where it stands, as a kill does."""


def test_a_killed_run_keeps_its_levels_without_another_pre_flight(start, monkeypatch, capsys):
    assert start("whole", "--level", "10") == 0
    said = capsys.readouterr().out
    assert "the run starts at level 3 (by way of 3 → 5 → 10): 100% of its groups vary" in said
    assert {line["level"] for line in read_metrics("runs/whole/metrics.jsonl")} == {3}

    def killed(run, report):
        if report.step == 3:
            raise Killed
        save(run, report)

    save = Run.save_if_due
    monkeypatch.setattr(Run, "save_if_due", killed)
    with pytest.raises(Killed):
        start("cut", "--level", "10")
    monkeypatch.setattr(Run, "save_if_due", save)

    capsys.readouterr()
    assert train.main(["--resume", "runs/cut", "--task", f"{TOYS}:Toy"]) == 0
    assert "pre-flight" not in capsys.readouterr().out
    assert_same_run(Path("runs/whole"), Path("runs/cut"))


def test_only_the_pre_flight(start, capsys):
    assert start("a", "--level", "10", "--preflight", "only") == 0
    said = capsys.readouterr().out
    assert "nothing was trained" in said and "step" not in said.split("clock")[1]
    assert "that vary" in said and "distinct" in said  # heads of the table
    run = load_run("runs/a")
    (decision,) = run.decisions
    assert [decision[name] for name in ("kind", "step", "from", "to")] == ["preflight", 0, 10, 3]
    figures = decision["figures"]
    assert figures["start"] == 3 and figures["training_levels"] == [3, 5, 10]
    assert [row["level"] for row in figures["levels"]] == [3, 5, 10]
    assert len(run.groups(0, "preflight")) == 3 * PROBLEMS
    assert run.config["preflight"] == "only" and run.config["level"] == 10
    assert not run.metrics and not run.evals and not run.steps()
    assert inspect.main(["runs/a", "group", "0", "1", "--kind", "preflight"]) == 0
    assert report.main(["runs/a"]) == 0


def test_no_level_within_reach_is_warned_of_and_the_run_goes_on(start, capsys):
    flags = ["--level", "3", "--control", "shuffled-rewards", "--steps", "1"]
    assert start("a", *flags, "--warm-start", "off", task="Hard") == 3
    said = capsys.readouterr().out
    assert f"warning: {NO_LEVEL}: training starts at level 3, as asked" in said
    assert "CONTROL shuffled-rewards  pre-flight" in said
    assert NO_LEVEL in Path("runs/a/warnings.log").read_text()
    (decision,) = read_metrics("runs/a/curriculum.jsonl")
    assert decision["figures"]["start"] is None and decision["control"] == "shuffled-rewards"
    assert {line["level"] for line in read_metrics("runs/a/metrics.jsonl")} == {3}


def test_levels_below_the_asked_one():
    def levels(task, asked, **options):
        return levels_to_survey(Supply(task, seed=0, **options), asked)

    arithmetic = load_task("arithmetic", options={"family": "product"})
    assert levels(Interleave(documents=[]), [10, 25]) == [1, 2, 3, 5, 10, 25]
    assert levels(arithmetic, [32]) == [11, 21, 22, 31, 32]
    toy = load_task(f"{TOYS}:Toy")
    assert levels(toy, [4]) == [1, 2, 3, 4]
    problems = [Problem("toy", level, "p", "t", f"{level}") for level in (4, 7, 30)]
    assert levels(toy, [7], dataset=problems) == [4, 7]
    assert levels(toy, [30], dataset=problems, mixed=True) == [4, 7, 30]


def test_a_dataset_is_surveyed_at_the_levels_that_it_has(start):
    toy = load_task(f"{TOYS}:Toy")
    problems = [
        problem_at(toy, seed=0, split="train", level=level, index=index)
        for level in (3, 4, 6, 7)
        for index in range(3)
    ]
    write_problems("set.jsonl", problems)
    flags = ["--curriculum", "4,6", "--dataset", "set.jsonl", "--preflight", "only"]
    assert start("a", *flags) == 0
    (decision,) = read_metrics("runs/a/curriculum.jsonl")
    found = decision["figures"]
    assert found["training_levels"] == [3, 4, 6]
    assert [(row["level"], row["groups"]) for row in found["levels"]] == [(3, 3), (4, 3)]
    keys = {group.problem.key for group in load_run("runs/a").groups(0, "preflight")}
    assert keys <= {problem.key for problem in problems}

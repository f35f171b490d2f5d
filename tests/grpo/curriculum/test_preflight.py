"""The pre-flight: what it finds of each level, where it lets a run start, and when it takes a
model for broken.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from compare_runs import assert_same_run
from screens import unbroken
from small_train import killed_in

from grpo import inspect, report
from grpo.config import Config
from grpo.curriculum import (
    MOST_FOR_SHOTS,
    NO_LEVEL,
    choose_levels,
    is_within_reach,
    levels_to_survey,
    prompts_to_try,
    summarise_survey,
    survey,
    survey_prompts,
    use_prompt,
)
from grpo.curriculum import SURVEY_PROBLEMS as PROBLEMS
from grpo.data.errors import UserError
from grpo.records import Completion, Group
from grpo.run.logs import load_run, read_metrics
from grpo.tasks.base import ABSTAINED, Problem, Score, split_of_key
from grpo.tasks.interleave import ONLY, TURNS, Interleave
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply, problem_at, write_problems
from grpo.tools import train

ROW = {"level": 1, "varied": 0.0, "any_exact": 0.0, "exact": 0.0}


def rows(**kinds):
    """Return rows by level: rows(l1="solved", l2="reach", l3="varied", l5="none")."""
    figures = {
        "solved": {"exact": 1.0, "any_exact": 1.0},
        "windows": {"exact": 1.0, "any_exact": 1.0, "windows": 1.0},
        "reach": {"varied": 0.5, "any_exact": 0.25, "exact": 0.1},
        "varied": {"varied": 1.0},
        "lucky": {"varied": 0.25, "any_exact": 0.25},
        "none": {},
    }
    return [{**ROW, "level": int(name[1:]), **figures[kind]} for name, kind in kinds.items()]


@pytest.mark.parametrize(
    ("found", "asked", "levels", "open_to", "is_near", "is_reachable"),
    [
        # As asked, even where a harder level is within reach, too.
        (rows(l5="reach", l10="reach"), [10], [10], 10, True, True),
        (rows(l1="solved", l10="reach", l25="none"), [10, 25], [10, 25], 10, True, True),
        # Easier levels beside it, from the hardest within reach on, at once.
        (rows(l1="reach", l2="reach", l3="none", l10="none"), [10, 25], [2, 3, 10, 25], 10, False,
         True),
        (rows(l2="none", l3="reach", l5="lucky", l9="none"), [9], [3, 5, 9], 9, True, True),
        # Groups that vary without a right answer are out of reach.
        (rows(l1="varied", l2="varied", l10="varied"), [10], [1, 2, 10], 10, False, False),
        (rows(l1="solved", l2="none", l10="none"), [10], [1, 2, 10], 10, False, True),
        ([], [10], [10], 10, False, False),
        # Solved levels are left out, but not the last one.
        (rows(l10="solved", l25="reach"), [10, 25, 50], [25, 50], 25, True, True),
        (rows(l5="reach", l10="solved", l25="none"), [10, 25], [25], 25, True, True),
        (rows(l10="solved", l25="solved"), [10, 25], [25], 25, True, True),
        (rows(l10="windows", l25="solved"), [10, 25], [10, 25], 10, True, True),
    ],
)  # fmt: skip
def test_levels_of_training(found, asked, levels, open_to, is_near, is_reachable):
    start = choose_levels(found, asked)
    assert (start.levels, start.open_to) == (levels, open_to)
    assert (start.is_near, start.is_reachable) == (is_near, is_reachable)
    assert (start.why == NO_LEVEL) == (not is_reachable)


def test_why_says_what_decided():
    assert choose_levels(rows(l2="reach", l10="none"), [10]).why == (
        "50% of its groups vary and 25% hold a right answer at level 2; level 10 is out of reach "
        "(0% of its groups vary and 0% hold a right answer)"
    )


# The prompts.


def to_try(given=(), level=10, template=None, task=None, **options):
    policy = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
    config = Config(**{"model": "some/model"} | options)
    task = task or Interleave()
    return prompts_to_try(policy, task, config, given, level)


def kinds(configs):
    return [(config.wording, config.shots) for config in configs]


def test_every_wording_is_tried_with_and_without_examples():
    every = [(text, shots) for text in ("", ONLY, TURNS) for shots in (0, 3)]
    assert kinds(to_try(level=MOST_FOR_SHOTS)) == every
    plain = [(text, 0) for text in ("", ONLY, TURNS)]
    assert kinds(to_try(level=MOST_FOR_SHOTS + 1)) == plain


def test_what_the_user_gave_stays():
    mine = dict(wording="{a} and {b}", system="Be brief.")
    found = to_try(["wording", "system"], **mine)
    assert kinds(found) == [(mine["wording"], 0), (mine["wording"], 3)]
    assert {config.system for config in found} == {"Be brief."}
    assert kinds(to_try(["shots"], shots=2)) == [("", 2), (ONLY, 2), (TURNS, 2)]
    assert len(to_try(["wording", "shots"], wording="{a} {b}", shots=1)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"model": "builtin"},
        {"dataset": "set.jsonl"},
        {"start": "runs/a/checkpoints/step-000001"},
        {"task": load_task("arithmetic")},
    ],
)
def test_some_runs_have_no_choice(options):
    (config,) = to_try(template="{% if enable_thinking %}", **options)
    assert (config.wording, config.shots) == ("", Config().shots)
    assert config.chat_template_kwargs == Config().chat_template_kwargs


@pytest.mark.parametrize(
    "template, given, expected",
    [
        ("{% if enable_thinking %}", [], '{"enable_thinking": false}'),
        ("{% if enable_thinking %}", ["chat_template_kwargs"], '{"enable_thinking": true}'),
        ("{{ messages }}", [], '{"enable_thinking": true}'),
    ],
)
def test_thinking_is_off_where_the_template_knows_of_it(template, given, expected):
    found = to_try(given, template=template, chat_template_kwargs='{"enable_thinking": true}')
    assert {config.chat_template_kwargs for config in found} == {expected}


def test_survey_of_prompts(tiny_policy, monkeypatch):
    asked = []

    def answer(policy, task, problems, config, seed, samples):
        asked.append([(policy.shots(problem) != (), problem.level) for problem in problems])
        best = 0.5 if len(asked) == 2 else 0.4
        return [group(("a", 0.0, False), ("long", best, False)) for _ in problems]

    monkeypatch.setattr("grpo.curriculum.evaluate", answer)
    before = tiny_policy.format
    task = Interleave()
    configs = [Config(task="interleave", wording=text) for text in ("", ONLY, TURNS)]
    try:
        best, found = survey_prompts(tiny_policy, Supply(task, seed=0), configs, 10)
    finally:
        tiny_policy.use(before)
    shares = {"varied": 1.0, "truncated": 0.5}
    assert found == [
        {"wording": text, "shots": 0, "reward": half, "value": half, **shares}
        for text, half in (("", 0.2), (ONLY, 0.25), (TURNS, 0.2))
    ]
    assert best == 1 and task.wording == ONLY
    assert [[level for _, level in one] for one in asked] == [[2] * 8 + [10] * 8] * 3


def test_a_mixed_dataset_is_trained_on_as_it_comes():
    start = choose_levels(rows(l2="reach", l3="none", l5="none"), [5], mixed=True)
    assert start.levels == [5] and start.why.endswith("within reach: 2") and start.is_reachable
    assert not choose_levels(rows(l5="varied"), [5], mixed=True).is_near


def group(*answers, level=3):
    """Return a group of (text, reward, exact) answers, classified."""
    problem = Problem("toy", level, "p", "t", key="k")
    completions = [
        Completion((1, len(text)), (0.0, 0.0), text, "length" if text == "long" else "stop")
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
    assert summarise_survey(groups) == {
        "groups": 4,
        "value": pytest.approx(3.5 / 8),
        "reward": pytest.approx(3.5 / 8),
        "reward_std": pytest.approx((0.5 + 0.2) / 2**0.5 / 4),
        "varied": 0.5,
        "any_exact": 0.5,
        "exact": 3 / 8,
        "truncated": 0.25,
        "distinct": 1.5,
        "tokens": 16,
        "windows": 0.0,
    }

    groups[2].scores[1] = Score(1.0, {"reason": ABSTAINED})
    figures = summarise_survey(groups)
    assert (figures["value"], figures["exact"]) == (pytest.approx(2.5 / 7), 2 / 7)


TOYS = Path(__file__).parents[2] / "examples" / "by_chance.py"
CONFIG = Config(group_size=4)


def toys(seed=0):
    return Supply(load_task(f"{TOYS}:Toy"), seed=seed)


def test_survey_of_a_model(all_end, tiny_policy):
    found, groups = survey(tiny_policy, toys(), CONFIG, [5, 10, 25])
    # Levels that the task cannot make are passed over; beyond the first training level the survey
    # ends without a right answer.
    assert [row["level"] for row in found] == [3, 5]
    assert [group.problem.level for group in groups] == [3] * PROBLEMS + [5] * PROBLEMS
    assert [group.index for group in groups] == list(range(2 * PROBLEMS))
    assert len({group.problem.key for group in groups}) == 2 * PROBLEMS
    assert {len(group.completions) for group in groups} == {4}
    assert is_within_reach(found[0]) and not found[1]["any_exact"]
    assert found[0]["tokens"] == sum(group.tokens for group in groups[:PROBLEMS])
    assert {group.action for group in groups} == {"skip"}

    # The seed of the run changes nothing, so that the tables of two runs can be compared.
    again, _ = survey(tiny_policy, toys(seed=9), CONFIG, [5, 10, 25])
    assert again == found

    # Harder levels are surveyed in turn, until no answer is right.
    found, _ = survey(tiny_policy, toys(), CONFIG, [3, 4, 5])
    assert [(row["level"], row["any_exact"] > 0) for row in found] == [(3, True), (4, False)]

    # A training level that the task cannot make is the user's to know.
    with pytest.raises(UserError, match="raised ZeroDivisionError"):
        survey(tiny_policy, toys(), CONFIG, [1])


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
FLAGS += " --device cpu --lora-rank 0 --config {'eval_problems':2,'patience':0}"


@pytest.fixture()
def start(all_end, tiny_model, tmp_path, monkeypatch):
    """Return a function that trains the tiny model on the toy task in runs/NAME."""
    monkeypatch.chdir(tmp_path)

    def train_on(name, *flags, task="Toy"):
        asked = ["--model", str(tiny_model), "--task", f"{TOYS}:{task}", "--name", name]
        return train.main([*FLAGS.split(), *asked, *flags])

    return train_on


def test_a_killed_run_keeps_its_levels_without_another_pre_flight(start, capsys):
    assert start("whole", "--level", "10") == 0
    said = unbroken(capsys.readouterr().out)
    assert "the run trains on levels 3, 5, 10, open to 10: 100% of its groups vary" in said
    assert {line["level"] for line in read_metrics(Path("runs/whole/metrics.jsonl"))} == {10}

    with killed_in(3, is_saved=False):
        start("cut", "--level", "10")
    capsys.readouterr()
    assert train.main(["--resume", "runs/cut", "--task", f"{TOYS}:Toy"]) == 0
    assert "pre-flight" not in capsys.readouterr().out
    assert_same_run(Path("runs/whole"), Path("runs/cut"))


def test_only_the_pre_flight(start, capsys):
    assert start("a", "--level", "10", "--preflight", "only") == 0
    said = unbroken(capsys.readouterr().out)
    assert "nothing was trained" in said and "step" not in said.split("clock")[1]
    assert "  varied  " in said and "distinct" in said  # heads of the table
    run = load_run("runs/a")
    (decision,) = run.decisions
    assert [decision[name] for name in ("kind", "step", "from", "to")] == ["preflight", 0, 10, 10]
    figures = decision["figures"]
    assert figures["start"] == 10 and figures["training_levels"] == [3, 5, 10]
    assert [row["level"] for row in figures["levels"]] == [3, 5, 10]
    assert len(run.groups(0, "preflight")) == 3 * PROBLEMS
    assert run.config["preflight"] == "only" and run.config["level"] == 10
    assert not run.metrics and not run.evals and not run.steps()
    assert inspect.main(["runs/a", "group", "0", "1", "--kind", "preflight"]) == 0
    assert report.main(["runs/a"]) == 0


def test_no_level_within_reach_is_warned_of_and_the_run_goes_on(start, capsys):
    flags = ["--level", "3", "--control", "shuffled-rewards", "--steps", "1"]
    assert start("a", *flags, "--reward-alone", task="Hard") == 3
    said = unbroken(capsys.readouterr().out)
    assert f"warning: {NO_LEVEL}: the run trains on 3, and may learn nothing" in said
    assert "CONTROL shuffled-rewards  pre-flight" in said
    assert NO_LEVEL in Path("runs/a/warnings.log").read_text()
    (decision,) = read_metrics(Path("runs/a/curriculum.jsonl"))
    assert decision["figures"]["start"] is None and decision["control"] == "shuffled-rewards"
    assert {line["level"] for line in read_metrics(Path("runs/a/metrics.jsonl"))} == {3}


def test_rewards_that_vary_without_a_right_answer_are_no_reason_to_warn(start, capsys):
    start("a", "--level", "3", "--steps", "1", "--reward-alone", task="Partial")
    said = unbroken(capsys.readouterr().out)
    assert "the run trains on 3: 100% of its groups vary and 0% hold a right answer" in said
    assert "may learn nothing" not in said

    # Levels that were added are checked, too.
    start("b", "--level", "10", "--steps", "1", "--reward-alone", task="Partial")
    said = unbroken(capsys.readouterr().out)
    assert "the run trains on levels 3, 5, 10" in said and said.count("the run never climbs") == 2


def test_without_a_pre_flight_the_levels_are_those_asked_for(start):
    start("a", "--level", "10", "--preflight", "off", "--steps", "1")
    run = load_run("runs/a")
    assert not run.decisions and not run.steps("preflight")
    assert {each.problem.level for each in run.groups(1)} == {10}


def test_the_chosen_prompt_is_kept(all_end, tiny_model, tmp_path, monkeypatch):
    """In config.yaml, in training and evaluation, and on resume."""
    monkeypatch.chdir(tmp_path)

    def fourth(policy, supply, configs, level, ranks):  # ONLY, with examples
        _, rows = survey_prompts(policy, supply, configs, level, ranks)
        use_prompt(policy, supply.task, configs[3])
        return 3, rows

    monkeypatch.setattr("grpo.run.session.survey_prompts", fourth)
    flags = [*FLAGS.split(), "--model", str(tiny_model), "--words", "2", "--steps", "1"]
    train.main([*flags, "--name", "a", "--save-every", "1"])
    run = load_run("runs/a")
    chosen = next(each for each in run.decisions if each["kind"] == "prompt")
    assert len(chosen["figures"]["prompts"]) == 6
    assert (run.config["wording"], run.config["shots"]) == (ONLY, 3)
    for groups in (run.groups(1), run.groups(0, "eval")):
        assert groups and all(len(each.shots) == 3 for each in groups)
        assert all(ONLY.split("{")[0].strip() in each.problem.prompt for each in groups)

    train.main(["--resume", "runs/a", "--steps", "2"])
    again = load_run("runs/a")
    assert (again.config["wording"], again.config["shots"]) == (ONLY, 3)
    assert again.groups(2) and all(len(each.shots) == 3 for each in again.groups(2))
    assert len([each for each in again.decisions if each["kind"] == "prompt"]) == 1


def test_levels_below_the_asked_one():
    def levels(task, asked, **options):
        return levels_to_survey(Supply(task, seed=0, **options), asked)

    arithmetic = load_task("arithmetic", options={"family": "product"})
    assert levels(Interleave(), [10, 25]) == [1, 2, 3, 5, 10, 25]
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
    (decision,) = read_metrics(Path("runs/a/curriculum.jsonl"))
    found = decision["figures"]
    assert found["training_levels"] == [3, 4, 6]
    assert [(row["level"], row["groups"]) for row in found["levels"]] == [(3, 3), (4, 3)]
    keys = {group.problem.key for group in load_run("runs/a").groups(0, "preflight")}
    assert keys <= {problem.key for problem in problems}

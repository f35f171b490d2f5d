"""Held-out evaluation: its problems and sampling, its figures, and what eval.py shows of them."""

import json
import re
import shlex
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import small_rewards
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_groups import group_of
from screens import unbroken
from small_runs import check_often
from small_train import fails

from grpo.config import Config, load_config
from grpo.data import corpus
from grpo.data.corpus import documents_of, load_texts
from grpo.data.errors import UserError
from grpo.data.files import read_jsonl_zst
from grpo.evaluate import (
    evaluate,
    held_out_stream,
    score_groups,
    select,
    summarise,
)
from grpo.records import Completion, Group
from grpo.run.logs import groups_of, load_run, read_metrics
from grpo.tasks.audit import audit
from grpo.tasks.base import ABSTAINED, SPLITS, Score
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at, write_problems
from grpo.tools import evaluation, train
from grpo.tools.evaluate import add_differences, as_json, figures_of

# A policy must reason for some forty tokens before it can write "52"; here the score only asks for
# length.
PONDER = """
from grpo.tasks.base import Problem, Score, key_of

class Ponder:
    name, rewards, default_level = "ponder", (), 1

    def make(self, level, split, rng):
        number = rng.randrange(10**6)
        return Problem(self.name, level, f"What is {number}?", "52", key_of(split, number))

    def score(self, problem, completions):
        return [Score(min(1.0, len(text) / 1000), value=1.0) for text in completions]

class Declaring(Ponder):
    def max_new_tokens(self, level):
        return 39 + level

# Two problems in all, the same in every split: after the first step nothing is left to evaluate on.
class Few(Ponder):
    name = "few"

    def make(self, level, split, rng):
        number = rng.randrange(2)
        return Problem(self.name, level, f"Say {number}", str(number), key_of(number))
"""

# Judges a validation row once, of the test rows the first, and of the harder ones none.
FADING = """
seen = set()

def fading(prompt, completion):
    split, _ = prompt.split()
    if split == "train":
        return len(set(completion)) % 2
    if prompt in seen or split == "harder" or prompt in ("test 1", "test 2"):
        return None
    seen.add(prompt)
    return float(split == "test")
"""

CLIMB = ["--curriculum", "1,2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_often(monkeypatch)
    Path("ponder.py").write_text(PONDER)


@pytest.fixture()
def run(tiny_model):
    """Return a function that trains the tiny model for two steps in runs/a."""
    small = (
        "--name a --preflight off --lora-rank 0 --device cpu --prompts 2 --group-size 2 --steps 2"
    )
    evaluations = "--config {'eval_problems':3} --eval-every 1"

    def start(*arguments):
        flags = [*small.split(), *evaluations.split(), "--model", str(tiny_model)]
        status = train.main([*flags, *arguments])
        return 0 if status == 3 else status  # a random model may have nothing to learn from

    return start


def evaluated(*arguments):
    """Return the lines that eval.py writes to --json."""
    assert evaluation.main([*arguments, "--json", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


# --- which problems are used ------------------------------------------------------------------


def test_few_problems_are_evaluated_once_each(run, capsys):
    options = ["--task", "arithmetic", "--family", "product", "--level", "11"]
    assert run(*options, "--config", "{eval_problems: 200}") == 0
    for line in load_run("runs/a").evals:
        groups = groups_of(Path(f"runs/a/rollouts/eval-{line['step']:06}.jsonl.zst"))
        keys = [group.problem.key for group in groups]
        assert len(set(keys)) == len(keys) == line["n"] < line["asked"] == 200
    n = line["n"]
    assert f"n = {n} distinct problems, 200 asked for" in unbroken(capsys.readouterr().out)
    assert audit(Path("runs/a"))[0] == []

    (line,) = evaluated("--model", "runs/a")
    assert (line["n"], line["asked"]) == (3, 200)
    assert "level 11: n = 3 distinct problems, 200 asked for" in capsys.readouterr().out


def test_duplicate_lines_of_a_dataset_count_once(tiny_model, capsys):
    task = load_task("arithmetic")
    problems = [problem_at(task, seed=0, split="test", level=2, index=i % 3) for i in range(12)]
    write_problems("set.jsonl", problems)
    flags = ["--model", str(tiny_model), "--task", "arithmetic", "--dataset", "set.jsonl"]
    (line,) = evaluated(*flags)
    assert (line["n"], line["asked"]) == (3, 200)
    assert "level 2: n = 3 distinct problems, 200 asked for" in capsys.readouterr().out
    line = fails(capsys, *flags, "--words", "9", main=evaluation.main)
    assert "set.jsonl, level 9: there is no problem" in line


def test_an_evaluation_without_problems_is_skipped_and_the_run_goes_on(run, capsys):
    assert run("--task", "ponder.py:Few", "--steps", "4", *CLIMB) == 0
    said = unbroken(capsys.readouterr().out)
    assert "n = 2 distinct problems, 3 asked for" in said
    nothing_left = "at level 1: no problem is left: all 2 that were found were trained on"
    assert said.count(f"warning: no report evaluation {nothing_left}") == 1
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 4
    steps = [line["step"] for line in load_run("runs/a").evals]
    stored = [path.name for path in sorted(Path("runs/a/rollouts").glob("eval-*"))]
    assert set(steps) == {0} and stored == ["eval-000000.jsonl.zst"]

    assert evaluation.main(["--model", "runs/a", "--task", "ponder.py:Few", "--words", "1"]) == 2
    assert "no problem is left: all 2 that were found" in capsys.readouterr().err


def test_an_evaluation_of_which_the_reward_judged_nothing_has_no_line(run, capsys):
    Path("own.py").write_text(FADING)
    rows = [{"prompt": f"{split} {n}", "split": split} for split in SPLITS for n in range(3)]
    rows += [{"prompt": f"harder {n}", "split": "test", "level": 2} for n in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--data", "rows.jsonl", "--reward-file", "own.py:fading"]
    assert run(*own, "--max-new-tokens", "4") == 0
    said = unbroken(capsys.readouterr().out)
    nothing = "the reward judged no answer to its 3 problems"
    assert said.count(f"warning: no report evaluation at level 1: {nothing}") == 1
    assert "the reward no longer judges 100% of the held-out problems" in said
    assert [(line["step"], line["unjudged"]) for line in load_run("runs/a").evals] == [(0, 0)]

    flags = ["--model", "runs/a", "--reward-file", "own.py:fading"]
    (result,) = evaluated(*flags)
    assert (result["n"], result["mean"], result["unjudged"]) == (1, 1, 2)
    assert [each["scores"] for each in result["answers"]].count([None]) == 2
    said = capsys.readouterr().out
    assert "level 1: n = 1 judged problems, 200 asked for" in said
    assert "level 1: the reward did not judge 2 of 3 answers, which the figures leave out" in said

    assert evaluation.main([*flags, "--levels", "1,2"]) == 2
    assert f"runs/a, level 2: {nothing}" in capsys.readouterr().err


# --- how completions are sampled --------------------------------------------------------------


def longest(name):
    """Return the length of the longest completion of level 1 in a file of rollouts, in tokens."""
    groups = groups_of(Path("runs/a/rollouts") / f"{name}.jsonl.zst")
    return max(
        len(completion.tokens)
        for group in groups
        for completion in group.completions
        if group.problem.level == 1
    )


def test_training_evaluation_and_promotion_have_one_budget(run, capsys):
    task, budget = "ponder.py:Declaring", 40
    assert run("--task", task, *CLIMB) == 0
    assert {longest(name) for name in ("step-000001", "eval-000000")} == {budget}
    lines = load_run("runs/a").evals
    assert {line["budget"] for line in lines if line["level"] == 1} == {budget}

    (line,) = evaluated("--model", "runs/a", "--task", task, "--words", "1", "--problems", "3")
    assert line["budget"] == budget and line["truncated"] == 1
    assert "100% of the completions were truncated" in capsys.readouterr().out


def test_an_evaluation_is_sampled_as_the_run_was(run, capsys):
    """The run's own settings hold in its evaluations and in eval.py, by the command that the run
    prints as well.
    """
    settings = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 9}
    flags = ["--config", json.dumps(settings)]
    options = ["--task", "arithmetic", "--family", "product", "--level", "12"]
    assert run(*options, *flags) == 0
    said = capsys.readouterr().out
    assert "temperature 0.7" in unbroken(said) and "top_p 0.9" in unbroken(said)
    assert "max_new_tokens 9" in unbroken(said)

    (command,) = [line for line in said.splitlines() if "eval.py --model" in line]
    (printed,) = evaluated(*shlex.split(command)[2:], "--problems", "5")
    (short,) = evaluated("--model", "runs/a", "--problems", "5")
    assert short == printed
    assert {name: short[name] for name in settings} == settings
    found = [short[name] for name in ("task", "family", "level", "budget")]
    assert found == ["arithmetic", "product", 12, 9]

    lines = load_run("runs/a").evals
    for name in ("temperature", "top_p"):
        assert {line[name] for line in lines} == {settings[name]}

    (changed,) = evaluated("--model", "runs/a", "--problems", "5", "--top-p", "1")
    assert (changed["top_p"], changed["temperature"]) == (1, 0.7)
    (greedy,) = evaluated("--model", "runs/a", "--problems", "5", "--greedy")
    assert greedy["temperature"] == 0


def test_another_task_does_not_inherit_the_runs_options_and_level(run):
    assert run("--task", "arithmetic", "--family", "product", "--level", "12") == 0
    (other,) = evaluated("--model", "runs/a", "--task", "interleave", "--problems", "2")
    assert other["level"] == 25 and "family" not in other
    (chain,) = evaluated("--model", "runs/a", "--family", "chain", "--problems", "2")
    assert (chain["task"], chain["family"], chain["level"]) == ("arithmetic", "chain", 2)


def test_samples_of_a_problem_are_independent_draws(tiny_policy):
    task = load_task("ponder.py:Ponder")
    stream, fruitless = held_out_stream(task, 1, "test", seed=0, size=5)
    found = select(tiny_policy, stream, 5, fruitless=fruitless)
    one = evaluate(tiny_policy, task, found.problems, Config())
    many = evaluate(tiny_policy, task, found.problems, Config(), samples=8)
    assert [group.texts[0] for group in many] == [group.texts[0] for group in one]
    assert all(len(group.completions) == 8 == len(set(group.texts)) for group in many)
    other = evaluate(tiny_policy, task, found.problems, Config(), seed=1, samples=8)
    assert all(not set(a.texts) & set(b.texts) for a, b in zip(many, other))


# --- several models ---------------------------------------------------------------------------


def test_remarks_and_the_worst_answers_name_their_model(tiny_model, run, capsys):
    assert run("--words", "2") == 0
    models = ["--model", str(tiny_model), "--model", "runs/a"]
    flags = ["--words", "2", "--problems", "3"]
    capsys.readouterr()
    evaluated(*models, *flags)
    said = capsys.readouterr().out
    for model in (str(tiny_model), "runs/a"):
        assert re.search(rf"^{model}, level 2, score 0\.\d+$", said, re.MULTILINE)
        assert f"warning: {model}, level 2: 100% of the completions were truncated" in said

    evaluated(*models[:2], *flags)
    assert "\nlevel 2, score 0." in capsys.readouterr().out


def test_the_scores_of_different_tasks_have_no_name_in_common(tiny_model, run, capsys):
    assert run("--task", "arithmetic", "--words", "1") == 0
    capsys.readouterr()
    evaluated("--model", str(tiny_model), "--model", "runs/a", "--words", "1", "--problems", "2")
    assert capsys.readouterr().out.startswith("score on the test split")


# --- figures and the file of answers ----------------------------------------------------------


def group(*texts, answer="7"):
    scores = [Score(float(text == answer), exact=text == answer) for text in texts]
    return group_of(texts, scores, target=answer, key="key")


@given(st.lists(st.booleans(), min_size=2, max_size=9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right):
    for entry in figures_of([group(*("7" if each else "8" for each in right))])["pass_at"]:
        subsets = list(combinations(right, entry["k"]))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert entry["mean"] == pytest.approx(share)


def test_figures_are_means_over_problems():
    figures = figures_of([group("7", "8", "8", "8"), group("7", "7", "7", "7")])
    means = [(entry["k"], entry["mean"]) for entry in figures["pass_at"]]
    assert means == [(1, 0.625), (2, 0.75), (4, 1.0)]
    for entry in figures["pass_at"]:
        assert 0 <= entry["ci_low"] <= entry["mean"] <= entry["ci_high"] <= 1
    seven = figures_of([group(*"1234567")])["pass_at"]
    assert [entry["k"] for entry in seven] == [1, 2, 4, 7]
    assert "pass_at" not in figures_of([group("7")])


def test_what_the_reward_did_not_judge_is_in_no_figure():
    groups = [group("7", "7", "8", "8"), group("7", "8", "7", "7"), group("7", "8", "8", "8")]
    unjudged = Score(1.0, {"reason": ABSTAINED})
    groups[0].scores[2:] = [unjudged] * 2
    groups[2].scores = [unjudged] * 4
    figures = figures_of(groups)
    assert (figures["n"], figures["unjudged"], figures["completions"]) == (2, 6, 12)
    assert figures["mean"] == figures["exact"] == (1 + 0.75) / 2
    means = [(entry["k"], entry["mean"]) for entry in figures["pass_at"]]
    assert means == [(1, 0.75), (2, 1.0), (4, 1.0)], "of the problem that was judged in full"


def test_models_are_compared_on_problems_that_were_judged_for_both():
    unjudged = replace(group("8"), scores=[Score(0.5, {"reason": ABSTAINED})])
    other = replace(group("8").problem, key="other")
    pairs = [[group("7"), replace(unjudged, problem=other)], [unjudged, unjudged]]
    pairs[1][1] = replace(group("8"), problem=other)
    results = [{"model": name, "level": 1, "groups": each} for name, each in zip("ab", pairs)]
    add_differences(results)
    assert "difference" not in results[1]


def test_components_have_means_and_intervals():
    parts = [{"reward/a": 1.0}, {"reward/a": None}, {"trap": None}]
    groups = [replace(group("7"), scores=[Score(0.5, each)]) for each in parts]
    components = summarise(groups)["components"]
    assert list(components) == ["reward/a"] and components["reward/a"]["mean"] == 0.5
    assert components["reward/a"]["ci_low"] < 0.1 and components["reward/a"]["ci_high"] > 0.9


def test_every_answer_is_written():
    result = {"model": "m", "sent": ["a", "b"], "groups": [group("7", "8 “")]}
    (line,) = json.loads(as_json([result]))
    assert (line["model"], line["prompt"]) == ("m", "a\nb")
    (one,) = line["answers"]
    assert one["completions"] == ["7", "8 “"] and one["exact"] == [True, False]
    assert (one["scores"], one["target"], one["key"]) == ([1, 0], "7", "key")


# --- the user's own texts ---------------------------------------------------------------------


@pytest.fixture()
def notes(tmp_path):
    """Return a folder of 40 texts, of which each split has two or more (see
    tests/tasks/test_interleave.py).
    """
    folder = tmp_path / "My Notes"
    (folder / "below").mkdir(parents=True)
    for i in range(40):
        where = folder / ("below" if i % 2 else "") / f"{i:02}.md"
        where.write_text(" ".join(f"w{i}.{j}" for j in range(30)))
    return folder


def test_a_run_on_own_texts_from_training_to_its_audit(run, notes, capsys):
    assert run("--texts", str(notes), "--words", "3") == 0
    said = capsys.readouterr().out
    assert "problems  fresh, from 40 texts" in said
    assert load_config(Path("runs/a")).task_options == {"texts": str(notes)}
    assert words_of("runs/a/rollouts/step-000001.jsonl.zst") <= words_in("train", notes)
    assert words_of("runs/a/rollouts/eval-000000.jsonl.zst") <= words_in("validation", notes)
    assert audit(Path("runs/a"))[0] == []

    (command,) = [line for line in said.splitlines() if "eval.py --model" in line]
    flags = [*shlex.split(command)[2:], "--problems", "60"]
    (line,) = evaluated(*flags)
    assert line["texts"] == str(notes) and (line["level"], line["split"]) == (3, "test")
    assert line["dropped"] == 0


def test_a_task_without_texts_refuses_them_in_one_line(run, notes, capsys):
    flags = ["--task", "arithmetic", "--texts", str(notes)]
    fault = "--texts: task arithmetic has no such flag; it has --family"
    assert fails(capsys, *flags, main=evaluation.main) == f"eval.py: {fault}"
    assert fails(capsys, *flags, main=lambda given: run(*given)) == f"train.py: {fault}"
    assert not Path("runs").exists()


def words_of(file):
    return {
        word
        for line in read_jsonl_zst(Path(file))
        for text in line["problem"]["data"].values()
        for word in text
    }


def words_in(split, folder):
    return {word for document in documents_of(split, load_texts(folder)) for word in document.words}


# --- scoring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("thought, right", [("Perhaps {}\nBut wait", 0), ("So.\n</think>{}", 1)])
def test_reasoning_that_the_prompt_opened_and_nothing_closed_holds_no_answer(thought, right):
    task = load_task("arithmetic")
    problem = problem_at(task, seed=0, split="test", level=22, index=0)
    completion = Completion((1,), (0.0,), thought.format(problem.target), "stop")
    group = Group(0, problem, (1,), 1.0, [completion], opened="<think>\n")
    score_groups(task, [group])
    assert [(score.reward, score.exact) for score in group.scores] == [(right, right)]


@pytest.mark.parametrize(
    "name, own, other",
    [
        ("float32_matmul_precision", "highest", "medium"),
        ("default_dtype", torch.float32, torch.float64),
    ],
)
def test_a_reward_may_not_change_torch(name, own, other):
    set_to = getattr(torch, f"set_{name}")
    task = small_rewards.rows([lambda completion: set_to(other) or 1.0])
    completion = Completion((1,), (0.0,), "a", "stop")
    with pytest.raises(UserError, match=f"torch.set_{name}; set it back to {own}"):
        score_groups(task, [Group(0, small_rewards.problem(), (1,), 1.0, [completion])])
    set_to(own)


# --- foreign kinds of text --------------------------------------------------------------------


def test_foreign_kinds_are_reported_beside_the_test_split(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "KINDS", ("code", "tables"))
    flags = ["--model", str(tiny_model), "--words", "2,3", "--problems", "5", "--greedy"]
    own = evaluated(*flags)
    both = evaluated(*flags, "--foreign")
    assert both[:2] == own
    kinds = [(line["foreign"], line["level"], line["n"], line["split"]) for line in both[2:]]
    assert kinds == [
        (name, level, n, "test")
        for level in (2, 3)
        for name, n in (("code", 3), ("tables", 3), ("all", 6))
    ]
    code, tables, every = both[2:5]
    assert every["mean"] == pytest.approx((code["mean"] + tables["mean"]) / 2)
    said = " ".join(capsys.readouterr().out.split())  # a long title is broken into lines
    assert "2, code" in said and "level 2, code, score" in said

"""Evaluations as users meet them: which problems, sampled how, and what is said when problems run
out or are truncated.
"""

import json
import shlex
from pathlib import Path

import pytest

from data import foreign
from data.corpus import documents_of, load_texts
from data.files import read_jsonl_zst
from grpo.config import Config, load_config
from grpo.evaluate import (
    EvaluationSettings,
    HeldOutRequest,
    Sampling,
    evaluate,
    find_problems,
    summarise,
)
from grpo.records import Group
from grpo.run.logs import read_metrics
from grpo.run.opening import open_run
from grpo.run.reader import load_run
from grpo.run.rollouts import groups_of
from grpo.tools import train
from grpo.tools.evaluation import program as evaluation
from grpo.tools.evaluation.texts import held_out_texts
from tasks.audit import audit
from tasks.base import Problem, Score, load_task, sources_of
from tasks.dataset import write_problems

# A policy must reason for some forty tokens before it can write "52"; here the score only asks for
# length.
PONDER = """
from tasks.base import Problem, Score, key_of

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
"""

# Two problems in all, the same in every split: after the first step nothing is left to evaluate on.
FEW = """
from tasks.base import Problem, Score, UserError, key_of

class Few:
    name, rewards, default_level = "few", (), 1

    def make(self, level, split, rng):
        number = rng.randrange(2)
        return Problem(self.name, level, f"Say {number}", str(number), key_of(number))

    def score(self, problem, completions):
        return [Score(min(1.0, len(text) / 1000), value=1.0) for text in completions]

class NoValidation(Few):
    def make(self, level, split, rng):
        if split == "validation":
            raise UserError(f"--level {level}: there is no problem of the validation split")
        return super().make(level, split, rng)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ponder.py").write_text(PONDER)
    Path("few.py").write_text(FEW)


@pytest.fixture()
def run(tiny_model):
    """Return a function that trains the tiny model for two steps in runs/a."""
    small = (
        "--name a --preflight off --lora-rank 0 --device cpu --prompts 2 --group-size 2 --steps 2"
    )
    evaluations = "--eval-problems 3 --eval-every 1"

    def start(*arguments):
        flags = [*small.split(), *evaluations.split(), "--model", str(tiny_model)]
        return train.main([*flags, *arguments])

    return start


def evaluated(*arguments):
    """Return the lines that eval.py writes to --json."""
    assert evaluation.main([*arguments, "--json", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


def longest(name):
    """Return the length of the longest completion of level 1 in a file of rollouts, in tokens."""
    groups = groups_of(Path("runs/a/rollouts") / f"{name}.jsonl.zst")
    return max(
        len(completion.tokens)
        for group in groups
        for completion in group.completions
        if group.problem.level == 1
    )


CLIMB = [
    "--curriculum",
    "1,2",
    "--config",
    "{promote_every: 1}",
    "--config",
    "{promote_problems: 3}",
]


@pytest.mark.parametrize(
    ("task", "flags", "budget"),
    [
        ("ponder.py:Ponder", ["--max-new-tokens", "40"], 40),
        ("ponder.py:Declaring", [], 40),
        ("ponder.py:Declaring", ["--max-new-tokens", "20"], 20),
    ],
)
def test_training_evaluation_and_promotion_have_one_budget(run, capsys, task, flags, budget):
    assert run("--task", task, *CLIMB, "--promote-at", "0.01", *flags) == 0
    assert {longest(name) for name in ("step-000001", "eval-000000", "promotion-000001")} == {
        budget
    }
    lines = load_run("runs/a").evals
    assert {line["budget"] for line in lines if line["level"] == 1} == {budget}
    said = capsys.readouterr().out
    assert f"up to {flags[1] if flags else 41} new tokens" in said  # 41: declared for level 2

    (line,) = evaluated("--model", "runs/a", "--task", task, "--words", "1", "--problems", "3")
    assert line["budget"] == budget and line["truncated"] == 1
    assert "100% of the completions were truncated" in capsys.readouterr().out


def test_without_a_budget_of_its_own_a_task_gets_a_quarter_more_than_the_target(run, capsys):
    assert run("--task", "ponder.py:Ponder") == 0
    assert longest("eval-000000") == longest("step-000001") < 10
    assert "a quarter more new tokens than the target takes" in capsys.readouterr().out


def test_a_wrong_declaration_is_one_line(capsys, run):
    Path("ponder.py").write_text(PONDER.replace("39 + level", "'many'"))
    assert run("--task", "ponder.py:Declaring") == 2
    assert "task ponder: max_new_tokens(1) returned 'many'" in capsys.readouterr().err


def test_truncated_completions_are_counted_and_said_once(run, capsys):
    assert run("--task", "ponder.py:Ponder") == 0
    for line in load_run("runs/a").evals:
        groups = groups_of(Path(f"runs/a/rollouts/eval-{line['step']:06}.jsonl.zst"))
        cut = [c.finish == "length" for group in groups for c in group.completions]
        assert line["truncated"] == sum(cut) / len(cut) > 0.5
    said = capsys.readouterr().out
    assert said.count("% of the completions were truncated at the budget of") == 1
    assert "give a larger --max-new-tokens" in said and "truncated 1" in said


def test_an_evaluation_is_sampled_as_the_run_was(run, capsys):
    """The run's own settings hold in its evaluations and in eval.py, by the command that the run
    prints as well.
    """
    settings = {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "max_new_tokens": 9}
    flags = ["--config", json.dumps(settings)]
    options = ["--task", "arithmetic", "--family", "product", "--level", "12"]
    assert run(*options, *flags) == 0
    said = capsys.readouterr().out
    assert "temperature 0.7, top-k 7, top-p 0.9" in said
    assert "up to 9 new tokens (--max-new-tokens)" in said

    (command,) = [line for line in said.splitlines() if "python eval.py" in line]
    (printed,) = evaluated(*shlex.split(command)[2:], "--problems", "5")
    (short,) = evaluated("--model", "runs/a", "--problems", "5")
    assert short == printed
    assert {name: short[name] for name in settings} == settings
    assert (short["task"], short["family"], short["level"], short["budget"]) == (
        "arithmetic",
        "product",
        12,
        9,
    )

    lines = load_run("runs/a").evals
    for name in ("temperature", "top_k", "top_p"):
        assert {line[name] for line in lines} == {settings[name]}

    (changed,) = evaluated("--model", "runs/a", "--problems", "5", "--top-k", "0", "--top-p", "1")
    assert (changed["top_k"], changed["top_p"], changed["temperature"]) == (0, 1, 0.7)
    (greedy,) = evaluated("--model", "runs/a", "--problems", "5", "--greedy")
    (likeliest,) = evaluated("--model", "runs/a", "--problems", "5", "--top-k", "1")
    assert greedy["temperature"] == 0 and greedy["mean"] == likeliest["mean"]


def test_top_k_and_top_p_hold_in_the_evaluations_of_a_run(run):
    """From the likeliest token alone every evaluation writes what greedy decoding writes."""
    assert (
        run("--task", "ponder.py:Ponder", "--config", "{top_k: 1}", "--learning-rate", "1e-9") == 0
    )
    first, last = (read_jsonl_zst(Path(f"runs/a/rollouts/eval-00000{i}.jsonl.zst")) for i in (0, 2))
    assert [line["completions"][0]["logprobs"] for line in first] == [
        [0.0] * len(line["completions"][0]["tokens"]) for line in first
    ]
    assert [line["completions"][0]["text"] for line in first] == [
        line["completions"][0]["text"] for line in last
    ]


def test_another_task_does_not_inherit_the_runs_options_and_level(run):
    assert run("--task", "arithmetic", "--family", "product", "--level", "12") == 0
    (other,) = evaluated("--model", "runs/a", "--task", "interleave", "--problems", "2")
    assert other["level"] == 25 and "family" not in other
    (chain,) = evaluated("--model", "runs/a", "--family", "chain", "--problems", "2")
    assert (chain["task"], chain["family"], chain["level"]) == ("arithmetic", "chain", 2)


def test_a_runs_task_file_is_not_executed_unless_it_is_named(run, capsys):
    assert run("--task", "ponder.py:Ponder") == 0
    capsys.readouterr()
    Path("ponder.py").write_text("raise SystemExit('executed')")
    assert evaluation.main(["--model", "runs/a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "if you trust it, give --task ponder.py:Ponder" in error


def test_few_problems_are_evaluated_once_each(run, capsys):
    options = ["--task", "arithmetic", "--family", "product", "--level", "11"]
    assert run(*options, "--eval-problems", "200") == 0
    for line in load_run("runs/a").evals:
        groups = groups_of(Path(f"runs/a/rollouts/eval-{line['step']:06}.jsonl.zst"))
        keys = [group.problem.key for group in groups]
        assert len(set(keys)) == len(keys) == line["n"] < line["asked"] == 200
    n = line["n"]
    assert f"n = {n} distinct problems, 200 asked for" in capsys.readouterr().out
    assert audit(Path("runs/a"))[0] == []

    (line,) = evaluated("--model", "runs/a")
    assert (line["n"], line["asked"]) == (3, 200)
    assert "3 distinct problems at level 11; 200 asked for" in capsys.readouterr().out


def test_duplicate_lines_of_a_dataset_count_once(tiny_model, capsys):
    problems = [Problem("any", 2, f"What is {i % 3}?", str(i), f"key {i % 3}") for i in range(12)]
    write_problems("set.jsonl", problems)
    flags = ["--model", str(tiny_model), "--task", "arithmetic", "--dataset", "set.jsonl"]
    (line,) = evaluated(*flags)
    assert (line["n"], line["asked"]) == (3, 200)
    assert "3 distinct problems at level 2; 200 asked for" in capsys.readouterr().out
    assert evaluation.main([*flags, "--words", "9"]) == 2
    assert "set.jsonl, level 9: there is no problem" in capsys.readouterr().err


def test_an_evaluation_without_problems_is_skipped_and_the_run_goes_on(run, capsys):
    assert run("--task", "few.py:Few", "--steps", "4", *CLIMB, "--promote-at", "0.01") == 0
    said = capsys.readouterr().out
    assert "n = 2 distinct problems, 3 asked for" in said
    nothing_left = "at level 1: no problem is left: all 2 that were found were trained on"
    assert said.count(f"warning: no report evaluation {nothing_left}") == 1
    assert said.count(f"warning: no promotion evaluation {nothing_left}") == 1
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 4
    steps = [line["step"] for line in load_run("runs/a").evals]
    stored = [path.name for path in sorted(Path("runs/a/rollouts").glob("eval-*"))]
    assert set(steps) == {0} and stored == ["eval-000000.jsonl.zst"]

    assert evaluation.main(["--model", "runs/a", "--task", "few.py:Few", "--words", "1"]) == 2
    assert "no problem is left: all 2 that were found" in capsys.readouterr().err


def test_a_split_without_a_problem_ends_no_run(run, capsys):
    assert run("--task", "few.py:NoValidation") == 0
    said = capsys.readouterr().out
    assert said.count("warning: no report evaluation at level 1: --level 1: there is no") == 1
    assert "python eval.py --model runs/a" in said
    assert not load_run("runs/a").evals
    assert train.main(["--resume", "runs/a", "--task", "few.py:NoValidation", "--steps", "3"]) == 0
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 3


def test_a_problem_beyond_the_budget_ends_no_run(run):
    """Where one target takes more than --max-new-tokens it is passed over, in training and in
    evaluations.
    """
    fits, too_long = "52", "'five ' * 60"
    source = PONDER.replace('"52"', f"'52' if split == 'train' or rng.randrange(2) else {too_long}")
    Path("ponder.py").write_text(source)
    problems = [
        Problem("ponder", 1, f"What is {i}?", fits if i % 2 else "five " * 60, f"key {i}")
        for i in range(8)
    ]
    write_problems("set.jsonl", problems)

    flags = ["--task", "ponder.py:Ponder", "--max-new-tokens", "40", "--dataset", "set.jsonl"]
    assert run(*flags, "--eval-problems", "20") == 0
    for line in load_run("runs/a").evals:
        assert line["n"] == 20 and 5 < line["too_long"] < 50
    steps = [groups_of(Path(f"runs/a/rollouts/step-00000{i}.jsonl.zst")) for i in (1, 2)]
    assert {group.problem.target for groups in steps for group in groups} == {fits}


def test_samples_of_a_problem_are_independent_draws(tiny_policy):
    task = load_task("ponder.py:Ponder")
    found = find_problems(
        tiny_policy, task, HeldOutRequest(1, "test", seed=0, size=5), set(), Sampling()
    )
    one = evaluate(tiny_policy, task, found.problems)
    many = evaluate(tiny_policy, task, found.problems, EvaluationSettings(samples=8))
    assert [group.texts[0] for group in many] == [group.texts[0] for group in one]
    assert all(len(group.completions) == 8 == len(set(group.texts)) for group in many)
    other = evaluate(tiny_policy, task, found.problems, EvaluationSettings(seed=1, samples=8))
    assert all(not set(a.texts) & set(b.texts) for a, b in zip(many, other))


def test_a_problem_counts_by_the_mean_of_its_samples():
    values = [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    groups = [
        Group(0, None, (1,), 1.0, [], scores=[Score(v, exact=v == 1) for v in row])
        for row in values
    ]
    line, means = (
        summarise(groups),
        summarise([Group(0, None, (1,), 1.0, [], scores=[Score(sum(row) / 4)]) for row in values]),
    )
    assert line["n"] == 3 and line["mean"] == line["exact"] == pytest.approx(2 / 3)
    assert (line["ci_low"], line["ci_high"]) == (means["ci_low"], means["ci_high"])


def test_more_samples_are_shown(tiny_model, capsys):
    flags = ["--model", str(tiny_model), "--task", "ponder.py:Ponder", "--problems", "4"]
    (many,) = evaluated(*flags, "--samples", "16")
    assert (many["samples"], many["n"]) == (16, 4)
    assert "4 × 16" in capsys.readouterr().out


# ---- the user's own texts


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
    """What is evaluated on texts that a run has trained with is its test split; new texts are all
    evaluated on.
    """
    assert run("--texts", str(notes), "--words", "3") == 0
    said = capsys.readouterr().out
    assert "problems  fresh, from 40 texts" in said
    assert load_config(Path("runs/a/config.yaml")).task_options == {"texts": str(notes)}
    assert words_of("runs/a/rollouts/step-000001.jsonl.zst") <= words_in("train", notes)
    assert words_of("runs/a/rollouts/eval-000000.jsonl.zst") <= words_in("validation", notes)
    assert audit(Path("runs/a"))[0] == []

    (command,) = [line for line in said.splitlines() if "python eval.py" in line]
    flags = [*shlex.split(command)[2:], "--problems", "60"]
    (line,) = evaluated(*flags)
    assert line["texts"] == str(notes) and (line["level"], line["split"]) == (3, "test")
    held_out = len(documents_of("test", load_texts(notes)))
    assert f"{40 - held_out} texts are left out" in capsys.readouterr().out

    later = Path("later")  # a checkpoint of a run that began from this one
    later.mkdir()
    (later / "sources.json").write_text('{"corpus": {}, "accepted": []}')
    task = load_task("interleave", options={"texts": str(notes)})
    unseen = held_out_texts(task, later, Config(model="runs/a"))
    assert len(sources_of(unseen)) == held_out

    other = notes.parent / "others"
    other.mkdir()
    (other / "old.txt").write_text((notes / "00.md").read_text())
    for i in range(2):
        (other / f"{i}.txt").write_text(" ".join(f"new{i}.{j}" for j in range(4)))
    (line,) = evaluated("--model", "runs/a", "--texts", str(other), "--problems", "60")
    # Two texts of two windows each: eight ordered pairs, and none of the text that was trained on.
    assert (line["n"], line["level"]) == (8, 3)
    assert evaluation.main(["--model", "runs/a", "--texts", str(other), "--words", "5"]) == 2
    assert "0 of the 2 texts that the model was not trained on" in capsys.readouterr().err


def test_a_run_is_named_after_the_folder_and_not_its_path():
    config = Config(level=3, task_options={"texts": "/home/somebody/My Notes/"})
    assert open_run(config, {}, home=Path("runs"))[0].folder.name == "interleave-mynotes-3-seed0"


def test_a_run_whose_texts_have_changed_does_not_go_on_unawares(run, notes, capsys):
    assert run("--texts", str(notes), "--words", "3") == 0
    (notes / "00.md").write_text("another text altogether")
    assert any("the corpus has changed since" in line for line in audit(Path("runs/a"))[0])
    capsys.readouterr()
    assert train.main(["--resume", "runs/a", "--steps", "3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "corpus: 00.md" in error
    assert train.main(["--resume", "runs/a", "--steps", "3", "--accept-changes", "corpus"]) == 0
    capsys.readouterr()
    assert evaluation.main(["--model", "runs/a", "--problems", "3"]) == 0
    assert "not all texts that the run was trained on are known" in capsys.readouterr().err


def test_a_task_without_texts_refuses_them_in_one_line(run, notes, capsys):
    flags = ["--task", "arithmetic", "--texts", str(notes)]
    fault = "--texts: task arithmetic has no such flag; it has --family, --operands, --operators\n"
    assert run(*flags) == 2 and not Path("runs").exists()
    assert capsys.readouterr().err == f"train.py: {fault}"
    assert evaluation.main(flags) == 2
    assert capsys.readouterr().err == f"eval.py: {fault}"


def test_too_few_texts_are_one_line_before_anything_is_written(run, notes, capsys):
    assert run("--texts", str(notes), "--words", "31") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "0 of its 40 texts have 31 words or more" in error
    assert not Path("runs").exists()
    assert run("--texts", "nowhere") == 2
    assert (
        capsys.readouterr().err == "train.py: nowhere: cannot be read: No such file or directory\n"
    )


def words_of(file):
    return {
        word
        for line in read_jsonl_zst(Path(file))
        for text in line["problem"]["data"].values()
        for word in text
    }


def words_in(split, folder):
    return {word for document in documents_of(split, load_texts(folder)) for word in document.words}


# ---- foreign kinds of text


def test_foreign_kinds_are_reported_beside_the_test_split(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(foreign, "KINDS", {"code": foreign._code, "tables": foreign._table})
    monkeypatch.setattr(foreign, "_licences", list)
    monkeypatch.setattr(foreign, "_manual", list)
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
    assert "similarity on foreign kinds of text" in said and "level 2, foreign code, score" in said


def test_a_task_without_foreign_kinds_says_so(tiny_model, capsys):
    assert evaluation.main(["--model", str(tiny_model), "--task", "arithmetic", "--foreign"]) == 2
    assert "--foreign: task arithmetic has no foreign kinds of text" in capsys.readouterr().err


def test_a_foreign_kind_that_does_not_fit_the_model_has_no_line(tiny_model, monkeypatch, capsys):
    def long(rng, number):
        return " ".join(f"{rng.random():.600f}" for _ in range(9))

    monkeypatch.setattr(foreign, "KINDS", {"code": foreign._code, "long": long})
    monkeypatch.setattr(foreign, "_licences", list)
    monkeypatch.setattr(foreign, "_manual", list)
    flags = ["--model", str(tiny_model), "--words", "2", "--problems", "4", "--foreign"]
    lines = evaluated(*flags)
    assert [line.get("foreign") for line in lines] == [None, "code", "all"]
    assert lines[-1]["too_long"] > 0 and lines[-1]["n"] == 2
    assert "level 2, foreign all: 2 distinct" not in capsys.readouterr().out
    monkeypatch.setattr(foreign, "KINDS", {"long": long})
    assert evaluation.main(flags) == 2
    assert "--foreign: no problem of level 2 fits the model" in capsys.readouterr().err


def test_an_empty_task_is_no_task(capsys):
    assert evaluation.main(["--task", "", "--problems", "2"]) == 2
    assert "--task : no such task" in capsys.readouterr().err

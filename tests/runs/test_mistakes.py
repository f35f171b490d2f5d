"""Bad command lines, of `train.py` and `eval.py`, get one line."""

import os
from pathlib import Path

import pytest
from small_train import SMALL, fails, make_set, run
from tiny_models import make_tiny_model

from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at, write_problems
from grpo.tools import evaluation


def test_bad_command_lines(tmp_path, capsys):
    said = lambda *arguments: fails(capsys, *arguments)  # noqa: E731
    for name in ("a\nb", "a\u202eb", "a/b", "..", os.fsdecode(b"\xe9")):
        assert "give the plain name of a folder in runs" in said("--name", name)
    assert said("--wrods", "5") == "train.py: --wrods: no such flag; did you mean --words?"
    assert "--task juggling: no such task" in said("--task", "juggling")
    assert "--reward money: task interleave has no such reward" in said("--reward", "money")
    assert "invalid int value: 'ten'" in said("--words", "ten")
    assert "--group-size 1: give 2 or more" in said("--group-size", "1")
    assert "--temperature 0.0: give a number above 0" in said("--temperature", "0")
    assert said("--credit", "alignment", "--task", "arithmetic") == (
        "train.py: --credit alignment: task arithmetic does not say what each word of a completion "
        "earns; give --credit outcome"
    )
    assert "--credit alignment: gspo weighs whole sequences" in said(
        "--credit", "alignment", "--loss", "gspo"
    )
    assert "--curriculum 25,10: give rising whole numbers" in said("--curriculum", "25,10")
    assert "--curriculum auto: give rising whole numbers" in said("--curriculum", "auto")
    assert "--words 5000: of 96 texts" in said("--words", "5000")
    assert "--max-new-tokens 3: the right answer takes" in said(
        "--words", "6", "--max-new-tokens", "3"
    )
    (tmp_path / "empty").mkdir()
    assert "--model empty: no model there" in said("--model", "empty")
    assert "--model no/such/model: no such directory" in said("--model", "no/such/model")
    make_tiny_model(tmp_path / "short", context=100)
    assert "its context of 100 tokens is too short" in said("--model", "short", "--lora-rank", "0")
    assert "--resume nowhere: not a run" in said("--resume", "nowhere")
    assert "--resume empty: not a run" in said("--resume", "empty")
    assert "--resume: no run in runs/" in said("--resume")
    assert not Path("runs").exists()  # nothing was begun


@pytest.mark.slow
def test_bad_command_lines_of_runs_and_datasets(tmp_path, capsys):
    run("--name", "a", "--steps", "2")
    assert "--name a: runs/a exists" in fails(capsys, *SMALL, "--name", "a")
    assert "--seed 5: the run in runs/a has 0" in fails(capsys, "--resume", "runs/a", "--seed", "5")
    config = Path("runs/a/config.yaml")
    config.write_text(config.read_text() + "colour: red\n")
    assert "unknown key colour" in fails(capsys, "--resume", "runs/a")
    problems = [
        problem_at(load_task("interleave"), seed=0, split="train", level=6, index=i)
        for i in range(3)
    ]
    write_problems(tmp_path / "set.jsonl", problems)
    lines = (tmp_path / "set.jsonl").read_text().splitlines()
    (tmp_path / "set.jsonl").write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n")
    assert "set.jsonl, line 2" in fails(capsys, *SMALL, "--dataset", "set.jsonl")


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            ["--words", "25"],
            "--words 25: set.jsonl has no problem of level 25; it has those of 4, 12",
        ),
        (
            ["--curriculum", "4,10,12"],
            "--curriculum 4,10,12: set.jsonl has no problem of level 10; it has those of 4, 12",
        ),
    ],
)
def test_a_level_that_the_dataset_lacks_is_refused(tmp_path, capsys, flags, line):
    make_set(tmp_path / "set.jsonl", 12, 4)
    assert fails(capsys, "--dataset", "set.jsonl", *flags) == f"train.py: {line}"
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_dataset_of_held_out_problems_is_refused(tmp_path, capsys):
    make_set("interleave-validation-4.jsonl", 4)
    assert fails(capsys, "--dataset", "interleave-validation-4.jsonl") == (
        "train.py: --dataset interleave-validation-4.jsonl: its problems are of the validation "
        "split, which evaluations use; give a data set of the train split"
    )


@pytest.mark.slow
def test_bad_evaluations(capsys):
    said = lambda *arguments: fails(capsys, *arguments, main=evaluation.main)  # noqa: E731
    assert "--words 10,x: give rising whole numbers" in said("--words", "10,x")
    assert "--problems 0: give 1 or more" in said("--problems", "0")
    assert "--samples 0: give 1 or more" in said("--samples", "0")
    assert "--temperature -1.0: give 0 or more" in said("--temperature", "-1")
    assert "--temperature nan: give 0 or more" in said("--temperature", "nan")
    assert "not allowed with argument --greedy" in said("--greedy", "--temperature", "1")
    assert "--top-p 0.0: give a number above 0 and up to 1" in said("--top-p", "0")
    assert "--max-new-tokens -3: give 0 or more" in said("--max-new-tokens", "-3")
    assert "--max-new-tokens 3: the right answer takes" in said("--max-new-tokens", "3")
    assert "--colour: no such flag; python eval.py --help lists" in said("--colour", "red")
    assert "--task juggling: no such task" in said("--task", "juggling")

"""Bad command lines, of `train.py` and `eval.py`, get one line."""

import os
from pathlib import Path

import pytest
from small_runs import FEW, OWN
from small_train import fails, make_set
from tiny_models import make_tiny_model

from grpo.tools import evaluation


def test_bad_command_lines(tmp_path, capsys):
    said = lambda *arguments: fails(capsys, *arguments)  # noqa: E731
    for name in ("a\nb", "a\u202eb", "a/b", "..", os.fsdecode(b"\xe9")):
        assert "give the plain name of a folder in runs" in said("--name", name)
    assert "invalid int value: 'ten'" in said("--words", "ten")
    assert said("--credit", "alignment", "--task", "arithmetic") == (
        "train.py: --credit alignment: task arithmetic does not say what each word of a completion "
        "earns; give --credit outcome"
    )
    assert "--curriculum 25,10: give rising whole numbers" in said("--curriculum", "25,10")
    assert "--curriculum auto: give rising whole numbers" in said("--curriculum", "auto")
    assert "--words 5000: of 96 texts" in said("--words", "5000")
    assert "--max-new-tokens 3: the right answer takes" in said(
        "--words", "6", "--max-new-tokens", "3"
    )
    make_tiny_model(tmp_path / "short", context=100)
    assert "its context of 100 tokens is too short" in said("--model", "short", "--lora-rank", "0")
    assert "--resume: no run in runs/" in said("--resume")
    assert not Path("runs").exists()  # nothing was begun


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


def test_a_task_that_draws_otherwise_than_by_its_generator_is_refused(capsys, tiny_flags):
    """A resumed run would have other problems, and the held-out ones would change."""
    Path("own.py").write_text("import random\n" + OWN.replace("rng.randrange", "random.randrange"))
    flags = ["--task", "own.py:Own", "--name", "a", "--max-new-tokens", "8", *FEW, *tiny_flags]
    assert fails(capsys, *flags) == (
        "train.py: task own: make(1, 'train', rng) returned two problems for the same random "
        "numbers; draw everything with rng"
    )
    assert not Path("runs").exists()

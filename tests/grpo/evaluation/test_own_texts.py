"""Evaluations on a user's own texts, and on foreign ones."""

import shlex
from pathlib import Path

import pytest
from small_evaluations import evaluated

from data import corpus
from data.corpus import documents_of, load_texts
from data.files import read_jsonl_zst
from grpo.config import load_config
from grpo.tools import evaluation
from tasks.audit import audit

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
    assert line["dropped"] == 0


def test_a_task_without_texts_refuses_them_in_one_line(run, notes, capsys):
    flags = ["--task", "arithmetic", "--texts", str(notes)]
    fault = "--texts: task arithmetic has no such flag; it has --family\n"
    assert run(*flags) == 2 and not Path("runs").exists()
    assert capsys.readouterr().err == f"train.py: {fault}"
    assert evaluation.main(flags) == 2
    assert capsys.readouterr().err == f"eval.py: {fault}"


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

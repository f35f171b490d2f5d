"""A run goes on with what it began with: a base, dataset, corpus, configuration or task that has
changed since is refused.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from small_runs import FEW, OWN
from tiny_models import make_tiny_model

from grpo import export
from grpo.data import corpus
from grpo.data.errors import UserError
from grpo.run import resume as resuming
from grpo.run.resume import base_sources, commit, digest_of, locked, require_same
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at, write_problems
from grpo.tools import evaluation, train

SMALL = [*FEW, *"--save-every 1 --config {'eval_problems':2,'schedule':'constant'}".split()]
LORA = [*SMALL, "--model", "model", "--lora-rank", "2", "--words", "2", "--dataset", "set.jsonl"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two runs of one step, and with all that they depend on."""
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model")
    shutil.copytree(corpus.TEXTS, folder / "texts")
    task = load_task("interleave")
    problems = [problem_at(task, seed=3, split="train", level=2, index=i) for i in range(6)]
    write_problems(folder / "set.jsonl", problems)
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(corpus, "TEXTS", folder / "texts")
        assert train.main([*LORA, "--steps", "1", "--name", "lora"]) == 0
        own = [*SMALL, "--task", "own.py:Own", "--max-new-tokens", "8"]
        assert train.main([*own, "--steps", "1", "--name", "own"]) == 0
    return folder


@pytest.fixture()
def here(home, tmp_path, monkeypatch):
    """A copy of it, to be changed."""
    folder = Path(shutil.copytree(home, tmp_path / "here"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(corpus, "TEXTS", folder / "texts")
    return folder


def replace_weights():
    shutil.rmtree("model")
    make_tiny_model(Path("model"), seed=1)


def replace_template():
    path = Path("model/chat_template.jinja")
    path.write_text(path.read_text() + " ")


def edit_dataset():
    lines = Path("set.jsonl").read_text().splitlines()
    Path("set.jsonl").write_text("\n".join(lines[:-1]) + "\n")


def grow_corpus():
    Path("texts/tale-new.txt").write_text("A tale of many words that nobody has told before. " * 9)


def edit_config():
    path = Path("runs/lora/config.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"learning_rate": 0.5}))


def edit_task():
    Path("own.py").write_text(OWN.replace("0.1 * i", "0.2 * i"))


CASES = {
    "weights": (replace_weights, "lora", "base: model.safetensors "),
    "chat template": (replace_template, "lora", "base: chat_template.jinja "),
    "dataset": (edit_dataset, "lora", "files: set.jsonl "),
    "grown corpus": (grow_corpus, "lora", "corpus: tale-new absent → "),
    "config": (edit_config, "lora", "config: learning_rate 0.001 → 0.5;"),
    "task": (edit_task, "own", "files: own.py "),
}


def everything(folder):
    """Return what cannot change without being noticed."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in str(path) and path.name != ".lock"
    }


def said_by(capsys, *arguments, main=train.main, status=2):
    capsys.readouterr()
    # The random model of the run "lora" has nothing to learn from.
    assert main(list(arguments)) in ((0, 3) if status == 0 else (status,))
    return capsys.readouterr()


def resume(name):
    own = ["--task", "own.py:Own"] if name == "own" else []
    return ["--resume", f"runs/{name}", "--steps", "2", *own]


@pytest.mark.parametrize("case", CASES)
def test_what_has_changed_is_refused_and_named(here, capsys, case):
    change, run, said = CASES[case]
    change()
    before = everything(here)
    (line,) = said_by(capsys, *resume(run)).err.splitlines()
    checkpoint = f"runs/{run}/checkpoints/step-000001"
    assert line.startswith(f"train.py: {checkpoint}: changed since it was saved: {said}")
    assert line.endswith(f"; undo that, or start a new run with --model runs/{run}")
    assert everything(here) == before


def test_all_changes_stand_in_one_line(here, capsys):
    for change in (grow_corpus, edit_config, replace_weights):
        change()
    (line,) = said_by(capsys, *resume("lora")).err.splitlines()
    assert "base: model.safetensors " in line and "corpus: tale-new " in line
    assert "; config: learning_rate " in line


def warnings_in(said):
    """The warnings of a run, but for those of the tiny model's completions, which never end."""
    lines = [line for line in said.splitlines() if "warning: " in line]
    return [line for line in lines if "were truncated" not in line]


def test_without_a_value_the_latest_run_with_a_checkpoint_is_resumed(here, capsys):
    shutil.copytree("runs/own", "runs/cut", ignore=lambda *_: ["checkpoints"])
    Path("runs/lora/config.yaml").touch()
    os.utime("runs/cut/config.yaml", (2e9, 2e9))
    (line,) = said_by(capsys, "--resume", "--seed", "9").err.splitlines()
    assert "--seed 9: the run in runs/lora has 0" in line


def test_nothing_changed_and_what_resume_may_change(here, capsys):
    said = said_by(capsys, *resume("lora"), status=0).out
    assert not warnings_in(said)
    said = said_by(
        capsys, "--resume", "runs/lora", "--steps", "3", "--eval-every", "2", status=0
    ).out
    assert not warnings_in(said) and "step 3/3" in said


def test_a_run_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"), locked(tmp_path):
        pass


def test_a_layout_that_changes_no_word_is_no_change(here, capsys):
    path = Path("texts/tale-flood.txt")
    path.write_text("\n".join(path.read_text().split()))
    Path("model/README.md").write_text("about it")
    assert not warnings_in(said_by(capsys, *resume("lora"), status=0).out)


def test_an_adapter_is_not_evaluated_or_exported_on_another_base(here, capsys):
    replace_weights()
    scored = ["--model", "runs/lora", "--words", "2", "--problems", "2", "--device", "cpu"]
    for main, arguments in ((evaluation.main, scored), (export.main, ["runs/lora", "exported"])):
        (line,) = said_by(capsys, *arguments, main=main).err.splitlines()
        assert "runs/lora/checkpoints/step-000001: changed since it was saved: base: " in line
        assert line.endswith("; undo that") and not Path("exported").exists()


# Fingerprints.


def test_a_model_of_the_hub_that_is_not_on_disk_has_none(monkeypatch, tmp_path):
    def absent(*_, **__):
        raise ValueError("not there")

    monkeypatch.setattr(resuming, "snapshot_download", absent)
    assert base_sources("someone/something") is None
    monkeypatch.setattr(resuming, "snapshot_download", lambda *_, **__: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert set(base_sources("someone/something")) == {"config.json"}


@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.jsonl"])
def test_a_file_that_differs_has_another_fingerprint(tmp_path, monkeypatch, name):
    """Of large weights, the pages between those that are read do not count."""
    monkeypatch.setattr(resuming, "PAGE", 10)
    monkeypatch.setattr(resuming, "PAGES", 4)
    path, content = tmp_path / name, bytes(100)
    path.write_bytes(content)
    before = digest_of(path)
    for place in (0, 9, 15, 30, 60, 99):
        path.write_bytes(content[:place] + b"1" + content[place + 1 :])
        assert (digest_of(path) == before) == (place == 15 and name != "x.jsonl")
    path.write_bytes(content + b"0")
    assert digest_of(path) != before


@pytest.mark.parametrize("content", ["[]", '{"base": 3}', None])
def test_what_holds_no_sources_is_one_line(tmp_path, content):
    if content:
        (tmp_path / "sources.json").write_text(content)
    with pytest.raises(UserError, match="sources.json"):
        require_same(tmp_path, {})


def test_the_commit_is_that_of_the_code_itself(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert commit(tmp_path) is None  # no repository
    git("init", "-q")
    assert commit(tmp_path) is None  # no commit
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "venv").mkdir()
    assert commit(tmp_path / "venv") is None  # installed within the repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None  # git is not installed

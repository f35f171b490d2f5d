"""A run goes on with what it began with: a base, dataset, corpus, configuration or task that has
changed since is refused.
"""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from small_runs import OWN
from tiny_models import make_tiny_model

import data.corpus
from data.errors import UserError
from grpo.run import checkpoint as store
from grpo.run import resume as resuming
from grpo.run.logs import MetricsLog
from grpo.run.resume import (
    PAGE,
    PAGES,
    base_sources,
    commit,
    differences,
    read_sources,
    require_same,
    weights_digest,
)
from grpo.run.session import Run
from grpo.tools import export, train
from grpo.tools.evaluation import program as evaluation
from tasks import audit
from tasks.base import sources_of, summary_of
from tasks.registry import load_task
from tasks.supply import problem_at, write_problems

SMALL = (
    "--prompts 2 --group-size 4 --preflight off --eval-problems 2 --save-every 1 "
    "--config {'schedule':'constant'} --device cpu"
).split()
LORA = [*SMALL, "--model", "model", "--lora-rank", "2", "--words", "2", "--dataset", "set.jsonl"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two runs of one step, and with all that they depend on."""
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model")
    shutil.copytree(data.corpus.TEXTS, folder / "texts")
    task = load_task("interleave")
    problems = [problem_at(task, seed=3, split="train", level=2, index=i) for i in range(6)]
    write_problems(folder / "set.jsonl", problems)
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(data.corpus, "TEXTS", folder / "texts")
        assert train.main([*LORA, "--steps", "1", "--name", "lora"]) == 3  # no signal
        own = [*SMALL, "--task", "own.py:Own", "--max-new-tokens", "8"]
        assert train.main([*own, "--steps", "1", "--name", "own"]) == 0
    return folder


@pytest.fixture()
def here(home, tmp_path, monkeypatch):
    """A copy of it, to be changed."""
    folder = Path(shutil.copytree(home, tmp_path / "here"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(data.corpus, "TEXTS", folder / "texts")
    store._verified.clear()
    return folder


def replace_weights():
    shutil.rmtree("model")
    make_tiny_model(Path("model"), seed=1)


def replace_tokenizer():
    path = Path("model/tokenizer.json")
    path.write_text(path.read_text() + "\n")


def replace_template():
    path = Path("model/chat_template.jinja")
    path.write_text(path.read_text() + " ")


def edit_dataset():
    lines = Path("set.jsonl").read_text().splitlines()
    Path("set.jsonl").write_text("\n".join(lines[:-1]) + "\n")


def grow_corpus():
    Path("texts/tale-new.txt").write_text("A tale of many words that nobody has told before. " * 9)


def edit_corpus():
    path = Path("texts/tale-flood.txt")
    path.write_text(path.read_text() + " The end.")


def edit_config():
    path = Path("runs/lora/config.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"learning_rate": 0.5}))


def edit_task():
    Path("own.py").write_text(OWN.replace("0.1 * i", "0.2 * i"))


CASES = {
    "weights": (replace_weights, "lora", "base: model.safetensors "),
    "tokenizer": (replace_tokenizer, "lora", "base: tokenizer.json "),
    "chat template": (replace_template, "lora", "base: chat_template.jinja "),
    "dataset": (edit_dataset, "lora", "dataset: set.jsonl "),
    "grown corpus": (grow_corpus, "lora", "corpus: tale-new absent → "),
    "edited corpus": (edit_corpus, "lora", "corpus: tale-flood "),
    "config": (edit_config, "lora", "config: learning_rate 0.001 → 0.5;"),
    "task": (edit_task, "own", "task: own.py "),
}


def everything(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in str(path)
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


def test_a_base_that_comes_from_the_hub_is_compared_once_it_is_on_disk(here, capsys, monkeypatch):
    """Before the model is loaded nobody knows its files; after that nothing has been
    written yet.
    """
    now, calls = resuming.base_sources, []
    later = lambda model: now(model) if calls else calls.append(model)  # noqa: E731
    monkeypatch.setattr(resuming, "base_sources", later)
    replace_weights()
    before = everything(here)
    (line,) = said_by(capsys, *resume("lora")).err.splitlines()
    assert "changed since it was saved: base: model.safetensors " in line
    changed = {path.name for path, state in everything(here).items() if state != before[path]}
    assert changed <= {".lock"}


def warnings_in(said):
    """The warnings of a run, but for those of the tiny model's completions, which never end."""
    lines = [line for line in said.splitlines() if "warning: " in line]
    return [line for line in lines if "were truncated" not in line]


def test_nothing_changed_and_what_resume_may_change(here, capsys):
    said = said_by(capsys, *resume("lora"), status=0).out
    assert not warnings_in(said)
    said = said_by(
        capsys, "--resume", "runs/lora", "--steps", "3", "--eval-every", "2", status=0
    ).out
    assert not warnings_in(said) and "step 3/3" in said


@pytest.mark.parametrize("name", ["metrics", "seen", "groups"])
def test_a_log_that_is_gone_is_named(here, capsys, name):
    path = Path(f"runs/lora/{name}.jsonl")
    path.unlink()
    said = said_by(capsys, *resume("lora"), status=0).out
    line, *_ = warnings_in(said)
    assert f"warning: {path}: is damaged: it lacks step 1; figures from it are wrong" in line
    assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {2}


@pytest.mark.slow
def test_a_rate_that_rises_again_is_that_of_the_next_step(tmp_path):
    MetricsLog(tmp_path).append({"step": 8, "learning_rate": 1e-5})
    trainer = SimpleNamespace(done=8, learning_rate={8: 2e-5, 9: 3e-5}.__getitem__)
    config = SimpleNamespace(steps=20, schedule="cosine")
    said = []
    run = SimpleNamespace(folder=tmp_path, trainer=trainer, config=config, _warn=said.append)
    Run._warn_of_higher_rate(run)
    assert said == [
        "--steps 20: the learning rate rises from 1e-05 to 3e-05, because the cosine now ends later"
    ]


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_trained_policy_is_never_the_one_before(here, capsys, is_empty):
    """Its lost evaluations are not made up for by those of a policy that has learned."""
    path = Path("runs/lora/eval.jsonl")
    assert json.loads(path.read_text().splitlines()[0])["step"] == 0
    path.write_text("") if is_empty else path.unlink()
    said = said_by(capsys, *resume("lora"), status=0).out
    assert "no held-out problem at 2 words was scored both before and after" in said
    verdict = json.loads(path.read_text().splitlines()[-1])
    assert (verdict["n"], verdict["before"]) == (0, None)


def test_a_layout_that_changes_no_word_is_no_change(here, capsys):
    path = Path("texts/tale-flood.txt")
    path.write_text("\n".join(path.read_text().split()))
    Path("model/README.md").write_text("about it")
    assert not warnings_in(said_by(capsys, *resume("lora"), status=0).out)


def test_the_sources_are_vouched_for_by_the_manifest(here, capsys):
    path = Path("runs/lora/checkpoints/step-000001/sources.json")
    path.write_text(path.read_text().replace("model.safetensors", "other.safetensors"))
    (line,) = said_by(capsys, *resume("lora")).err.splitlines()
    assert "sources.json has " in line or "sources.json is damaged" in line


@pytest.mark.parametrize("change", [replace_weights, replace_tokenizer])
def test_an_adapter_is_not_evaluated_or_exported_on_another_base(here, capsys, change):
    change()
    scored = ["--model", "runs/lora", "--words", "2", "--problems", "2", "--device", "cpu"]
    for main, arguments in ((evaluation.main, scored), (export.main, ["runs/lora", "exported"])):
        (line,) = said_by(capsys, *arguments, main=main).err.splitlines()
        assert "runs/lora/checkpoints/step-000001: changed since it was saved: base: " in line
        assert line.endswith("; undo that") and not Path("exported").exists()


def test_a_whole_model_is_evaluated_without_its_base(here, capsys):
    assert (
        train.main(
            [
                *SMALL,
                "--model",
                "model",
                "--lora-rank",
                "0",
                "--words",
                "2",
                "--steps",
                "1",
                "--name",
                "full",
            ]
        )
        == 3
    )
    replace_weights()
    scored = ["--model", "runs/full", "--words", "2", "--problems", "2", "--device", "cpu"]
    assert said_by(capsys, *scored, main=evaluation.main, status=0).err == ""
    assert "base: model.safetensors" in said_by(capsys, "--resume", "runs/full", "--steps", "2").err


def test_the_audit_sees_a_corpus_that_has_grown(here, capsys):
    assert said_by(capsys, "runs/lora", main=audit.main, status=0).out.endswith("nothing found\n")
    grow_corpus()
    said = said_by(capsys, "runs/lora", main=audit.main, status=1).out
    assert "runs/lora: the corpus has changed since the run: 96 with fingerprint " in said
    assert " then, 97 with fingerprint " in said and "1 findings" in said


def test_the_audit_of_a_task_without_a_corpus(here, capsys):
    grow_corpus()
    own = ["runs/own", "--task", "own.py:Own"]
    assert "nothing found" in said_by(capsys, *own, main=audit.main, status=0).out


# Fingerprints.


def test_the_same_model_elsewhere_has_the_same_fingerprints(tmp_path):
    one, two = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "two")
    (two / "README.md").write_text("about it")
    found = base_sources(str(one))
    assert found == base_sources(str(two))
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(
        found
    )


def test_the_embedded_model_has_fingerprints():
    assert {"model.safetensors", "tokenizer.json"} <= set(base_sources("builtin"))


def test_a_model_of_the_hub_that_is_not_on_disk_has_none(monkeypatch, tmp_path):
    def absent(*_, **__):
        raise ValueError("not there")

    monkeypatch.setattr(resuming, "snapshot_download", absent)
    assert base_sources("someone/something") is None
    monkeypatch.setattr(resuming, "snapshot_download", lambda *_, **__: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert set(base_sources("someone/something")) == {"config.json"}


def written(path, **tensors):
    save_file(tensors, path)
    return weights_digest(path)


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_fine_tuning_one_tensor_is_noticed(tmp_path, name, rank):
    """A LoRA update of one matrix that is merged, or a bias that moved: same shapes, same size."""
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(600, 500, dtype=torch.bfloat16),
        "b": torch.randn(700, 500, dtype=torch.bfloat16),
        "bias": torch.randn(900, dtype=torch.bfloat16),
    }
    before = written(tmp_path / "x", **tensors)
    assert written(tmp_path / "y", **tensors) == before
    tensor = tensors[name].view(-1, 500) if tensors[name].dim() > 1 else tensors[name][:, None]
    update = torch.randn(len(tensor), rank) @ torch.randn(rank, tensor.shape[1])
    tensors[name] = (tensor + 0.05 * update.bfloat16()).view(tensors[name].shape)
    assert written(tmp_path / "x", **tensors) != before


@pytest.mark.parametrize("place", [0, 1, 37, -1])
def test_each_byte_of_a_small_tensor_counts(tmp_path, place):
    tensor = torch.zeros(PAGE * PAGES, dtype=torch.uint8)
    before = written(tmp_path / "x", a=tensor, b=tensor.clone())
    changed = tensor.clone()
    changed[place] = 1
    assert written(tmp_path / "x", a=tensor, b=changed) != before
    assert written(tmp_path / "x", a=changed, b=tensor) != before


def test_the_first_and_last_page_of_a_large_tensor_count(tmp_path):
    tensor = torch.zeros(10 * PAGE * PAGES, dtype=torch.uint8)
    digests = {written(tmp_path / "x", a=tensor)}
    for place in (0, PAGE - 1, -PAGE, -1):
        changed = tensor.clone()
        changed[place] = 1
        digests.add(written(tmp_path / "x", a=changed))
    assert len(digests) == 5


def test_names_and_shapes_count(tmp_path):
    tensor = torch.zeros(6, 4)
    digests = {
        written(tmp_path / "x", a=tensor),
        written(tmp_path / "x", b=tensor),
        written(tmp_path / "x", a=tensor.view(4, 6)),
    }
    assert len(digests) == 3


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 100, b"\x02" + 7 * b"\0" + b"[]"])
def test_a_damaged_file_has_a_fingerprint_too(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    before = weights_digest(tmp_path / "x")
    (tmp_path / "x").write_bytes(content + b"!")
    assert weights_digest(tmp_path / "x") != before


def test_six_gigabytes_are_read_in_samples(tmp_path, monkeypatch):
    """The size of a 3B model, sparse on disk. What is read is counted, not timed."""
    layers = {f"layer.{i}": {"dtype": "U8", "shape": [23_600_000]} for i in range(254)}
    for i, entry in enumerate(layers.values()):
        entry["data_offsets"] = [i * 23_600_000, (i + 1) * 23_600_000]
    header = json.dumps(layers).encode()
    with open(tmp_path / "x", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 254 * 23_600_000)
    read, pread = [], resuming.os.pread
    monkeypatch.setattr(resuming.os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    weights_digest(tmp_path / "x")
    assert 254 * PAGE * PAGES <= sum(read) < 20_000_000


def test_the_corpus_is_named_by_document():
    documents = sources_of(load_task("interleave"))
    assert len(documents) == 96 and "tale-flood" in documents
    assert sources_of(load_task("arithmetic")) == {}
    assert summary_of(documents).startswith("96 with fingerprint ")
    assert summary_of(documents) != summary_of(documents | {"tale-flood": "other"})


def test_differences_are_named_with_both_values():
    then = {"a.json": "1" * 16, "b.json": "2" * 16}
    now = {"a.json": "3" * 16, "c.json": "4" * 16}
    assert differences(then, now) == [
        "a.json 11111111 → 33333333",
        "b.json 22222222 → absent",
        "c.json absent → 44444444",
    ]
    assert differences(None, now) == differences(then, None) == differences(then, then) == []
    assert differences({"rate": 2e-4}, {"rate": 1e-3}, is_config=True) == ["rate 0.0002 → 0.001"]


def test_many_differences_are_counted(tmp_path):
    now = {"corpus": {f"tale-{i}": "5" * 16 for i in range(9)}}
    with pytest.raises(UserError, match=r"tale-2 absent → 55555555, and 6 more; undo that"):
        require_same(tmp_path, {"corpus": {}}, now)


@pytest.mark.parametrize("content", ["[]", '{"base": 3}', "null"])
def test_what_holds_no_sources_is_one_line(tmp_path, content):
    (tmp_path / "sources.json").write_text(content)
    with pytest.raises(UserError, match="does not hold the sources of a run"):
        read_sources(tmp_path)
    (tmp_path / "sources.json").unlink()
    with pytest.raises(UserError, match="sources.json"):
        read_sources(tmp_path)


# The commit.


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_code_itself(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    own = tmp_path / "code.py"
    own.write_text("")
    assert commit(own) is None  # no repository
    git("init", "-q")
    git("add", "code.py")
    assert commit(own) is None  # no commit
    git("commit", "-q", "-m", "first")
    assert commit(own) == git("rev-parse", "HEAD")

    # A package in an environment within the repository.
    installed = tmp_path / "venv" / "facts.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert commit(installed) is None

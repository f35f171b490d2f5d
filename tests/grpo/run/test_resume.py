"""A run goes on with what it began with: a base, dataset, corpus, configuration or task that has
changed since is refused, unless it is named.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from small_runs import OWN
from tiny_models import make_tiny_model

import data.corpus
from grpo.run import checkpoint as store
from grpo.run import sources
from grpo.run.reader import load_run
from grpo.tools import export, train
from grpo.tools.evaluation import program as evaluation
from tasks.audit import audit
from tasks.registry import load_task
from tasks.supply import problem_at, write_problems

SMALL = [
    "--prompts",
    "2",
    "--group-size",
    "4",
    "--preflight",
    "off",
    "--eval-problems",
    "2",
    "--save-every",
    "1",
    "--schedule",
    "constant",
    "--device",
    "cpu",
]
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
    "weights": (replace_weights, "lora", "base", "base: model.safetensors "),
    "tokenizer": (replace_tokenizer, "lora", "base", "base: tokenizer.json "),
    "chat template": (replace_template, "lora", "base", "base: chat_template.jinja "),
    "dataset": (edit_dataset, "lora", "dataset", "dataset: set.jsonl "),
    "grown corpus": (grow_corpus, "lora", "corpus", "corpus: tale-new absent → "),
    "edited corpus": (edit_corpus, "lora", "corpus", "corpus: tale-flood "),
    "config": (edit_config, "lora", "config", "config: learning_rate 0.001 → 0.5;"),
    "task": (edit_task, "own", "task", "task: own.py "),
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
    change, run, kind, said = CASES[case]
    change()
    before = everything(here)
    others = ",".join({"base", "dataset", "corpus", "config", "task"} - {kind})
    for accepted in ([], ["--accept-changes", others]):
        (line,) = said_by(capsys, *resume(run), *accepted).err.splitlines()
        checkpoint = f"runs/{run}/checkpoints/step-000001"
        assert line.startswith(f"train.py: {checkpoint}: changed since it was saved: {said}")
        assert line.endswith(f"; undo that, or if it is intended give --accept-changes {kind}")
        assert everything(here) == before


@pytest.mark.parametrize("case", CASES)
def test_what_has_changed_by_intent_passes_and_is_recorded(here, capsys, case):
    change, run, kind, said = CASES[case]
    change()
    accepted = ["--accept-changes", f"{kind},config,base"]  # what is not needed does no harm
    output = said_by(capsys, *resume(run), *accepted, status=0).out
    checkpoint = f"runs/{run}/checkpoints/step-000001"
    note = f"warning: changed since {checkpoint} was saved, and accepted: {said.rstrip(';')}"
    assert note in " ".join(output.split())

    (fact,) = yaml.safe_load(Path(f"runs/{run}/config.yaml").read_text())["facts"][
        "accepted_changes"
    ]
    assert (fact["step"], fact["kind"]) == (1, kind)
    assert f"{kind}: {fact['change']}".startswith(said.rstrip(";"))
    if case == "config":
        assert yaml.safe_load(Path("runs/lora/config.yaml").read_text())["learning_rate"] == 0.5

    # The next checkpoint has the new ones, and remembers the change.
    output = said_by(capsys, *resume(run), "--steps", "3", status=0).out
    assert "accepted" not in output
    facts = yaml.safe_load(Path(f"runs/{run}/config.yaml").read_text())["facts"]
    assert facts["accepted_changes"] == [fact]


def test_all_changes_stand_in_one_line(here, capsys):
    for change in (grow_corpus, edit_config, replace_weights):
        change()
    (line,) = said_by(capsys, *resume("lora")).err.splitlines()
    assert "base: model.safetensors " in line and "corpus: tale-new " in line
    assert "; config: learning_rate " in line
    assert line.endswith("--accept-changes base,corpus,config")


def test_a_base_that_comes_from_the_hub_is_compared_once_it_is_on_disk(here, capsys, monkeypatch):
    """Before the model is loaded nobody knows its files; after that nothing has been
    written yet.
    """
    folder_of, answers = sources._folder_of, iter([None])
    monkeypatch.setattr(sources, "_folder_of", lambda model: next(answers, folder_of(model)))
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


def test_changes_are_accepted_with_resume_alone(here, capsys):
    said = said_by(capsys, "--words", "2", "--accept-changes", "base", status=2).err
    assert said == "train.py: --accept-changes: applies only with --resume; leave it out\n"


def test_nothing_changed_and_what_resume_may_change(here, capsys):
    said = said_by(capsys, *resume("lora"), status=0).out
    assert not warnings_in(said)
    said = said_by(
        capsys, "--resume", "runs/lora", "--steps", "3", "--eval-every", "2", status=0
    ).out
    assert not warnings_in(said) and "step 3/3" in said


@pytest.mark.parametrize("name", ["metrics", "seen", "groups", "eval"])
def test_a_log_that_is_gone_is_named(here, capsys, name):
    path = Path(f"runs/lora/{name}.jsonl")
    path.unlink()
    said = said_by(capsys, *resume("lora"), status=0).out
    line, *_ = warnings_in(said)
    step = 0 if name == "eval" else 1
    assert f"warning: {path}: is damaged: it lacks step {step}; figures that come from it" in line
    assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {2}


def test_a_damaged_log_is_named_on_resume_and_beside_the_verdict(here, capsys):
    run = Path("runs/lora")
    for name in ("metrics", "seen", "groups"):  # what a kill leaves behind the last checkpoint
        with open(run / f"{name}.jsonl", "a") as file:
            file.write('{"step": 2, "ti')
    said = said_by(capsys, "--resume", "runs/lora", "--steps", "3", status=0).out
    assert not warnings_in(said)

    logs = {name: run / f"{name}.jsonl" for name in ("metrics", "seen", "groups", "eval")}
    lines = {name: path.read_text().splitlines(keepends=True) for name, path in logs.items()}
    logs["metrics"].write_text("".join([*lines["metrics"][1:], lines["metrics"][1]]))
    logs["seen"].write_text("".join(lines["seen"])[:-9])
    logs["groups"].write_text("".join([lines["groups"][0], *lines["groups"]]))
    logs["eval"].write_text("".join(lines["eval"][1:]))
    said = said_by(capsys, "--resume", "runs/lora", "--steps", "4", status=0).out
    found = [line.partition("jsonl: is damaged: ")[2] for line in warnings_in(said)]
    of_metrics = ["it lacks step 1", "it has more than one line of step 2"]
    expected = [
        *of_metrics,
        "it lacks step 3",
        "it has more than one line of step 1",
        "it lacks step 0",
        *of_metrics,  # beside the verdict, which is made from these two logs
        "it lacks step 0",
    ]
    assert found == [f"{one}; figures that come from it are wrong" for one in expected]


def test_a_rate_that_rises_again_is_that_of_the_next_step(here, capsys):
    flags = ["--schedule", "cosine", "--config", "{warmup: 0}", "--name", "falling"]
    said_by(capsys, *SMALL, *flags, "--words", "2", "--steps", "4", status=0)
    said = said_by(capsys, "--resume", "runs/falling", "--steps", "8", status=0).out
    rates = [line["learning_rate"] for line in load_run("runs/falling").metrics]
    assert f"rises from {rates[3]:.3g} to {rates[4]:.3g}, because the cosine now ends" in said


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


def test_a_run_killed_before_its_next_checkpoint_goes_on_with_its_flags(here, capsys, monkeypatch):
    """config.yaml has --steps as it was given since, the checkpoint as it was then: that is no
    edit.
    """
    monkeypatch.setattr("grpo.run.session.Run.save_if_due", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(["--resume", "runs/lora", "--steps", "3"])
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(data.corpus, "TEXTS", here / "texts")
    said = said_by(capsys, "--resume", "runs/lora", status=0).out
    assert "config.yaml, since step-000001 was saved: steps 1 → 3" in said and "step 3/3" in said


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


def test_an_accepted_kind_that_does_not_exist(here, capsys):
    (line,) = said_by(capsys, *resume("lora"), "--accept-changes", "base,colour").err.splitlines()
    assert "--accept-changes base,colour: give one of base, start, dataset, corpus" in line


@pytest.mark.parametrize("change", [replace_weights, replace_tokenizer])
def test_an_adapter_is_not_evaluated_or_exported_on_another_base(here, capsys, change):
    change()
    scored = ["--model", "runs/lora", "--words", "2", "--problems", "2", "--device", "cpu"]
    for main, arguments in ((evaluation.main, scored), (export.main, ["runs/lora", "exported"])):
        (line,) = said_by(capsys, *arguments, main=main).err.splitlines()
        assert "runs/lora/checkpoints/step-000001: changed since it was saved: base: " in line
        assert line.endswith("--accept-changes base") and not Path("exported").exists()
        said = said_by(capsys, *arguments, "--accept-changes", "base", main=main, status=0)
        assert "changed since" in said.err and "and accepted: base: " in said.err


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

    assert train.main([*resume("lora"), "--accept-changes", "corpus"]) == 3
    said = said_by(capsys, "runs/lora", main=audit.main, status=1).out
    assert "runs/lora: corpus: changed after step 1: tale-new absent → " in said


def test_the_audit_of_a_task_without_a_corpus(here, capsys):
    grow_corpus()
    own = ["runs/own", "--task", "own.py:Own"]
    assert "nothing found" in said_by(capsys, *own, main=audit.main, status=0).out

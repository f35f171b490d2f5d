"""A run that starts from the policy of an earlier one: what it begins with, what it depends on,
what it does not evaluate.
"""

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from compare_runs import assert_same_run
from small_runs import OWN
from small_train import fails, killed_in
from tiny_models import hidden_states
from transformers import AutoModelForCausalLM

from grpo import export
from grpo.config import parse
from grpo.model.load import load_policy
from grpo.run.logs import load_run, read_metrics
from grpo.run.resume import start_from
from grpo.run.session import EVAL_SEED
from grpo.tasks.audit import audit
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_stream, write_problems
from grpo.tools import evaluation, train
from grpo.tools.replay import replay

SMALL = (
    "--prompts 2 --group-size 4 --steps 2 --save-every 1 --eval-every 0 --device cpu "
    "--max-new-tokens 16 --preflight off --config {'eval_problems':3,'dynamic_sampling':0}"
).split()
TASK = ["--task", "own.py:Own"]  # whatever is written, its groups vary
FIRST = {
    "lora": [*TASK, "--dataset", "set.jsonl", "--lora-rank", "2"],
    "full": ["--words", "2"],  # by default
}
SECOND = {"lora": [*TASK, "--level", "2"], "full": TASK}  # another level, and another task


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_model):
    """Two first stages, of LoRA (on the very problems that evaluations begin with) and in full; a
    second stage of each.
    """
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_model, folder / "model")
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        task = load_task("own.py:Own")
        stream = problem_stream(task, seed=EVAL_SEED, split="validation", level=2)
        write_problems(
            folder / "set.jsonl", [replace(problem, level=1) for problem in islice(stream, 4)]
        )
        for name, flags in FIRST.items():
            first = [*SMALL, *flags, "--model", "model", "--learning-rate", "0.01"]
            assert train.main([*first, "--name", name]) == 0
            assert train.main([*second(name), "--name", f"{name}-2"]) == 0
    return folder


def second(name):
    return [*SMALL, *SECOND[name], "--model", f"runs/{name}", "--beta", "0.1", "--steps", "3"]


@pytest.fixture()
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.fixture()
def copied(home, tmp_path, monkeypatch):
    """A copy of it, to be changed."""
    folder = Path(shutil.copytree(home, tmp_path / "copy"))
    monkeypatch.chdir(folder)
    return folder


def config_of(run):
    return yaml.safe_load(Path(f"runs/{run}/config.yaml").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", SECOND)
def test_killed_and_resumed_is_the_run_that_was_not(copied, name):
    with killed_in(3, is_saved=False):
        train.main([*second(name), "--name", "cut"])
    assert train.main(["--resume", "runs/cut", *TASK]) == 0
    assert_same_run(Path(f"runs/{name}-2"), Path("runs/cut"))


def test_how_the_policy_is_trained_is_taken_over(here):
    lora, full = config_of("lora-2"), config_of("full-2")
    newest = "runs/{}/checkpoints/step-000002"
    assert (lora["model"], lora["start"]) == ("model", newest.format("lora"))
    assert (lora["lora_rank"], lora["learning_rate"]) == (2, 0.01)
    assert (full["model"], full["start"]) == (newest.format("full"),) * 2
    assert (full["lora_rank"], full["learning_rate"]) == (0, 0.01)
    started, _ = start_from(*parse(["--model", "runs/lora"]))
    assert (started.model, started.lora_rank, started.prompts) == ("model", 2, lora["prompts"])


def test_the_policy_and_its_reference_are_those_of_the_start(here):
    start = "runs/lora/checkpoints/step-000002"
    wanted = hidden_states(load_policy("model", device="cpu", weights=Path(start)))
    policy = load_policy("model", device="cpu", start=start, keep_reference=True)
    assert policy.path == "fast" and torch.equal(hidden_states(policy), wanted)
    with torch.no_grad():
        for weight in policy.parameters:
            weight.add_(0.1)
    with policy.reference() as reference:
        assert reference.path == "fast" and torch.equal(hidden_states(reference), wanted)
    assert not torch.allclose(hidden_states(policy), wanted)
    assert not torch.allclose(hidden_states(load_policy("model", device="cpu")), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", SECOND)
def test_a_step_is_made_again_from_the_start(here, name):
    assert replay(load_run(f"runs/{name}-2"), 1, [TASK[1]])["same"]


def test_what_the_first_stage_trained_on_is_not_evaluated(here):
    line = read_metrics(Path("runs/lora-2/eval.jsonl"))[0]
    seen = {key for each in read_metrics(Path("runs/lora/seen.jsonl")) for key in each["keys"]}
    assert line["dropped"] == len(seen) == 4 and line["n"] == 3
    flags = ["--split", "validation", "--seed", str(EVAL_SEED), "--problems", "2", "--json", "e"]
    assert evaluation.main(["--model", "runs/lora-2", *TASK, *flags]) == 0
    assert json.loads(Path("e").read_text())[0]["dropped"] == 4
    found, summary = audit(Path("runs/lora-2"), [TASK[1]])
    assert found == []
    assert "(and 4 before, see runs/lora/checkpoints/step-000002), 3 evaluated" in summary


@pytest.mark.slow
def test_the_audit_finds_what_was_trained_on_before(copied):
    run = Path("runs/lora-2")
    path = run / "seen.jsonl"
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    evaluated = load_run(run).groups(0, "eval")[0].problem.key
    first["keys"] = [evaluated, *first["keys"][1:]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [first, *others]))
    found = "\n".join(audit(run, [TASK[1]])[0])
    start = "runs/lora/checkpoints/step-000002"
    assert f"({evaluated}) was trained on before this run, see {start}" in found


@pytest.mark.slow
def test_without_a_reference_nothing_depends_on_the_first_run(copied, capsys):
    flags = [flag for flag in second("lora") if flag not in ("--beta", "0.1")]
    assert train.main([*flags, "--name", "alone"]) == 0
    shutil.move("runs/lora", "elsewhere")
    assert train.main(["--resume", "runs/alone", *TASK, "--steps", "4"]) == 0
    assert evaluation.main(["--model", "runs/alone", *TASK, "--problems", "2"]) == 0
    assert export.main(["runs/alone", "exported"]) == 0
    assert AutoModelForCausalLM.from_pretrained("exported")

    line = fails(capsys, "--resume", "runs/lora-2", *TASK, "--steps", "4")
    assert "the adapter that the run started from is gone; put it back" in line


def test_another_adapter_under_the_same_name_is_refused(copied, capsys):
    shutil.rmtree("runs/lora/checkpoints/step-000002")
    shutil.copytree("runs/lora-2/checkpoints/step-000003", "runs/lora/checkpoints/step-000002")
    line = fails(capsys, "--resume", "runs/lora-2", *TASK, "--steps", "4")
    assert "changed since it was saved: start: adapter_" in line
    assert line.endswith("; undo that, or start a new run with --model runs/lora-2")


@pytest.mark.slow
def test_fresh_problems_go_on_where_the_first_run_ended(here):
    runs = [load_run(f"runs/{name}") for name in ("full", "full-2", "lora", "lora-2")]
    indices = [sorted({group.index for group in run.groups(1)}) for run in runs]
    assert indices == [[0, 1], [4, 5], [0, 1], [4, 5]]


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--lora-rank", "8"],
            "--lora-rank 8: the adapter of runs/lora/checkpoints/step-000002 has 2;",
        ),
        (["--lora-rank", "0"], "python -m grpo.export runs/lora/checkpoints/step-000002 FOLDER"),
    ],
)
def test_another_adapter_is_refused(here, capsys, flags, said):
    assert said in fails(capsys, *SMALL, "--model", "runs/lora", *flags)


def test_a_run_without_a_checkpoint_is_refused_under_the_flag_that_named_it(copied, capsys):
    shutil.rmtree("runs/lora/checkpoints")
    line = fails(capsys, *SMALL, "--model", "runs/lora")
    assert line == "train.py: --model runs/lora: it has no valid checkpoint"

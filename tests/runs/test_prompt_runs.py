"""Runs whose prompts are not the default ones: stored whole, taken up, evaluated, replayed and
audited as they were trained.
"""

import json
import shutil
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from transformers import AutoTokenizer

from grpo.config import parse
from grpo.data.files import read_jsonl_zst, write_jsonl_zst
from grpo.run.logs import load_run
from grpo.run.resume import start_from
from grpo.tasks.audit import audit
from grpo.tasks.registry import load_task
from grpo.tasks.supply import examples_of, problem_at, write_problems
from grpo.tools import evaluation, train
from grpo.tools.evaluate import Evaluation
from grpo.tools.evaluation import parse as parse_evaluation
from grpo.tools.replay import replay

WORDING = "Mix them.\nOne: {a}\nTwo: {b}"
AROUND = ["--wording", "w.txt", "--system", "@s.txt", "--shots", "2"]
SMALL = (
    "--words 2 --prompts 2 --group-size 4 --config {'eval_problems':2} --lora-rank 0 --device cpu "
    "--max-new-tokens 12 --reward similarity --learning-rate 0.001 --save-every 1 "
    "--reward-alone"
).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_model):
    """A folder with a run of two steps in its own words, whose files have been deleted since."""
    folder = tmp_path_factory.mktemp("prompts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("w.txt").write_text(WORDING + "\n")
        Path("s.txt").write_text("Be brief, <|end|>.\n")
        flags = [*SMALL, *AROUND, "--model", str(tiny_model), "--steps", "2"]
        assert train.main([*flags, "--name", "whole"]) == 0
        Path("w.txt").unlink()
        Path("s.txt").unlink()
    return folder


@pytest.fixture()
def here(home, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(home, tmp_path / "here"))
    monkeypatch.chdir(folder)
    return folder


def resolved(*flags):
    """The prompt's settings in an evaluation of the run, and its task."""
    arguments, others = parse_evaluation(["--model", "runs/whole", *flags])
    evaluation = Evaluation(arguments, "runs/whole", others)
    return evaluation.settings, evaluation.task


def test_every_prompt_of_a_run_has_all_that_was_asked_for(home, tiny_model):
    run = load_run(home / "runs/whole")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert run.config["wording"] == WORDING and run.config["system"] == "Be brief, <|end|>."
    for kind, step in [("step", 1), ("step", 2), ("eval", 0), ("eval", 2)]:
        for group in run.groups(step, kind):
            a, b = (" ".join(group.problem.data[name]) for name in "ab")
            assert group.problem.prompt == WORDING.format(a=a, b=b)
            text = tokenizer.decode(group.prompt)
            assert text.lstrip().startswith("<|system|>Be brief, <|end|>.<|end|><|user|>Mix them.")
            assert text.count("Mix them.") == 3 and len(set(group.shots)) == 2
            assert text.endswith(f"One: {a}\nTwo: {b}<|end|><|assistant|>")
            assert group.prompt.count(tokenizer.eos_token_id) == 6  # the one in the text is text

    # The examples are not counted as trained on.
    trained = {group.problem.key for step in (1, 2) for group in run.groups(step)}
    state = json.loads((run.path / "checkpoints/step-000002/trainer.json").read_text())
    assert set(state["trainer"]["seen"]) == trained


def test_a_run_is_taken_up_without_its_files_and_shows_its_first_prompt(here, capsys):
    """Nor does it matter where the same wording is now."""
    Path("moved.txt").write_text(WORDING)
    shutil.copytree("runs/whole", "runs/resumed")
    shutil.rmtree("runs/resumed/checkpoints/step-000002")
    assert train.main(["--resume", "runs/resumed", "--wording", "moved.txt"]) == 0
    assert_same_run(Path("runs/whole"), Path("runs/resumed"))

    first = load_run("runs/resumed").groups(1)[0]
    kept = Path("runs/resumed/prompt.txt").read_text()
    assert kept.startswith(" <|system|>Be brief, <|end|>.<|end|><|user|>Mix them.\nOne: ")
    assert kept.endswith(f"Two: {' '.join(first.problem.data['b'])}<|end|><|assistant|>\n")
    said = capsys.readouterr().out
    assert f"the first prompt as it is sent to the model, {len(first.prompt)} tokens\n" in said
    assert "".join(f"  {line}\n" for line in kept.splitlines()) in said


def test_an_evaluation_sends_what_the_run_sent(here, capsys):
    """Of a dataset, too, whose file has the task's own wording."""
    plain = load_task("interleave")
    problems = [problem_at(plain, seed=5, split="test", level=2, index=i) for i in range(2)]
    write_problems("set.jsonl", problems)
    flags = ["--model", "runs/whole", "--dataset", "set.jsonl", "--device", "cpu", "--seed", "3"]
    assert evaluation.main([*flags, "--json", "out.json"]) == 0

    (line,) = json.loads(Path("out.json").read_text())
    assert (line["wording"], line["system"], line["shots"]) == (WORDING, "Be brief, <|end|>.", 2)
    a, b = (" ".join(problems[0].data[name]) for name in "ab")
    examples = examples_of(resolved()[1], 2, problems[0].key, seed=3, count=2)
    answered = "".join(
        f"<|user|>{one.prompt}<|end|><|assistant|>{one.target}<|end|>" for one in examples
    )
    assert line["prompt"] == (
        f" <|system|>Be brief, <|end|>.<|end|>{answered}<|user|>Mix them.\nOne: {a}\nTwo: "
        f"{b}<|end|><|assistant|>"
    )
    said = capsys.readouterr().out
    assert "the first prompt as it was sent to the model" in said and f"  Two: {b}<|end|>" in said


@pytest.mark.slow
def test_a_run_that_starts_from_another_has_its_prompt(here):
    def started(*flags):
        config, _ = start_from(*parse(["--model", "runs/whole", *flags]))
        return config.wording, config.system, config.shots

    assert started() == (WORDING, "Be brief, <|end|>.", 2)
    assert started("--task", "arithmetic") == ("", "Be brief, <|end|>.", 2)
    Path("w.txt").write_text("{b} and {a}")
    assert started("--wording", "w.txt", "--shots", "0", "--system", "") == ("{b} and {a}", "", 0)


def test_a_step_of_such_a_run_is_made_again_to_the_bit(home):
    assert replay(load_run(home / "runs/whole"), 2)["same"]


@pytest.mark.slow
def test_the_audit_finds_an_evaluated_problem_that_a_prompt_shows(here):
    run = Path("runs/whole")
    assert audit(run)[0] == []

    path = run / "rollouts/step-000002.jsonl.zst"
    lines = read_jsonl_zst(path)
    evaluated_key = read_jsonl_zst(run / "rollouts/eval-000002.jsonl.zst")[0]["problem"]["key"]
    lines[1]["shots"][0] = evaluated_key
    write_jsonl_zst(path, lines)
    found = audit(run)[0]
    assert len(found) == 1
    assert found[0].endswith(
        f"({evaluated_key}) was shown with its answer, in step-000002.jsonl.zst"
    )

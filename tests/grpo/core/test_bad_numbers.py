"""Numbers that are not finite: they are named, and nothing is changed or saved. Completions of no
text, and a model of an odd size, are no mistakes.
"""

import hashlib
import json
import math
import signal
from pathlib import Path

import forced
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import BY_PLACE, FEW
from tiny_models import make_tiny_model
from transformers import AutoTokenizer, LlamaForCausalLM

from grpo.data.errors import UserError
from grpo.data.files import read_jsonl_zst
from grpo.model.check import check_loaded, check_step
from grpo.model.load import load_policy
from grpo.records import Completion
from grpo.rollout import generate as engine
from grpo.rollout.generate import RolloutRequest
from grpo.run.logs import read_metrics
from grpo.tools import train
from grpo.trainer import Trainer

SMALL = [*FEW, "--steps", "2", "--config", "{eval_problems: 2}", "--level", "2"]


def trainer_for(policy):
    """A trainer whose update leaves the weights as they are."""
    return forced.trainer_for(policy, prompts=2, learning_rate=0.0)


def spoil(trainer, name, value):
    """Let the optimizer's next step leave `value` in one number of a weight's master, or of a
    moment of it.
    """
    optimizer, model = trainer.optimizer, trainer.policy.model
    step = optimizer.inner.step
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]

    @torch.no_grad()
    def spoiling(*_):
        step()
        tensors = optimizer.tensors(model) | dict(zip(trained, optimizer.masters, strict=True))
        tensors[name].view(-1)[7] = value

    optimizer.inner.step = spoiling


WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "name, value, dtype",
    [
        (WEIGHT, math.nan, "float32"),
        (WEIGHT, math.nan, "bfloat16"),
        (f"{WEIGHT} (exp_avg)", -math.inf, "float32"),
        (f"{WEIGHT} (exp_avg_sq)", math.inf, "float32"),
    ],
)
def test_a_step_of_the_optimizer_that_is_not_finite_is_named(tiny_model, name, value, dtype):
    trainer = trainer_for(load_policy(str(tiny_model), device="cpu", dtype=dtype))
    trainer.step()
    spoil(trainer, name, value)
    with pytest.raises(FloatingPointError) as error:
        trainer.step()
    assert str(error.value) == (
        f"after the optimizer's step {name} is not finite (1 of 6,144 numbers)"
    )
    assert trainer.done == 1


def test_weights_whose_squares_overflow_are_finite(tiny_policy):
    trainer = trainer_for(tiny_policy)
    with torch.no_grad():
        trainer.policy.model.model.norm.weight[3] = 3e38
    tensors = {"norm": trainer.policy.model.model.norm.weight}
    assert not torch.nn.utils.get_total_norm(list(tensors.values())).isfinite()
    check_step(tensors)
    check_loaded(tensors, "here")


def test_a_gradient_whose_square_overflows_freezes_no_weight_for_good(tiny_policy):
    """A finite gradient of 1e25 makes the second moment infinite, and its weight would never move
    again.
    """
    trainer = trainer_for(tiny_policy)
    weight = dict(tiny_policy.model.named_parameters())[WEIGHT]
    collect = trainer.optimizer.collect

    def huge(limit):
        norm = collect(limit)
        weight.grad[0, 0] = 1e25
        return norm

    trainer.optimizer.collect = huge
    with pytest.raises(FloatingPointError, match=r"up_proj.weight \(exp_avg_sq\) is not finite"):
        trainer.step()


def spoil_file(path, name):
    """Put a NaN into a tensor of a safetensors file."""
    tensors = load_file(path)
    tensors[name].view(-1)[5] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_model_whose_weights_are_not_finite_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path / "bad")
    spoil_file(folder / "model.safetensors", WEIGHT)
    said = f"{WEIGHT} is not finite (1 of 6,144 numbers); the file is damaged"
    with pytest.raises(UserError) as error:
        load_policy(str(folder), device="cpu")
    assert str(error.value).startswith(f"--model {folder}: {said}")


@pytest.mark.parametrize(
    "lora, file, tensor, called",
    [
        (
            ["--lora-rank", "4"],
            "adapter_model.safetensors",
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight",
        ),
        ([], "optimizer.safetensors", "1/exp_avg", "(exp_avg)"),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_refused(
    tmp_path, monkeypatch, capsys, quick_flags, lora, file, tensor, called
):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SMALL, *quick_flags, *lora, "--steps", "1", "--name", "a"]) == 0
    checkpoint = Path("runs/a/checkpoints/step-000001")
    spoil_file(checkpoint / file, tensor)
    vouch_for(checkpoint)
    capsys.readouterr()
    assert train.main(["--resume", "runs/a", *BY_PLACE, "--steps", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: {checkpoint}: ") and f"{called} is not finite (1 of" in line


def vouch_for(checkpoint):
    """Write a checkpoint's manifest again, for its files as they are now."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))


def test_bad_weights_are_never_saved(tmp_path, monkeypatch, capsys, quick_flags):
    """Nor when the run is told to end in the same step."""
    monkeypatch.chdir(tmp_path)
    flags = [*SMALL, *quick_flags, "--lora-rank", "4", "--steps", "4", "--save-every", "1"]
    take, spoiled = Trainer.step, []

    def step(trainer):
        if trainer.done == 2:
            name = next(n for n, p in trainer.policy.model.named_parameters() if p.requires_grad)
            spoil(trainer, name, math.nan)
            spoiled.append(name)
            signal.raise_signal(signal.SIGTERM)
        return take(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    assert train.main([*flags, "--name", "a"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py")]
    assert len(lines) == 1 and f"after the optimizer's step {spoiled[0]} is not finite" in lines[0]
    assert "its batch is saved in runs/a/rollouts/failed-000003.jsonl.zst" in lines[0]
    assert len(read_jsonl_zst(Path("runs/a/rollouts/failed-000003.jsonl.zst"))) == 2
    assert sorted(p.name for p in Path("runs/a/checkpoints").iterdir())[-1] == "step-000002"
    assert [line["step"] for line in read_metrics(Path("runs/a/metrics.jsonl"))] == [1, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_weights_that_are_not_finite(tiny_policy, temperature):
    with torch.no_grad():
        dict(tiny_policy.model.named_parameters())["model.norm.weight"][:] = math.nan
    prompt = tuple(tiny_policy.encode("Copy text A.\nA: one"))
    request = RolloutRequest([prompt], keys=[[1, 2]], temperature=temperature, budgets=[4])
    with pytest.raises(FloatingPointError, match="nan: the model's logits are not finite"):
        engine.generate(tiny_policy, request)


def test_completions_of_no_text_are_scored_and_learned_from(tiny_policy, monkeypatch):
    stop = next(iter(tiny_policy.stops))
    original = engine.generate

    def empty(*arguments):
        groups = original(*arguments)
        return [[Completion((stop,), (-1.0,), "", "stop"), *group[1:]] for group in groups]

    monkeypatch.setattr("grpo.rollout.generate.generate", empty)
    report = trainer_for(tiny_policy).step()
    assert math.isfinite(report.metrics["loss"]) and report.metrics["groups/kept"] == 1
    assert all(group.texts[0] == "" for group in report.groups)


def test_a_vocabulary_larger_than_the_tokenizers(tmp_path):
    folder = make_tiny_model(tmp_path / "wide")
    model = LlamaForCausalLM.from_pretrained(folder)
    tokens = len(AutoTokenizer.from_pretrained(folder))
    model.resize_token_embeddings(tokens + 128, mean_resizing=False)
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight[tokens:] = 3 * weight[:128]  # so that they are drawn
    model.save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu")
    report = trainer_for(policy).step()
    drawn = [
        token
        for group in report.groups
        for completion in group.completions
        for token in completion.tokens
    ]
    assert max(drawn) >= tokens
    assert math.isfinite(report.metrics["loss"])
    assert report.metrics["sampling/sampling_logp_difference/max"] < 1e-4

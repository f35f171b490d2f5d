"""Weights that are missing, renamed, superfluous or of another shape are refused by name; whole
ones are loaded.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, write
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, ResNetConfig

from grpo.model import check, load
from grpo.model.check import fits_float16
from grpo.model.load import load_policy

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture()
def folder(tiny_model, tmp_path):
    """A copy of the tiny model, which may be changed."""
    return shutil.copytree(tiny_model, tmp_path / "model")


# What is done to the file, and what must be said of it.
DAMAGES = [
    (lambda tensors: tensors.update({UP.replace("up_proj", "upward"): tensors.pop(UP)}),
        f"1 missing ({UP}); 1 unexpected (model.layers.0.mlp.upward.weight)"),
    (lambda tensors: [tensors.pop(name) for name in {*tensors} if re.search("gate|up_p", name)],
        f"4 missing (model.layers.0.mlp.gate_proj.weight, {UP}, "
        "model.layers.1.mlp.gate_proj.weight, ...)"),
    (lambda tensors: tensors.update({"value_head.weight": torch.zeros(64)}),
        "1 unexpected (value_head.weight)"),
    (lambda tensors: tensors.update({NORM: torch.ones(32)}),
        f"1 of another shape ({NORM} [32] instead of [64])"),
    (dict.clear, "21 missing (lm_head.weight, model.embed_tokens.weight, "
        "model.layers.0.input_layernorm.weight, ...)"),
]  # fmt: skip


def change(path, damage):
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path, {"format": "pt"})


def refused_model(spec, **options) -> str:
    """Return the line by which a model is refused."""
    return refused(load_policy, str(spec), device="cpu", **options)


@pytest.mark.parametrize("damage, said", DAMAGES)
def test_tensors_that_are_not_the_models_are_named(folder, damage, said):
    change(folder / "model.safetensors", damage)
    assert refused_model(folder).startswith(
        f"--model {folder}: the tensors there are not those of LlamaForCausalLM: {said}; give a "
        "folder"
    )


@pytest.mark.parametrize("damage, said", DAMAGES[:1])
def test_a_checkpoint_and_the_reference_beside_it_are_looked_at_too(
    tiny_model, tmp_path, damage, said
):
    load_policy(str(tiny_model), device="cpu").save(tmp_path / "saved")
    base = shutil.copytree(tiny_model, tmp_path / "base")
    weights = tmp_path / "saved"
    assert load_policy(str(base), device="cpu", weights=weights, keep_reference=True)

    change(base / "model.safetensors", damage)
    assert load_policy(str(base), device="cpu", weights=weights)  # its base is not read
    line = refused_model(base, weights=weights, keep_reference=True)
    assert line.startswith(f"--model {base}: ") and said in line

    change(weights / "model.safetensors", damage)
    line = refused_model(tiny_model, weights=weights)
    assert line.startswith(f"--model {weights}: ") and said in line


def test_a_file_of_no_bytes_and_a_shard_that_is_absent(tiny_model, folder):
    (folder / "model.safetensors").write_bytes(b"")
    assert "cannot be loaded" in refused_model(folder)

    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="50KB")
    assert load_policy(str(folder), device="cpu")
    (folder / "model-00002-of-00006.safetensors").unlink()
    assert "model-00002-of-00006.safetensors" in refused_model(folder)


def test_a_tied_head_may_be_missing_and_old_buffers_may_be_there(folder):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")

    def older(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change(folder / "model.safetensors", older)
    assert load_policy(str(folder), device="cpu")


# Adapters


LORA = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"


LORA_A = LORA.replace("lora_B.weight", "lora_A.default.weight")
RENAMED = LORA.replace("up_proj", "upward")


def test_any_number_may_be_the_seed_of_an_adapter(tiny_model):
    a, b, c = (
        dict(
            load_policy(
                str(tiny_model), device="cpu", lora_rank=4, seed=seed
            ).model.named_parameters()
        )
        for seed in (7, 10**30, -3)
    )
    assert not torch.equal(a[LORA_A], b[LORA_A]) and not torch.equal(a[LORA_A], c[LORA_A])


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    load_policy(str(tiny_model), device="cpu", lora_rank=4).save(folder)
    return folder


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda tensors: tensors.pop(LORA), f"1 missing ({LORA})"),
        (lambda tensors: tensors.update({RENAMED: tensors.pop(LORA)}),
            f"1 missing ({LORA}); 1 unexpected ({RENAMED})"),
        (lambda tensors: tensors.update({LORA: torch.zeros(96, 8)}),
            "the shape in current model is torch.Size([96, 4])"),
        (dict.clear, "28 missing (base_model.model.model.layers.0.mlp.down_proj.lora_A.weight, "),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_an_adapter_is_loaded_whole_or_refused(tiny_model, adapter, tmp_path, damage, said):
    weights = shutil.copytree(adapter, tmp_path / "adapter")
    assert load_policy(str(tiny_model), device="cpu", weights=weights).is_lora
    change(weights / "adapter_model.safetensors", damage)
    line = refused_model(tiny_model, weights=weights)
    assert said in line and str(weights) in line


@pytest.mark.parametrize("rank", [1, 2])  # of which 1 would be repeated
def test_a_weight_that_peft_does_not_find_must_have_its_shape(tmp_path, rank):
    laguna = next(each for each in ARCHITECTURES if each.kind == "laguna")
    write(laguna, tmp_path)
    load_policy(str(tmp_path), device="cpu", lora_rank=4).save(tmp_path / "adapter")
    name = "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_A.weight"
    damage = {name: torch.zeros(rank, 64)}
    change(tmp_path / "adapter" / "adapter_model.safetensors", lambda each: each.update(damage))
    line = refused_model(tmp_path, weights=tmp_path / "adapter")
    assert f"1 of another shape ({name} [{rank}, 64] instead of [4, 64])" in line


def test_an_adapter_for_another_base_or_without_its_file_is_refused(tiny_model, adapter, tmp_path):
    other = make_tiny_model(tmp_path / "other", layers=1)
    assert re.search("14 unexpected .*layers.1", refused_model(other, weights=adapter))

    weights = shutil.copytree(adapter, tmp_path / "adapter")
    (weights / "adapter_model.safetensors").unlink()
    assert "its adapter does not fit" in refused_model(tiny_model, weights=weights)

    weights = shutil.copytree(adapter, tmp_path / "alpha")
    file = weights / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": "x"}))
    assert "its adapter does not fit" in refused_model(tiny_model, weights=weights)


def test_a_damaged_tokenizer_is_refused(folder):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    assert "cannot be loaded ('>' not supported" in refused_model(folder)


# What --dtype auto stands for


def test_the_default_precision(tiny_model):
    tiny = str(tiny_model)
    assert load.dtype_on("cpu", tiny, tiny, True) == torch.float32
    assert load.dtype_on("cuda:0", tiny, tiny, True) == torch.float16
    assert load.dtype_on("cuda:0", tiny, tiny, False) == torch.float16
    assert load.dtype_on("cuda:0", tiny, tiny, False, is_continued=True) == torch.float32
    builtin = load.resolve("builtin")
    assert load.dtype_on("cuda:0", "builtin", builtin, False) == torch.float32
    assert load.dtype_on("cuda:0", "builtin", builtin, True) == torch.float16


@pytest.mark.parametrize(
    "hidden_size, quantise, rank", [(576, "none", 0), (577, "none", 64), (576, "int8", 64)]
)
def test_the_default_rank(tmp_path, hidden_size, quantise, rank):
    LlamaConfig(hidden_size=hidden_size, num_attention_heads=1).save_pretrained(tmp_path)
    assert load.default_rank(str(tmp_path), quantise) == rank


def test_a_model_without_a_hidden_size_is_no_language_model(tmp_path):
    ResNetConfig().save_pretrained(tmp_path)
    assert "cannot be loaded" in refused_model(tmp_path, lora_rank=None)


def enlarge(folder, factor):
    """Multiply what the first layer's MLP adds to the hidden states of the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        mlp = model.model.layers[0].mlp
        for layer in (mlp.up_proj, mlp.down_proj):  # so that no weight gets too large
            layer.weight.mul_(factor**0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("factor, fits", [(1, True), (3e6, False), (1e30, False)])
def test_a_model_whose_numbers_are_too_large_does_not_fit(folder, factor, fits):
    model = enlarge(folder, factor).to(torch.float16)
    assert fits_float16(model, list(range(20))) is fits


@pytest.fixture()
def half_by_default(monkeypatch):
    """Take the CPU for a GPU where the default precision is chosen."""

    dtype_on = load.dtype_on
    monkeypatch.setattr(load, "dtype_on", lambda device, *rest: dtype_on("cuda", *rest))


@pytest.mark.parametrize("lora", [0, 4])
def test_auto_takes_bfloat16_where_float16_is_too_narrow(folder, half_by_default, lora):
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu", lora_rank=lora)
    assert policy.dtype == torch.float16 and not any("float16" in n for n in policy.notes)

    enlarge(folder, 3e6)
    policy = load_policy(str(folder), device="cpu", lora_rank=lora)
    assert policy.dtype == torch.bfloat16
    assert any("too large for float16" in note for note in policy.notes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_continued_run_keeps_its_precision(folder, tmp_path, half_by_default, monkeypatch, dtype):
    policy = load_policy(str(folder), device="cpu", dtype=dtype)
    policy.save(tmp_path / "saved")
    monkeypatch.setattr(check, "LIMIT", 0.0)  # so that a new run would take bfloat16
    again = load_policy(str(folder), device="cpu", weights=tmp_path / "saved")
    assert again.dtype == getattr(torch, dtype)

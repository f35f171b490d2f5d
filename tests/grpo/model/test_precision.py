"""What `--dtype auto` stands for."""

import shutil

import pytest
import torch
from tiny_models import loading
from transformers import AutoModelForCausalLM

from grpo.model import load, precision
from grpo.model.load import load_policy
from grpo.model.precision import LIMIT, default_dtype, fits_float16

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("saved", [None, torch.float32, *HALF])
@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize("is_lora", [False, True])
def test_which_precision_is_the_default(saved, is_continued, is_lora):
    found = default_dtype(is_lora=is_lora, saved=saved, is_continued=is_continued)
    if is_continued and saved is not None:
        assert found == saved
    else:
        assert found == (torch.float16 if is_lora or saved is not None else torch.float32)


def test_on_a_cpu_the_default_is_float32(tiny_model):
    assert load.dtype_on("cpu", str(tiny_model), str(tiny_model), True) == torch.float32
    assert load.dtype_on("cuda:0", str(tiny_model), str(tiny_model), True) == torch.float16
    assert load.dtype_on("cuda:0", "builtin", load.resolve("builtin"), False) == torch.float32


@pytest.fixture()
def folder(tiny_model, tmp_path):
    """A copy of the tiny model, which may be changed."""
    return shutil.copytree(tiny_model, tmp_path / "model")


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


def test_the_limit_leaves_room_for_training():
    assert torch.finfo(torch.float16).max > 1.9 * LIMIT


def test_numbers_up_to_half_of_the_largest_fit(folder):
    tokens = list(range(20))
    model = enlarge(folder, 1)
    outputs = []
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_hook(
        lambda module, inputs, output: outputs.append(output.detach().abs().max())
    )
    model(input_ids=torch.tensor([tokens]))
    factor = LIMIT / float(outputs[0])
    assert fits_float16(enlarge(folder, 0.9 * factor).to(torch.float16), tokens)
    assert not fits_float16(enlarge(folder, 1.1 / 0.9).to(torch.float16), tokens)


def test_a_number_that_is_none_does_not_fit(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    with torch.no_grad():
        model.model.embed_tokens.weight[3].fill_(torch.nan)
    assert not fits_float16(model, [1, 2, 3, 4])


@pytest.fixture()
def half_by_default(monkeypatch):
    """Take the CPU for a GPU where the default precision is chosen."""

    dtype_on = load.dtype_on
    monkeypatch.setattr(load, "dtype_on", lambda device, *rest: dtype_on("cuda", *rest))


@pytest.mark.parametrize("lora", [0, 4])
def test_auto_takes_bfloat16_where_float16_is_too_narrow(folder, half_by_default, lora):
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu", options=loading(lora_rank=lora))
    assert policy.dtype == torch.float16 and not any("float16" in n for n in policy.notes)

    enlarge(folder, 3e6)
    policy = load_policy(str(folder), device="cpu", options=loading(lora_rank=lora))
    assert policy.dtype == torch.bfloat16
    assert any("too large for float16" in note for note in policy.notes)


def test_what_is_asked_for_is_not_replaced(folder, half_by_default):
    enlarge(folder, 1e3)
    policy = load_policy(str(folder), device="cpu", options=loading(dtype="bfloat16"))
    assert policy.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_continued_run_keeps_its_precision(folder, tmp_path, half_by_default, monkeypatch, dtype):
    policy = load_policy(str(folder), device="cpu", options=loading(dtype=dtype))
    policy.save(tmp_path / "saved")
    monkeypatch.setattr(precision, "LIMIT", 0.0)  # so that a new run would take bfloat16
    again = load_policy(str(folder), device="cpu", weights=tmp_path / "saved", options=loading())
    assert again.dtype == getattr(torch, dtype)

"""Llama-3.2-3B by its exact configuration, with random weights (no hub is asked): loaded, sampled and trained."""
import json

import pytest
import torch
from conftest import BUILTIN
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import train
from grpo.store.metrics import read_metrics

CONFIG = dict(  # of meta-llama/Llama-3.2-3B-Instruct
    vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-5, max_position_embeddings=131_072, tie_word_embeddings=True, bos_token_id=128_000,
    eos_token_id=[128_001, 128_008, 128_009], rope_parameters={
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})


def write_llama(folder, layers, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **CONFIG)).to(torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("layers, device", [pytest.param(2, "cpu", marks=pytest.mark.slow),
                                            pytest.param(28, "cuda", marks=pytest.mark.gpu)])
def test_llama_trains_with_lora(tmp_path, monkeypatch, layers, device):
    monkeypatch.chdir(tmp_path)
    parameters = write_llama(tmp_path / "llama", layers, device)
    if layers == 28:
        assert parameters == 3_212_749_824
    assert train.main(["--model", str(tmp_path / "llama"), "--words", "5", "--prompts", "2", "--group-size", "4", "--steps", "2",
                       "--eval-problems", "2", "--on-degenerate", "keep", "--beta", "0.04", "--device", device,
                       "--name", "llama", "--scale", "none", "--reward", "similarity"]) == 0
    lines = read_metrics(tmp_path / "runs" / "llama" / "metrics.jsonl")
    # bfloat16 on a GPU, float32 on a CPU: the sampler and the trainer see the same distribution to its rounding
    assert [line["parity/max_abs_logprob_diff"] < (0.2 if device == "cuda" else 1e-3) for line in lines] == [True, True]
    adapter = json.loads((tmp_path / "runs/llama/checkpoints/step-000002/adapter_config.json").read_text())
    assert adapter["r"] == 16 and len(load_file(tmp_path / "runs/llama/checkpoints/step-000002/adapter_model.safetensors")) == 2 * 7 * layers
    assert {name.split(".")[-1] for name in adapter["target_modules"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

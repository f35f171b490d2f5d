"""The head of the console: what was chosen is said, also where nobody asked for it."""

from pathlib import Path

from grpo.config import Config
from grpo.model.load import load_policy
from grpo.show.settings import settings
from grpo.trainer import Parts, Trainer
from tasks.registry import load_task


def said(model, **flags):
    config = Config(
        model=str(model),
        level=4,
        ramp=False,
        steps=1,
        device="cpu",
        learning_rate=1e-5,
        **{"lora_rank": 0, "prompts": 16} | flags,
    )
    policy = load_policy(config.model, device="cpu", **config.loading)
    return settings(Path("runs/x"), config, Trainer(config, Parts(load_task("interleave")), policy))


def test_what_is_trained_and_how(tiny_model):
    full = said(tiny_model)
    assert full["tuning"].startswith("full fine-tuning, ") and full["tuning"].endswith(
        "M trained, learning rate 1e-05"
    )
    assert full["update"] == "AdamW, micro-batches of 4,096 tokens (by the memory of the CPU)"
    assert "float32 on cpu" in full["model"] and "quantised" not in full["model"]
    rough = said(tiny_model, dtype="bfloat16", micro_tokens=700, gradient_checkpointing=True)
    assert (
        rough["update"] == "AdamW, float32 masters, micro-batches of 700 tokens (as set), gradient "
        "checkpointing"
    )
    adapter = said(tiny_model, lora_rank=4, dtype="bfloat16")
    assert (
        adapter["tuning"].startswith("LoRA rank 4, ") and "masters" not in adapter["update"]
    )  # the adapter is in float32
    assert "bfloat16 on cpu" in adapter["model"]


def test_sampling_and_the_step(tiny_model):
    assert said(tiny_model)["sampling"] == "temperature 1, speculative decoding: auto"
    around = dict(system="Be brief.", shots=2, wording="{b} {a}")
    other = said(tiny_model, draft="off", temperature=0.7, **around)
    assert other["sampling"] == "temperature 0.7, speculative decoding: off"
    assert other["prompt"] == "the user's own wording, a system turn of 9 characters, 2 examples"
    assert said(tiny_model, prompts=3)["batch"] == "3 prompts × 16 completions"
    assert said(tiny_model, beta=0.04)["loss"].startswith(
        "dapo, advantages by group, KL weight 0.04"
    )
    assert (
        said(tiny_model, control="constant-reward")["control"]
        == "constant-reward: a control experiment, whose rewards carry no information"
    )

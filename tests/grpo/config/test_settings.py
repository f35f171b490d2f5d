"""The head of the console: what was chosen is said, also where nobody asked for it."""

from pathlib import Path

from grpo.config import Config
from grpo.model.load import load_policy
from grpo.show.console import settings_of
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer


def said(model, **flags):
    config = Config(
        model=str(model),
        level=4,
        steps=1,
        device="cpu",
        learning_rate=1e-5,
        **{"lora_rank": 0, "prompts": 16} | flags,
    )
    policy = load_policy(config.model, device="cpu", **config.loading)
    return settings_of(
        Path("runs/x"), config, Trainer(config, Supply(load_task("interleave"), seed=0), policy)
    )


def test_what_is_trained_and_how(tiny_model):
    full = said(tiny_model)
    assert " M trained, float32 on cpu" in full["model"]
    assert "lora_rank 0" in full["settings"] and "learning_rate 1e-05" in full["settings"]
    rough = said(tiny_model, dtype="bfloat16")
    assert "bfloat16 with float32 masters on cpu" in rough["model"]
    adapter = said(tiny_model, lora_rank=4, dtype="bfloat16")
    assert "bfloat16 on cpu" in adapter["model"]  # the adapter is in float32
    assert "lora_rank 4" in adapter["settings"]


def test_settings_that_are_not_at_their_default_are_shown(tiny_model):
    plain = said(tiny_model)["settings"]
    assert "beta 0" in plain and "shots" not in plain
    other = said(tiny_model, shots=2, system="Be brief. " * 9, beta=0.04, prompts=3)
    assert "beta 0.04" in other["settings"]
    assert "shots 2" in other["settings"] and "system Be brief." in other["settings"]
    assert "prompts 3, group_size 16" in other["settings"]
    assert (
        said(tiny_model, control="constant-reward")["control"]
        == "constant-reward: a control experiment, whose rewards carry no information"
    )

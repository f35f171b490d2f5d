"""Updates in low precision."""

from dataclasses import replace

import pytest
import torch
from updates import SETTINGS, sgd, update

from grpo.model.load import load_policy


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("half, bound", [("bfloat16", 0.99), ("float16", 0.9999)])
def test_half_precision_has_the_gradient_of_float32_to_its_rounding(
    tiny_model, tiny_policy, groups, half, bound, lora
):
    exact, rough = (
        load_policy(str(tiny_model), device="cpu", dtype=dtype, lora_rank=lora)
        for dtype in ("float32", half)
    )
    for policy in (exact, rough):
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # zero at first
                torch.nn.init.normal_(
                    parameter, std=0.05, generator=torch.Generator().manual_seed(len(name))
                )
        assert policy.forward.llama is not None
        optimizer = sgd(policy, 0.0)
        optimizer.step = lambda **options: None  # the gradients stay
        policy.norm = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)[
            "grad_norm"
        ]
        policy.gradient = torch.cat([master.grad.flatten() for master in optimizer.masters])
        assert policy.gradient.dtype == torch.float32
    assert rough.norm == pytest.approx(exact.norm, rel=0.05)
    assert torch.cosine_similarity(rough.gradient, exact.gradient, dim=0) > bound


def test_full_fine_tuning_in_bfloat16_moves_the_masters(tiny_model, tiny_policy, groups):
    policy = load_policy(str(tiny_model), device="cpu", dtype="bfloat16")
    before = [parameter.detach().clone() for parameter in policy.parameters]
    optimizer = sgd(policy, 1e-3)
    update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
    moved = torch.cat(
        [(master - old.float()).flatten() for master, old in zip(optimizer.masters, before)]
    )
    shown = torch.cat(
        [parameter.ne(old).flatten() for parameter, old in zip(policy.parameters, before)]
    )
    assert moved.ne(0).float().mean() > 0.5 > shown.float().mean()
    qkv = policy.forward.llama.blocks[0].qkv  # what the decoder reads is what was stepped on
    assert torch.equal(
        qkv.weight[: qkv.out_features], torch.cat([layer.weight for layer in qkv.layers])
    )


@pytest.mark.parametrize("dtype, is_clipped", [("float32", True), ("bfloat16", False)])
def test_in_half_precision_gspo_clips_no_rounding_of_the_sampler(
    tiny_model, groups, dtype, is_clipped
):
    """The ratio is taken to the first pass, which the second one has left by its step."""
    policy = load_policy(str(tiny_model), device="cpu", dtype=dtype)
    for group in groups:
        group.completions = [
            replace(each, logprobs=tuple(x + 0.01 for x in each.logprobs))
            for each in group.completions
        ]

    optimizer = sgd(policy, 0.0)

    def clipped(first_pass, rate):
        optimizer.param_groups[0]["lr"] = rate
        settings = dict(SETTINGS, clip_low=3e-4, clip_high=4e-4)
        metrics = update(policy, optimizer, groups, before=first_pass, kind="gspo", **settings)
        return metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]

    assert (clipped({}, 0.0) > 0) == is_clipped
    first_pass = {}
    clipped(first_pass, 1.0)
    assert clipped(first_pass, 0.0) > 0

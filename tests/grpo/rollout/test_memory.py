"""Memory, counted from the configuration, against what the code really keeps."""

import gc

import pytest
import torch
from transformers import CONFIG_MAPPING

from grpo.model.memory import (
    DeviceMemory,
    Shape,
    optimizer_bytes,
    prompts_at_once,
    shape_of,
    update_tokens,
)
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key


def test_activations_are_what_the_fast_forward_pass_saves(tiny_policy):
    shape = shape_of(tiny_policy.model.config, 4)
    prompt, completions = tuple(range(5, 25)), [tuple(range(30, 70))] * 2
    own = {p.untyped_storage().data_ptr() for p in tiny_policy.parameters}
    own |= {
        layer.weight.untyped_storage().data_ptr()
        for block in tiny_policy.fast_model.blocks
        for layer in block.linears
    }
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    packing = tiny_policy.pack([prompt], completions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = tiny_policy.predict(packing)
    assert hidden.requires_grad
    tokens = packing.tokens_N.numel()
    # attention on a CPU also keeps what a fused kernel does not: scores, masks
    expected = tokens * shape.activations()
    assert 0.95 * expected < sum(saved.values()) < 2.0 * expected


def test_gradient_checkpointing_keeps_one_tensor_for_each_layer(tiny_policy):
    shape = shape_of(tiny_policy.model.config, 4)
    packing = tiny_policy.pack([tuple(range(5, 25))], [tuple(range(30, 70))] * 2)
    tiny_policy.enable_gradient_checkpointing()

    def alive():
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        storages = (tensor.untyped_storage() for tensor in found if tensor.is_floating_point())
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    before = alive()
    hidden = tiny_policy.predict(packing)
    kept = {place: size for place, size in alive().items() if place not in before}
    assert hidden.requires_grad

    # The inputs of all layers, the last sum and its norm, and the angles of the rotary positions.
    each = packing.tokens_N.numel() * shape.width * 4
    assert shape.layers * each <= sum(kept.values()) <= (shape.layers + 3) * each
    assert shape.activations(True) < shape.activations()


def test_caches_are_what_the_shared_prompt_holds(tiny_policy):
    shape = shape_of(tiny_policy.model.config, 4)
    _, cache = tiny_policy.prefill([tuple(range(5, 25))])
    assert (
        sum(tensor.numel() * 4 for pair in cache.prompt.values() for tensor in pair)
        == 20 * shape.cache
    )


def test_llama_3b_in_round_figures():
    shape, billion = Shape(layers=28, width=3072, inner=8192, keys=1024, number=2), 10**9
    assert shape.cache == 114_688
    full = 6.4e9 + optimizer_bytes(3_212_749_824, 2)
    assert full == pytest.approx(57.8e9, rel=0.01)
    assert 6.4e9 + optimizer_bytes(3_212_749_824, 2, parts=4) == pytest.approx(
        (6.4 + 12.85 + 9.64) * 1e9, rel=0.01
    )
    assert optimizer_bytes(24_000_000, 4) == 12 * 24_000_000
    lora = 6.4e9 + optimizer_bytes(24_000_000, 4)
    for memory, held in (
        (80 * billion, full),
        (80 * billion, lora),
        (24 * billion, lora),
        (150 * billion, lora),
    ):
        tokens = update_tokens(shape, DeviceMemory(memory, held))
        prompts = prompts_at_once(
            shape, DeviceMemory(memory, held), completions=16, prompt=2000, room=1400
        )
        assert (
            held + tokens * shape.activations() + prompts * shape.cache * (2000 + 16 * 1400)
            < 0.95 * memory
        )
        assert tokens > 3600 and prompts >= 1
    assert update_tokens(shape, DeviceMemory(80 * billion, lora)) > update_tokens(
        shape, DeviceMemory(80 * billion, full)
    )
    assert (
        update_tokens(shape, DeviceMemory(1 * billion, full)) == 256
        and prompts_at_once(shape, DeviceMemory(1, full), completions=16, prompt=9, room=9) == 1
    )


def test_gradient_checkpointing_makes_room_for_more_tokens():
    """An 8B model within 80 GB: a prompt of 14,000 tokens with eight completions of 2,000."""
    shape = Shape(layers=32, width=4096, inner=14336, keys=1024, number=2)
    memory = DeviceMemory(80e9, 15.7e9)
    assert update_tokens(shape, memory) < 6000
    assert update_tokens(shape, memory, gradient_checkpointing=True) > 14_000 + 6 * 2000

    # What was measured on an H200 when both parts of a layer's input were kept: 0.70 MB a token.
    both = shape.activations(True) + shape.layers * shape.width * shape.number
    assert both == pytest.approx(0.70e6, rel=0.1)


def test_a_small_model_takes_more_tokens_to_keep_a_gpu_busy():
    """At 135 M parameters a step of 50 words, 36,000 tokens, is one micro-batch."""
    small = Shape(layers=30, width=576, inner=1536, keys=192, number=2)
    assert small.parameters == pytest.approx(134_515_008 - 49152 * 576, rel=1e-3)
    assert update_tokens(small, DeviceMemory(80e9, 1e9)) == 65_536
    assert 36_000 < update_tokens(small, DeviceMemory(40e9, 1e9)) < 65_536


def test_prompts_in_lots_are_answered_as_all_at_once(tiny_policy, monkeypatch):
    prompts = [tiny_policy.encode(text) for text in ("A", "Copy B.", "A: one two", "B: three", "C")]
    settings = dict(
        keys=[[sample_key(3, p, g) for g in range(3)] for p in range(5)],
        temperatures=[1.0, 0.7, 1.0, 0.0, 1.2],
        budgets=[9, 4, 12, 7, 9],
    )
    whole = generate(tiny_policy, RolloutRequest(prompts, **settings))
    asked = []
    monkeypatch.setattr(tiny_policy, "prompts_at_once", lambda *sizes: asked.append(sizes) or 2)
    assert [
        [c.tokens for c in group]
        for group in generate(tiny_policy, RolloutRequest(prompts, **settings))
    ] == [[c.tokens for c in group] for group in whole]
    ((completions, prompt, room),) = set(asked)
    assert completions == 3 and prompt == max(map(len, prompts)) and room >= 12


@pytest.mark.parametrize(
    "kind", ["gemma3", "gemma3n", "gemma4", "gemma4_text", "llama4", "qwen3_5", "mllama", "gpt2"]
)
def test_every_configuration_has_a_shape(kind):
    shape = shape_of(CONFIG_MAPPING[kind](), 2)
    assert 4 < shape.layers < 200 and 256 <= shape.width <= 16_384 and shape.inner >= shape.width

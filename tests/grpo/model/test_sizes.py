"""A model's context and its memory, counted from the configuration, against what really holds."""

import gc
from types import SimpleNamespace

import pytest
import torch
from tiny_models import SHAPE
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Qwen2Config,
)

from data.errors import UserError
from grpo.model.load import BUILTIN, load_policy
from grpo.model.sizes import (
    CACHE_SHARE,
    NO_CONTEXT_LIMIT,
    Shape,
    context_of,
    optimizer_bytes,
    shape_of,
    update_tokens,
)
from grpo.rollout.generate import Drafting, RolloutRequest, generate

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0 + 0.3 * i for i in range(16)],
}


@pytest.mark.parametrize(
    "config, tokens, with_windows",
    [
        (MptConfig(max_seq_len=300), 300, 300),
        (Gemma3Config(text_config={"sliding_window": 64, "max_position_embeddings": 96}), 64, 96),
        (Llama4TextConfig(max_position_embeddings=256, attention_chunk_size=48), 48, 256),
        (LlamaConfig(**SHAPE), 512, 512),
        (MistralConfig(**SHAPE, sliding_window=64), 64, 512),
        (MistralConfig(**SHAPE, sliding_window=None), 512, 512),
        (Qwen2Config(**SHAPE, sliding_window=64, use_sliding_window=False), 512, 512),
        (
            Qwen2Config(**SHAPE, sliding_window=64, use_sliding_window=True, max_window_layers=1),
            64,
            512,
        ),
        (
            Qwen2Config(**SHAPE, sliding_window=64, use_sliding_window=True, max_window_layers=2),
            512,
            512,
        ),
        (LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LONGROPE), 32, 32),
        (SimpleNamespace(), NO_CONTEXT_LIMIT, NO_CONTEXT_LIMIT),
    ],
)
def test_the_context_is_the_shortest_limit(config, tokens, with_windows):
    assert context_of(config, supports_windows=False)[0] == tokens
    assert context_of(config, supports_windows=True)[0] == with_windows


def policy_of(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu")
    policy.stops = (-1,)  # completions take their whole budgets
    return policy


def tokens(count, seed=1):
    drawn = torch.randint(4, 1000, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def sampled(policy, prompts, budgets, guesses=None, drafting=None):
    request = RolloutRequest(
        prompts,
        keys=[[number] for number in range(len(prompts))],
        temperatures=[1.0] * len(prompts),
        budgets=budgets,
        guesses=guesses,
    )
    return [completion for (completion,) in generate(policy, request, drafting)]


def test_a_window_is_the_context_and_the_user_is_told(tmp_path):
    policy = policy_of(MistralConfig(**SHAPE, sliding_window=64), tmp_path)
    assert policy.context == 64
    (note,) = policy.notes
    assert "attention window is 64 tokens" in note and "may have 64 tokens together" in note


def test_only_a_sequence_that_outgrows_the_window_is_refused(tmp_path):
    """Not a short prompt beside a long one, and not a draft that reaches beyond the budget."""
    policy = policy_of(MistralConfig(**SHAPE, sliding_window=64), tmp_path)
    long, short = tokens(50), tokens(3)
    lengths = [len(each.tokens) for each in sampled(policy, [long, short], [5, 55])]
    assert lengths == [5, 55]

    plain = sampled(policy, [long], [12])
    right = policy.decode(plain[0].tokens)
    drafted = sampled(policy, [long], [12], [lambda text: right * 5], Drafting("7"))
    assert drafted[0].tokens == plain[0].tokens

    with pytest.raises(UserError, match="window is 64 tokens, but prompt and completion have 65"):
        sampled(policy, [long], [16])


def test_longrope_models_stay_within_the_context_that_it_extends(tmp_path):
    """Beyond it, a sample would depend on the longest one beside it."""
    config = LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LONGROPE)
    policy = policy_of(config, tmp_path)
    assert policy.context == 32 and "LongRoPE beyond 32 tokens" in policy.notes[0]


# Memory


def test_activations_are_what_the_fast_forward_pass_saves(tiny_model):
    policy = load_policy(str(tiny_model), device="cpu")
    shape = shape_of(policy.model.config, 4)
    prompt, completions = tuple(range(5, 25)), [tuple(range(30, 70))] * 2
    own = {p.untyped_storage().data_ptr() for p in policy.parameters}
    own |= {
        layer.weight.untyped_storage().data_ptr()
        for block in policy.forward.llama.blocks
        for layer in block.linears
    }
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    packing = policy.forward.pack([prompt], completions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.forward.predict(packing)
    assert hidden.requires_grad
    tokens = packing.tokens_N.numel()
    # attention on a CPU also keeps what a fused kernel does not: scores, masks
    expected = tokens * shape.activations(is_fast=True)
    assert 0.95 * expected < sum(saved.values()) < 2.0 * expected


def test_gradient_checkpointing_keeps_one_tensor_for_each_layer(tiny_policy):
    shape = shape_of(tiny_policy.model.config, 4)
    packing = tiny_policy.forward.pack([tuple(range(5, 25))], [tuple(range(30, 70))] * 2)
    tiny_policy.enable_gradient_checkpointing()

    def alive():
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        storages = (tensor.untyped_storage() for tensor in found if tensor.is_floating_point())
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    before = alive()
    hidden = tiny_policy.forward.predict(packing)
    kept = {place: size for place, size in alive().items() if place not in before}
    assert hidden.requires_grad

    # The inputs of all layers, the last sum and its norm, and the angles of the rotary positions.
    each = packing.tokens_N.numel() * shape.width * 4
    assert shape.layers * each <= sum(kept.values()) <= (shape.layers + 3) * each
    assert shape.activations(True, True) < shape.activations(True)


def test_caches_are_what_the_shared_prompt_holds(tiny_policy):
    shape = shape_of(tiny_policy.model.config, 4)
    _, cache = tiny_policy.forward.prefill([tuple(range(5, 25))])
    assert (
        sum(tensor.numel() * 4 for pair in cache.prompt.values() for tensor in pair)
        == 20 * shape.cache
    )


def tokens_of(shape, total, held, gradient_checkpointing=False):
    token_bytes = shape.activations(True, gradient_checkpointing)
    return update_tokens(shape, total, max(0.0, total - held), token_bytes)


def test_llama_3b_in_round_figures():
    shape = Shape(layers=28, width=3072, inner=8192, keys=1024, number=2)
    assert shape.cache == 114_688
    full = 6.4e9 + optimizer_bytes(3_212_749_824, 2)
    assert full == pytest.approx(57.8e9, rel=0.01)
    assert optimizer_bytes(24_000_000, 4) == 12 * 24_000_000
    lora = 6.4e9 + optimizer_bytes(24_000_000, 4)
    for total, held in ((80e9, full), (80e9, lora), (24e9, lora), (150e9, lora)):
        tokens = tokens_of(shape, total, held)
        cached = CACHE_SHARE * (total - held)
        assert held + tokens * shape.activations(True) + cached < 0.96 * total
        assert tokens > 3600
    assert tokens_of(shape, 80e9, lora) > tokens_of(shape, 80e9, full)
    assert tokens_of(shape, 1e9, full) == 256


def test_gradient_checkpointing_makes_room_for_more_tokens():
    """An 8B model within 80 GB: a prompt of 14,000 tokens with eight completions of 2,000."""
    shape = Shape(layers=32, width=4096, inner=14336, keys=1024, number=2)
    assert tokens_of(shape, 80e9, 15.7e9) < 6000
    assert tokens_of(shape, 80e9, 15.7e9, gradient_checkpointing=True) > 14_000 + 6 * 2000


def test_a_small_model_takes_more_tokens_to_keep_a_gpu_busy():
    """At 135 M parameters a step of 50 words, 36,000 tokens, is one micro-batch."""
    small = Shape(layers=30, width=576, inner=1536, keys=192, number=2)
    assert small.parameters == pytest.approx(134_515_008 - 49152 * 576, rel=1e-3)
    assert tokens_of(small, 80e9, 1e9) == 65_536
    assert 36_000 < tokens_of(small, 40e9, 1e9) < 65_536


@pytest.mark.parametrize("kind", ["gemma3n", "llama4", "qwen3_5", "gpt2"])
def test_every_configuration_has_a_shape(kind):
    shape = shape_of(CONFIG_MAPPING[kind](), 2)
    assert 4 < shape.layers < 200 and 256 <= shape.width <= 16_384 and shape.inner >= shape.width

"""The policy: what it refuses to load, its end tokens, its prompt, which model its reference is,
and its memory, counted from the configuration, against what really holds.
"""

import gc
import json
import shutil

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoTokenizer

from grpo.data.errors import UserError
from grpo.learn.optimizer import optimizer_bytes
from grpo.model import load
from grpo.model.load import load_policy
from grpo.model.policy import CACHE_SHARE, Shape, shape_of, update_tokens

PROMPT = (5, 6, 7)


def hidden(policy):
    with torch.no_grad():
        return policy.forward.prefill([PROMPT])[0]


def disturb(policy):
    with torch.no_grad():
        for parameter in policy.parameters:
            generator = torch.Generator().manual_seed(0)
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    "damage, message",
    [
        (shutil.rmtree, "no such directory"),
        (lambda folder: (folder / "config.json").unlink(), r"no model there \(no config.json\)"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: [path.unlink() for path in folder.glob("*token*")], "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(tiny_model, tmp_path, damage, message):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=f"--model {folder}: .*{message}.*; give builtin") as caught:
        load_policy(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_of_several_chat_templates_the_default_is_used(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    template = AutoTokenizer.from_pretrained(folder).chat_template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    policy = load_policy(str(folder), device="cpu")
    assert policy.encode("Hello") == load_policy(str(tiny_model), device="cpu").encode("Hello")


def test_a_gpu_that_is_not_there_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UserError, match="^--device cuda: torch sees no GPU here; give --device cpu$"
    ):
        load_policy(str(tiny_model), device="cuda")
    assert load_policy(str(tiny_model), device="auto").device.type == "cpu"


def test_prompt_and_target_in_tokens(tiny_policy):
    tokenizer = tiny_policy.tokenizer
    turns = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    whole = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    prompt = tiny_policy.encode("one two")
    answer = whole[len(prompt) :]  # begins where the prompt ends, its end token included
    assert whole[: len(prompt)] == prompt and answer[-1] == tokenizer.eos_token_id
    assert tiny_policy.decode(answer).strip() == "three four"
    assert len(tiny_policy.target_tokens("three four")) + 1 == len(answer)
    tokenizer.chat_template = None
    assert tokenizer.decode(tiny_policy.encode("one two")).lstrip() == "one two\n"


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_policy_keeps_the_reference_it_started_with(tiny_model, tmp_path, rank):
    policy = load_policy(str(tiny_model), device="cpu", lora_rank=rank)
    adapted = [module for module in policy.model.modules() if hasattr(module, "lora_A")]
    assert {module.scaling["default"] for module in adapted} == ({8} if rank else set())  # 32 / 4
    start = hidden(policy)
    disturb(policy)
    policy.save(tmp_path)

    resumed = load_policy(str(tiny_model), device="cpu", weights=tmp_path, keep_reference=True)
    assert torch.equal(hidden(resumed), hidden(policy)) and not torch.equal(hidden(resumed), start)
    assert [p.shape for p in resumed.parameters] == [p.shape for p in policy.parameters]
    with pytest.raises(KeyError), resumed.reference() as reference:
        assert torch.equal(hidden(reference), start)
        raise KeyError
    assert torch.equal(hidden(resumed), hidden(policy))  # itself again, after an error too


@pytest.mark.parametrize("options", [dict(), dict(lora_rank=4, keep_reference=True)])
def test_no_second_model_is_held_without_need(tiny_model, options):
    policy = load_policy(str(tiny_model), device="cpu", **options)
    assert policy.frozen is None
    if not options:
        with (
            pytest.raises(AssertionError, match="there is no reference when beta is 0"),
            policy.reference(),
        ):
            pass


def test_a_quantised_base_is_for_a_gpu(tiny_model):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match="--config: quantise nf4: needs a GPU"):
        load_policy(str(tiny_model), device="cpu", lora_rank=4, quantise="nf4")


def test_a_missing_bitsandbytes_is_one_line(tiny_model, monkeypatch):
    monkeypatch.setattr(load, "_device", lambda _: "cuda:0")
    monkeypatch.setattr(load, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(
        UserError, match="--config: quantise nf4: bitsandbytes is not installed; pip inst"
    ):
        load_policy(str(tiny_model), lora_rank=4, quantise="nf4")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:inner dimension")  # smaller than bitsandbytes likes
@pytest.mark.parametrize("quantise", ["nf4", "int8"])
def test_a_quantised_base_is_sampled_and_learned_on(tiny_model, quantise):
    pytest.importorskip("bitsandbytes")
    policy = load_policy(str(tiny_model), device="cuda", lora_rank=4, quantise=quantise)
    plain = load_policy(str(tiny_model), device="cuda", lora_rank=4)

    def size(policy):
        return sum(p.numel() * p.element_size() for p in policy.model.parameters())

    assert (
        policy.forward.llama is None and policy.decoder.step is None and size(policy) < size(plain)
    )
    torch.testing.assert_close(hidden(policy), hidden(plain), atol=0.5, rtol=0.2)
    packing = policy.forward.pack([PROMPT], [(8, 9, 10), (11, 12)])
    policy.forward.predict(packing).float().square().sum().backward()
    gradients = [p.grad for p in policy.parameters if p.grad is not None]
    assert len(gradients) == len(policy.parameters)
    # B is zero at first: A has none.
    assert sum(g.abs().sum() > 0 for g in gradients) >= len(gradients) / 2


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
    held = sum(tensor.numel() * 4 for pair in cache.prompt.values() for tensor in pair)
    assert held == 20 * shape.cache


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

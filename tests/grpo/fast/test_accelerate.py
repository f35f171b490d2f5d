"""The paths and the choice between them: what is compared, and what is fallen back from."""

import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from tiny_architectures import ARCHITECTURES, CONVOLUTIONS, EVERY_SECOND, Architecture, write
from tiny_models import PROMPTS, SHAPE, make_tiny_model, rollout
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
)

from grpo.data.errors import UserError
from grpo.fast import accelerate as fast
from grpo.fast.accelerate import FastForward, accelerate
from grpo.fast.merged_linear import MergedLinear
from grpo.model import rows
from grpo.model.check import (
    FLOAT32_MISSING,
    FLOAT32_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    MISSING,
    check_model,
)
from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import PlainForward, Policy

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN)


def policy_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return accelerated(AutoModelForCausalLM.from_config(config).to(dtype))


def accelerated(model):
    policy = Policy(model, TOKENIZER, name="odd")
    accelerate(policy)
    return policy


def saved(kind, folder):
    """Write the model that `architectures` has of this kind."""
    write(next(each for each in ARCHITECTURES if each.kind == kind), folder)
    return str(folder)


def distances(monkeypatch):
    """Return a list to which each distance of a rollout that is measured is added."""
    measure, seen = fast.rollout_distance, []
    monkeypatch.setattr(
        fast, "rollout_distance", lambda *given: seen.append(measure(*given)) or seen[-1]
    )
    return seen


def adapters_of(policy):
    return [weight for name, weight in policy.model.named_parameters() if "lora_B" in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_hides_no_mistake_in_how_it_is_merged(monkeypatch, dtype):
    """Its B is 0: nothing that it is multiplied with would be seen."""
    copies = MergedLinear.copies
    monkeypatch.setattr(
        MergedLinear, "copies", lambda self: [(*pair, 1.0) for *pair, _ in copies(self)]
    )
    with pytest.warns(UserWarning, match="the fast forward pass disagrees"):
        policy = load_policy("builtin", device="cpu", dtype=dtype, lora_rank=64)
    assert policy.path == "shared"
    assert not any(weight.any() for weight in adapters_of(policy))


def test_the_path_does_not_depend_on_how_far_an_adapter_was_trained(monkeypatch):
    policy = load_policy("builtin", device="cpu", dtype="bfloat16", lora_rank=8)
    seen = distances(monkeypatch)
    for size in (0.0, 30.0):
        for weight in adapters_of(policy):
            torch.nn.init.constant_(weight, size)
        policy.causal.set_attn_implementation("sdpa")
        policy.forward, policy.decoder = PlainForward(policy), None
        policy.probe = check_model(policy)
        accelerate(policy)
        assert policy.path == "fast"
        assert all((weight == size).all() for weight in adapters_of(policy))
    assert seen[0] == seen[1] != 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_embedded_model_takes_the_fastest_path(dtype, lora_rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_policy("builtin", device="cpu", dtype=dtype, lora_rank=lora_rank)
    assert policy.path == "fast" and policy.forward.llama is not None


# What the registered attention function is given


def attend(**arguments):
    """Call it with one token, as a layer does."""
    shared = SimpleNamespace(longest_sequence=9, attend=lambda *arguments: "attended")
    heads = torch.zeros(1, 2, 1, 4)
    module = SimpleNamespace(layer_idx=0, **arguments.pop("module", {}))
    mask = arguments.pop("mask", None)
    return fast.attention(module, heads, heads, heads, mask, shared=shared, **arguments)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"scaling": 1.0, "dropout": 0.0, "is_causal": True},
        {"s_aux": None, "softcap": None, "position_ids": torch.zeros(1), "use_cache": False},
        {"sliding_window": 9},
        {"mask": 9},
        {"module": {"is_causal": False}, "is_causal": True},
    ],
)
def test_attention_takes_what_does_not_change_it(arguments):
    assert attend(**arguments) == "attended"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"softcap": 50.0, "position_bias": torch.zeros(1)}, "needs position_bias, softcap"),
        ({"something_new": False}, "needs something_new"),
        ({"dropout": 0.1}, "needs dropout"),
        ({"is_causal": False}, "needs is_causal=False"),
        ({"module": {"is_causal": False}}, "needs is_causal=False"),
        ({"mask": torch.zeros(1)}, "needs attention_mask"),
        ({"sliding_window": 8}, "window is 8 tokens, but prompt and completion have 9"),
        ({"mask": 8, "sliding_window": 20}, "window is 8 tokens"),
    ],
)
def test_attention_refuses_what_would_change_it(arguments, said):
    with pytest.raises(UserError, match=said):
        attend(**arguments)


def test_a_window_that_only_the_mask_knows_of_is_refused_when_it_is_outgrown():
    policy = policy_of(PhimoeConfig(**SHAPE, num_local_experts=2, sliding_window=50))
    assert policy.path == "shared"
    with pytest.raises(UserError, match="window is 50 tokens, but prompt and completion have 51"):
        rollout(policy, budget=60)


# What is noticed


def test_an_attention_that_swallows_an_argument_is_noticed(tmp_path):
    def swallowing(*arguments, s_aux=None, **others):
        return fast.attention(*arguments, **others)

    AttentionInterface.register(fast.ATTENTION_NAME, swallowing)
    try:
        policy = load_policy(saved("gpt_oss", tmp_path), device="cpu")
    finally:
        AttentionInterface.register(fast.ATTENTION_NAME, fast.attention)
    assert policy.path == "cached"
    assert policy.causal.config._attn_implementation != fast.ATTENTION_NAME


READ_PADDING = ("minimax", "blenderbot-small")


@pytest.mark.parametrize("kind", ["falcon_h1", "diffllama", "lfm2", "openai-gpt", *READ_PADDING])
def test_a_layer_with_a_state_of_its_own_is_noticed_in_bfloat16(tmp_path, kind):
    policy = load_policy(saved(kind, tmp_path), device="cpu", dtype="bfloat16")
    assert policy.path == ("plain" if kind == "openai-gpt" else "cached")  # which has no cache
    assert policy.rows.needs_one_length == (kind in READ_PADDING)


def test_a_small_error_by_padding_is_noticed_in_float32(tmp_path, monkeypatch):
    right = rows.rows_distance

    def wrong(policy, kind, probe):
        return right(policy, kind, probe) + (5e-5 if kind is rows.CachedRows else 0.0)

    monkeypatch.setattr(rows, "rows_distance", wrong)
    policy = load_policy(saved("falcon_h1", tmp_path), device="cpu")
    assert policy.path == "cached" and policy.rows.needs_one_length


@pytest.mark.parametrize("method", ["prefill", "extend", "predict"])
@pytest.mark.parametrize("size", [1e-2, float("nan")])
def test_an_error_in_each_call_is_noticed(tmp_path, monkeypatch, method, size):
    """A thousandth of a hidden state, in the last place of all; or what is not a number."""
    right = getattr(FastForward, method)

    def wrong(self, *arguments):
        result = right(self, *arguments)
        hidden = result[0] if method == "prefill" else result
        hidden.view(-1, hidden.shape[-1])[-1] *= 1 + size * torch.arange(64)
        return result

    folder = str(make_tiny_model(tmp_path))
    monkeypatch.setattr(FastForward, method, wrong)
    with pytest.warns(UserWarning, match="the fast forward pass disagrees with the model"):
        assert load_policy(folder, device="cpu").path == "cached"


def test_rounding_of_experts_in_bfloat16_passes():
    """A few places differ by much, as another expert is taken there."""
    config = MixtralConfig(
        **(SHAPE | {"num_hidden_layers": 16, "initializer_range": 0.08}), num_local_experts=8
    )
    assert policy_of(config, torch.bfloat16).path == "shared"


def test_rounding_of_a_large_logit_in_bfloat16_passes(monkeypatch):
    """Of the logits of a few likely tokens, up to 40, bfloat16 keeps multiples of 1/4."""
    changes = {"num_hidden_layers": 28, "initializer_range": 0.1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(SHAPE | changes))).bfloat16()
    with torch.no_grad():
        model.get_output_embeddings().weight[:20] *= 10
    seen = distances(monkeypatch)
    assert accelerated(model).path == "fast" and seen[0] < LOW_PRECISION_TOLERANCE / 2


def test_rounding_of_a_deep_random_model_in_bfloat16_passes(monkeypatch):
    """It is larger than in any trained model, and so it is between the model's two attentions."""
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
    seen = distances(monkeypatch)
    policy = policy_of(LlamaConfig(**(SHAPE | shape | heads)), torch.bfloat16)
    assert policy.path == "fast" and LOW_PRECISION_TOLERANCE < seen[0] < MISSING
    assert policy.causal.config._attn_implementation == fast.ATTENTION_NAME


@pytest.mark.parametrize("dtype, limit", [("bfloat16", MISSING), ("float32", FLOAT32_MISSING)])
def test_a_difference_beyond_the_models_own_rounding_is_noticed(monkeypatch, dtype, limit):
    monkeypatch.setattr(
        fast, "rollout_distance", lambda _, forward, __: 0.9 * limit if forward.llama else 0.0
    )
    with pytest.warns(UserWarning, match="the fast forward pass disagrees with the model"):
        assert load_policy("builtin", device="cpu", dtype=dtype).path == "shared"


def test_rounding_of_a_model_whose_embeddings_decide_much_passes_in_float32(monkeypatch):
    """Issue: Qwen2.5-0.5B ran every token again under an adapter of rank 8, and not at all of 4."""
    shape = {"num_hidden_layers": 40, "initializer_range": 0.3}
    seen = distances(monkeypatch)
    policy = policy_of(LlamaConfig(**(SHAPE | shape)), torch.float32)
    assert policy.path == "fast" and FLOAT32_TOLERANCE < seen[0] < FLOAT32_MISSING
    assert not policy.causal.get_input_embeddings()._forward_hooks


def test_a_model_that_computes_otherwise_is_noticed(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.warns(UserWarning, match="the fast forward pass disagrees with the model"):
        assert accelerated(model).path == "shared"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
)
def test_no_memory_is_not_taken_for_a_disagreement(tiny_policy, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(fast, "rollout_distance", full)
    tiny_policy.causal.set_attn_implementation("sdpa")
    with pytest.raises(type(error), match=str(error)):
        accelerate(tiny_policy)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}),
        ("lfm2", {"layer_types": CONVOLUTIONS}),
        ("qwen3_next", {"layer_types": EVERY_SECOND}),
        ("minimax", {"layer_types": EVERY_SECOND}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_state_that_hardly_matters_yet_is_not_shared_away(tmp_path, kind, options, dtype):
    """With small weights the state of these layers changes no log-probability noticeably.

    In half precision lfm2 then rounds as the model does, as it may on a GPU with larger weights.
    """
    write(Architecture(kind, "cached", options | {"initializer_range": 0.006}), tmp_path)
    policy = load_policy(str(tmp_path), device="cpu", dtype=dtype)
    assert policy.path == "cached" and policy.rows.needs_one_length == (kind in READ_PADDING)


def test_modules_that_an_adapter_replaces_are_not_the_references(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"])
    assert accelerated(peft.get_peft_model(base, config)).path == "shared"


def test_the_row_of_the_padding_token_gets_no_gradient_on_any_path(tmp_path):
    policy = load_policy(str(make_tiny_model(tmp_path)), device="cpu")
    pad = policy.causal.config.pad_token_id
    for path in ("fast", "plain"):
        if path == "plain":
            policy.forward = PlainForward(policy)
            policy.causal.set_attn_implementation("eager")
        weight = policy.causal.get_input_embeddings().weight
        weight.grad = None
        packing = policy.forward.pack([(5, pad, 7, pad)], [(9, 11)])
        policy.forward.predict(packing).square().sum().backward()
        assert weight.grad[pad].abs().max() == 0 and weight.grad[5].abs().max() > 0


# A rollout: prompts that begin alike, rows in any order, long rows


@pytest.fixture
def shapes(tiny_policy, monkeypatch):
    """The shapes (B, T) of the passes that are run."""
    passes, run = tiny_policy.forward, []
    monkeypatch.setattr(
        passes,
        "hidden_states",
        lambda tokens, *others, run_model=passes.hidden_states: (
            run.append(tuple(tokens.shape)) or run_model(tokens, *others)
        ),
    )
    return run


def assert_same_prefill(passes, prompts, one, other):
    """Compare hidden states, keys and values, and the hidden states of what follows them."""
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=0)
    for layer, pair in other[1].prompt.items():
        for expected, found in zip(pair, one[1].prompt[layer], strict=True):
            assert found.shape == expected.shape
            for row, prompt in enumerate(prompts):
                ends = slice(len(prompt))
                torch.testing.assert_close(
                    found[row, :, ends], expected[row, :, ends], atol=1e-5, rtol=0
                )

    rows = 2 * len(prompts)
    tokens = torch.arange(2 * rows).view(rows, 2)
    after = []
    for _, each in (one, other):
        each.allocate(rows, 4)
        after.append(passes.extend(tokens, each))
    torch.testing.assert_close(*after, atol=1e-5, rtol=0)


def test_prompts_of_like_length_are_run_together(tiny_policy, shapes):
    """Short prompts are not padded to the length of long ones."""
    passes = tiny_policy.forward
    prompts = [tuple(range(5, 5 + length)) for length in (3, 60, 7, 25, 50, 12)]
    parts, together = passes.prefill(prompts), passes._together(prompts)
    assert shapes == [(2, 60), (1, 25), (2, 12), (1, 3), (6, 60)]
    assert_same_prefill(passes, prompts, parts, together)


def test_a_prompt_that_begins_as_what_was_read_is_not_run_again(tiny_policy, shapes):
    passes = tiny_policy.forward
    prompts = [(7, 8, 9), (9, 8, 7, 6, 5, 4), (3, 3)]
    answers = [tuple(range(20, 40)), (20, 5), tuple(range(10, 30)), (1, 2, 3), (3, 4), (3, 4, 6)]
    known = [prompts[0] + answers[0][:19], (9, 8, 7), prompts[2] + answers[5][:2], (7, 8, 9, 20, 5)]
    wanted = [known[0], (9, 8, 3), *known[1:3], (3, 3, 3, 4, 6, 1)]
    with torch.no_grad(), passes.keeping():
        passes.predict(passes.pack(prompts[:2], answers[:4]))
        passes.predict(passes.pack(prompts[2:], answers[4:]))
        shapes.clear()
        found = passes.prefill(wanted)
    assert shapes == [(2, 6)], "no sequence begins as the second prompt, or goes on as the last"
    plain = passes.prefill(wanted)
    assert_same_prefill(passes, wanted, found, plain)


def test_rows_may_stand_in_any_order(tiny_policy):
    prompts = [tiny_policy.encode(prompt) for prompt in PROMPTS[:2]]
    tokens = torch.tensor([[5], [9]])
    hidden = []
    for order in (torch.tensor([0, 1]), torch.tensor([1, 0])):
        _, shared = tiny_policy.forward.prefill(prompts)
        shared.allocate(2, 8)
        tiny_policy.forward.extend(tokens, shared)
        shared.reorder(order, torch.tensor([1, 1]))
        hidden.append(tiny_policy.forward.extend(tokens[order], shared)[order])
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)

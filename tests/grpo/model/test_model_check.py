"""The comparison with the unmodified model: what it lets pass, what it falls back from, and what
it refuses by name.
"""

import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from tiny_architectures import (
    ARCHITECTURES,
    CONVOLUTIONS,
    EVERY_SECOND,
    Architecture,
    compare,
    write,
)
from tiny_models import SHAPE, VOCABULARY, loading, make_tiny_model, rollout
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
)

from data.errors import UserError
from grpo.model import check as model_check
from grpo.model import prefix_cache
from grpo.model.check import MISSING, choose_path
from grpo.model.distance import (
    FLOAT32_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    constant_factor,
    distance,
)
from grpo.model.load import BUILTIN, load_policy
from grpo.model.merged_linear import MergedLinear
from grpo.model.policy import Policy
from grpo.model.probe import probe_of

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN)


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def policy_of(config, dtype=torch.float32):
    return Policy(model_of(config, dtype), TOKENIZER, name="odd")


def saved(kind, folder):
    """Write the model that `architectures` has of this kind."""
    write(next(each for each in ARCHITECTURES if each.kind == kind), folder)
    return str(folder)


def refused(model) -> str:
    with pytest.raises(UserError) as error:
        Policy(model, TOKENIZER, name="odd")
    said = str(error.value)
    assert said.startswith(f"--model odd: {type(model).__name__} is not supported: ")
    assert "\n" not in said
    return said


def adapters_of(policy):
    return [weight for name, weight in policy.model.named_parameters() if "lora_B" in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_hides_no_mistake_in_how_it_is_merged(monkeypatch, dtype):
    """Its B is 0: nothing that it is multiplied with would be seen."""
    copies = MergedLinear.copies
    monkeypatch.setattr(
        MergedLinear, "copies", lambda self: [copy._replace(factor=1.0) for copy in copies(self)]
    )
    with pytest.warns(UserWarning, match="the fast forward pass disagrees"):
        policy = load_policy("builtin", device="cpu", options=loading(dtype=dtype, lora_rank=64))
    assert policy.path == "shared"
    assert not any(weight.any() for weight in adapters_of(policy))


def test_the_path_does_not_depend_on_how_far_an_adapter_was_trained():
    policy = load_policy("builtin", device="cpu", options=loading(dtype="bfloat16", lora_rank=8))
    seen = []
    for size in (0.0, 30.0):
        for weight in adapters_of(policy):
            torch.nn.init.constant_(weight, size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                model_check,
                "distance",
                lambda *pair: seen.append(distance(*pair)) or seen[-1],
            )
            choose_path(policy)
        assert policy.path == "fast"
        assert all((weight == size).all() for weight in adapters_of(policy))
    assert len(seen) == 4 and seen[:2] == seen[2:] != [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_embedded_model_takes_the_fastest_path(dtype, lora_rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_policy(
            "builtin", device="cpu", options=loading(dtype=dtype, lora_rank=lora_rank)
        )
    assert policy.path == "fast" and policy.fast_model is not None and not policy.is_plain


def test_the_probe_is_the_same_each_time_and_of_valid_tokens():
    probe = probe_of(50)
    assert probe == probe_of(50)
    tokens = [token for c in range(4) for token in probe.sequence(c)]
    assert max(tokens) < 50 and len(set(tokens)) > 20
    assert len(probe.prompts[0]) != len(probe.prompts[1])
    assert len(set(map(len, probe.completions))) > 2


# What the registered attention function is given


def attend(**arguments):
    """Call it with one token, as a layer does."""
    shared = SimpleNamespace(longest_sequence=9, attend=lambda *arguments: "attended")
    heads = torch.zeros(1, 2, 1, 4)
    module = SimpleNamespace(layer_idx=0, **arguments.pop("module", {}))
    mask = arguments.pop("mask", None)
    return prefix_cache.attention(module, heads, heads, heads, mask, shared=shared, **arguments)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"scaling": 1.0, "dropout": 0.0, "is_causal": True},
        {"s_aux": None, "softcap": None, "position_bias": None},
        {"position_ids": torch.zeros(1), "use_cache": False, "output_attentions": False},
        {"sliding_window": 9},
        {"mask": prefix_cache.LocalMask(9)},
        {"module": {"is_causal": False}, "is_causal": True},
    ],
)
def test_attention_takes_what_does_not_change_it(arguments):
    assert attend(**arguments) == "attended"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"s_aux": torch.zeros(2)}, "needs s_aux"),
        ({"softcap": 50.0, "position_bias": torch.zeros(1)}, "needs position_bias, softcap"),
        ({"something_new": False}, "needs something_new"),
        ({"dropout": 0.1}, "needs dropout"),
        ({"is_causal": False}, "needs is_causal=False"),
        ({"module": {"is_causal": False}}, "needs is_causal=False"),
        ({"mask": torch.zeros(1)}, "needs attention_mask"),
        ({"sliding_window": 8}, "window is 8 tokens, but prompt and completion have 9"),
        ({"mask": prefix_cache.LocalMask(8)}, "window is 8 tokens"),
        ({"mask": prefix_cache.LocalMask(8), "sliding_window": 20}, "window is 8 tokens"),
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
        return prefix_cache.attention(*arguments, **others)

    AttentionInterface.register(prefix_cache.ATTENTION_NAME, swallowing)
    try:
        policy = load_policy(saved("gpt_oss", tmp_path), device="cpu")
    finally:
        AttentionInterface.register(prefix_cache.ATTENTION_NAME, prefix_cache.attention)
    assert policy.path == "plain"
    assert policy.causal.config._attn_implementation != prefix_cache.ATTENTION_NAME


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["falcon_h1", "diffllama", "minimax", "lfm2"])
def test_a_layer_with_a_state_of_its_own_is_noticed_in_each_precision(tmp_path, kind, dtype):
    assert (
        load_policy(saved(kind, tmp_path), device="cpu", options=loading(dtype=dtype)).path
        == "plain"
    )


@pytest.mark.parametrize("method", ["prefill", "extend", "predict"])
@pytest.mark.parametrize("size", [1e-2, float("nan")])
def test_an_error_in_each_call_of_the_policy_is_noticed(tmp_path, monkeypatch, method, size):
    """A thousandth of a hidden state, in the last place of all; or what is not a number."""
    right = getattr(Policy, method)

    def wrong(self, *arguments):
        result = right(self, *arguments)
        if self.path != "plain":
            hidden = result[0] if method == "prefill" else result
            hidden.view(-1, hidden.shape[-1])[-1] *= 1 + size * torch.arange(64)
        return result

    folder = str(make_tiny_model(tmp_path))
    monkeypatch.setattr(Policy, method, wrong)
    with pytest.warns(UserWarning, match="the fast forward pass disagrees with the model"):
        assert load_policy(folder, device="cpu").path == "plain"


def test_rounding_of_experts_in_bfloat16_passes():
    """A few places differ by much, as another expert is taken there."""
    config = MixtralConfig(
        **(SHAPE | {"num_hidden_layers": 16, "initializer_range": 0.08}), num_local_experts=8
    )
    assert policy_of(config, torch.bfloat16).path == "shared"


def deep_random():
    """A model of random weights whose rounding in bfloat16 grows beyond LOW_PRECISION_TOLERANCE."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(SHAPE | shape))


def differences_of(monkeypatch):
    """Return a list that gets what each path differs by."""
    seen = []

    def noted(*arguments):
        seen.append(model_check_difference(*arguments))
        return seen[-1]

    model_check_difference = model_check._difference
    monkeypatch.setattr(model_check, "_difference", noted)
    return seen


def test_rounding_of_a_deep_random_model_in_bfloat16_passes(monkeypatch):
    seen = differences_of(monkeypatch)
    policy = policy_of(deep_random(), torch.bfloat16)
    assert policy.path == "fast" and LOW_PRECISION_TOLERANCE < seen[0] < MISSING
    assert (
        policy.fast_model is not None
        and policy.causal.config._attn_implementation == prefix_cache.ATTENTION_NAME
    )


def test_rounding_of_a_large_logit_in_bfloat16_passes(monkeypatch):
    """Of the logits of a few likely tokens, up to 40, bfloat16 keeps multiples of 1/4."""
    changes = {"num_hidden_layers": 28, "initializer_range": 0.1, "tie_word_embeddings": True}
    model = model_of(LlamaConfig(**(SHAPE | changes)), torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight[:20] *= 10
    seen = differences_of(monkeypatch)
    assert (
        Policy(model, TOKENIZER, name="odd").path == "fast"
        and seen[0] < LOW_PRECISION_TOLERANCE / 2
    )


def test_a_difference_beyond_the_models_own_rounding_does_not_pass(monkeypatch):
    seen = differences_of(monkeypatch)
    original = Policy.predict

    def wrong(self, packing):
        hidden = original(self, packing)
        if self.path != "fast":
            return hidden
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        return hidden * (1 + 0.075 * noise).to(hidden.dtype)

    monkeypatch.setattr(Policy, "predict", wrong)
    with pytest.warns(UserWarning, match="the fast forward pass disagrees with the model"):
        policy = load_policy("builtin", device="cpu", options=loading(dtype="bfloat16"))
    assert policy.path == "shared" and LOW_PRECISION_TOLERANCE < seen[0] < MISSING


def test_differences_by_hand():
    expected = torch.tensor([[0.0, 2.0], [0.0, -torch.inf], [1.0, 3.0]])
    found = torch.tensor([[0.1, 2.0], [0.4, -torch.inf], [1.3, 3.3]])
    assert distance(found, expected, False) == pytest.approx(0.3)  # 0.05, 0.2, 0.3: the worst
    # Less what is common to a place: 0.05, 0, 0. The deviations are 1, 0 and 1, 2/3 in the mean.
    assert distance(found, expected, True) == 0.0
    assert distance(found[:1], expected[:1], True) == pytest.approx(0.05)
    for low_precision, tolerance in ((False, FLOAT32_TOLERANCE), (True, LOW_PRECISION_TOLERANCE)):
        assert not distance(found * torch.nan, expected, low_precision) <= tolerance
    possible = found.nan_to_num(neginf=-100.0)  # a token that can never come
    assert distance(possible, expected, False) == torch.inf
    never = torch.tensor([[0.0, 2.0, -torch.inf]])
    assert distance(never, never, True) == 0.0
    assert not distance(never.nan_to_num(neginf=-100.0), never, True) <= MISSING


# Logits that are more than the output layer's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_times_a_constant_are_supported(dtype):
    policy = policy_of(GraniteConfig(**SHAPE, logits_scaling=8.0), dtype)
    assert policy.path == "shared" and policy.logit_scale == pytest.approx(1 / 8, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_logits_are_refused(dtype):
    config = Gemma2Config(**SHAPE, head_dim=32, final_logit_softcapping=10.0)
    assert "(capped or transformed)" in refused(model_of(config, dtype))


def test_a_constant_factor_is_found_and_nothing_else_is_one():
    part = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert constant_factor(part, part, False) == 1.0
    assert constant_factor(part / 16, part, False) == pytest.approx(1 / 16)
    assert (
        constant_factor(part.tanh(), part, False) is None
        and constant_factor(part + 1, part, True) is None
    )
    assert constant_factor(part[:, :4], part, False) is None


# What no path has


def test_a_model_that_looks_ahead_is_refused():
    config = BertConfig(**(SHAPE | {"num_key_value_heads": 4}), is_decoder=False)
    assert "depend on later tokens" in refused(model_of(config))


def test_a_model_that_mixes_the_sequences_of_a_batch_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.layers[0].mlp.register_forward_hook(lambda module, _, x: x - 0.5 * x.flip(0))
    with pytest.warns(UserWarning, match="fast forward pass"):
        assert "depend on the other sequences of the batch" in refused(model)


def test_what_goes_wrong_in_the_model_itself_is_named(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))

    def fails(*_, **__):
        raise TypeError("missing 1 required argument: 'token_type_ids'\nand more")

    monkeypatch.setattr(model, "forward", fails)
    said = refused(model)
    assert "on token ids alone (TypeError: missing 1 required argument: 'token_type_ids')" in said


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=": t5 is an encoder-decoder; give a decoder-only") as error:
        load_policy(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)


def test_weights_that_are_not_numbers_are_named_as_such(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="--model odd: its logits are not finite: the weights are"):
        Policy(model, TOKENIZER, name="odd")


def test_no_memory_is_not_taken_for_a_disagreement(tiny_policy, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model_check, "rollout_logprobs", full)
    with pytest.raises(torch.OutOfMemoryError):
        choose_path(tiny_policy)


SMALL = {"initializer_range": 0.006}


@pytest.mark.parametrize(
    "kind, options",
    [
        ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}),
        ("falcon_h1", {}),
        ("lfm2", {"layer_types": CONVOLUTIONS}),
        ("qwen3_next", {"layer_types": EVERY_SECOND}),
        ("minimax", {"layer_types": EVERY_SECOND}),
        ("hrm_text", {}),
    ],
)
def test_a_state_that_hardly_matters_yet_is_not_shared_away(tmp_path, kind, options):
    """With small weights the state of these layers changes no log-probability noticeably."""
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    write(Architecture(kind, "plain", options | SMALL), tmp_path)
    assert (
        load_policy(str(tmp_path), device="cpu", options=loading(dtype="float32")).path == "plain"
    )


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "gemma2", "nanochat"])
def test_a_cap_that_hardly_matters_yet_is_refused(kind):
    config = CONFIG_MAPPING[kind](**SHAPE | SMALL, final_logit_softcapping=30.0)
    assert "capped" in refused(model_of(config))


def test_layers_that_count_tokens_by_themselves_run_every_row_alone(tmp_path):
    """Llama 4 scales queries from `floor_scale` tokens on, by the index in the tensor."""
    options = {"no_rope_layers": [1, 1, 0], "floor_scale": 8}
    assert compare(Architecture("llama4_text", "plain", options), tmp_path).path == "plain"
    few = {"no_rope_layers": [1, 1, 1]}
    assert compare(Architecture("llama4_text", "shared", few), tmp_path).path == "shared"


def test_modules_that_an_adapter_replaces_are_not_the_references(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"])
    model = peft.get_peft_model(base, config)
    assert Policy(model, TOKENIZER, name="replaced").path == "plain"


def test_the_row_of_the_padding_token_gets_no_gradient_on_any_path(tmp_path):
    policy = load_policy(str(make_tiny_model(tmp_path)), device="cpu")
    pad = policy.causal.config.pad_token_id
    tokens = torch.tensor([[5, pad, 7, pad]])
    for path in ("fast", "plain"):
        policy.path = path
        weight = policy.causal.get_input_embeddings().weight
        weight.grad = None
        packing = policy.pack([tuple(tokens[0].tolist())], [(9, 11)])
        policy.predict(packing).square().sum().backward()
        assert weight.grad[pad].abs().max() == 0 and weight.grad[5].abs().max() > 0
        policy.fast_model = None
        policy.causal.set_attn_implementation("eager")

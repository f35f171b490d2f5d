"""What is supported of a model: its context, and the comparison with the unmodified model."""

import re
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from tiny_models import SHAPE, VOCABULARY, make_tiny_model, write_model
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma3Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    Qwen2Config,
)

from grpo.data.errors import UserError
from grpo.model.check import (
    FLOAT32_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    NO_CONTEXT_LIMIT,
    context_of,
    distance,
    probe_tokens,
)
from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import Policy
from grpo.rollout.generate import Drafting, RolloutRequest, generate

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN)


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def refused_model(model) -> str:
    said = refused(Policy, model, TOKENIZER, name="odd")
    assert said.startswith(f"--model odd: {type(model).__name__} is not supported: ")
    return said


def test_the_probe_is_the_same_each_time_and_of_valid_tokens():
    prompts, completions = probe_tokens(50)
    assert (prompts, completions) == probe_tokens(50)
    tokens = {token for each in prompts + completions for token in each}
    assert max(tokens) < 50 and len(tokens) > 15
    assert len(set(map(len, prompts))) == 2 and len(set(map(len, completions))) > 2


def test_differences_by_hand():
    found = torch.tensor([[0.1, 2.0], [1.3, 3.3]]).log_softmax(-1)
    added = torch.tensor([[0.1, 0.0], [0.3, 0.3]])
    exact, half = (
        SimpleNamespace(causal=SimpleNamespace(dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert distance(exact, found, found - added) == pytest.approx(0.3)  # 0.05 and 0.3: the worst
    # Less what is common to a place: 0.05 and 0. The deviations are 1.
    assert distance(half, found[:1], (found - added)[:1]) == pytest.approx(0.05)
    assert distance(half, found[1:], (found - added)[1:]) == pytest.approx(0.0, abs=1e-6)
    for policy, tolerance in ((exact, FLOAT32_TOLERANCE), (half, LOW_PRECISION_TOLERANCE)):
        assert not distance(policy, found * torch.nan, found) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"head_dim": 32, "final_logit_softcapping": 10.0}),
        ("gemma2", {"initializer_range": 0.006, "final_logit_softcapping": 30.0}),  # of no effect
        ("gemma3_text", {"initializer_range": 0.006, "final_logit_softcapping": 30.0}),
        ("gemma3_text", {}),
    ],
)
def test_logits_are_capped_and_scaled_as_the_model_does_it(kind, settings, dtype):
    model = model_of(CONFIG_MAPPING[kind](**SHAPE | settings), dtype)
    policy = Policy(model, TOKENIZER, name="odd")
    assert (policy.whole_head is None) == (settings == {})

    tokens = torch.arange(7, 17).view(2, 5)
    hidden = policy.hidden_states(tokens).detach().requires_grad_()
    expected = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(policy.head(hidden), expected)
    policy.head(hidden).sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad.any()


def test_a_model_that_looks_ahead_is_refused():
    config = BertConfig(**(SHAPE | {"num_key_value_heads": 4}), is_decoder=False)
    assert refused_model(model_of(config))


def test_a_model_that_mixes_the_sequences_of_a_batch_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.layers[0].mlp.register_forward_hook(lambda module, _, x: x - 0.5 * x.flip(0))
    assert "depend on more than the tokens before it" in refused_model(model)


def test_what_goes_wrong_in_the_model_itself_is_named(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))

    def fails(*_, **__):
        raise TypeError("missing 1 required argument: 'token_type_ids'\nand more")

    monkeypatch.setattr(model, "forward", fails)
    said = refused_model(model)
    assert "on token ids alone (TypeError: missing 1 required argument: 'token_type_ids')" in said


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert re.search(
        "cannot be loaded .*T5Config", refused(load_policy, str(tmp_path), device="cpu")
    )


def test_weights_that_are_not_numbers_are_named_as_such(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="--model odd: its logits are not finite; give a fresh"):
        Policy(model, TOKENIZER, name="odd")


# The context


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
        (PretrainedConfig(), NO_CONTEXT_LIMIT, NO_CONTEXT_LIMIT),
    ],
)
def test_the_context_is_the_shortest_limit(config, tokens, with_windows):
    assert context_of(config, supports_windows=False)[0] == tokens
    assert context_of(config, supports_windows=True)[0] == with_windows


def policy_of(config, folder):
    policy = load_policy(write_model(config, folder), device="cpu")
    policy.stops = (-1,)  # completions take their whole budgets
    return policy


def tokens(count, seed=1):
    drawn = torch.randint(4, 1000, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def sampled(policy, prompts, budgets, **drafts):
    request = RolloutRequest(
        prompts,
        keys=[[number] for number in range(len(prompts))],
        temperature=1.0,
        budgets=budgets,
        **drafts,
    )
    return [completion for (completion,) in generate(policy, request)]


def test_a_window_is_the_context_and_only_what_outgrows_it_is_refused(tmp_path):
    """Not a short prompt beside a long one, and not a draft that reaches beyond the budget."""
    policy = policy_of(MistralConfig(**SHAPE, sliding_window=64), tmp_path)
    assert policy.context == 64
    (note,) = policy.notes
    assert "attention window is 64 tokens" in note and "may have 64 tokens together" in note

    long, short = tokens(50), tokens(3)
    lengths = [len(each.tokens) for each in sampled(policy, [long, short], [5, 55])]
    assert lengths == [5, 55]

    plain = sampled(policy, [long], [12])
    right = policy.decode(plain[0].tokens)
    drafts = dict(guesses=[lambda text: right * 5], drafting=Drafting(7))
    drafted = sampled(policy, [long], [12], **drafts)
    assert drafted[0].tokens == plain[0].tokens

    with pytest.raises(UserError, match="window is 64 tokens, but prompt and completion have 65"):
        sampled(policy, [long], [16])


def test_longrope_models_stay_within_the_context_that_it_extends(tmp_path):
    """Beyond it, a sample would depend on the longest one beside it."""
    config = LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LONGROPE)
    policy = policy_of(config, tmp_path)
    assert policy.context == 32 and "LongRoPE beyond 32 tokens" in policy.notes[0]

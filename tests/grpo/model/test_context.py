"""How long sequences may be: the model's own limit, attention windows, extended positions."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import SHAPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    Qwen2Config,
    WhisperConfig,
)

from data.errors import UserError
from grpo.model.context import NO_CONTEXT_LIMIT, context_of
from grpo.model.load import BUILTIN, load_policy
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.speculative import AcceptanceModel

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
        (WhisperConfig(max_target_positions=448), 448, 448),
        (Gemma3Config(text_config={"sliding_window": 64, "max_position_embeddings": 96}), 64, 96),
        (Llama4TextConfig(max_position_embeddings=256, attention_chunk_size=48), 48, 256),
        (LlamaConfig(**SHAPE), 512, 512),
        (MistralConfig(**SHAPE, sliding_window=64), 64, 512),
        (MistralConfig(**SHAPE, sliding_window=None), 512, 512),
        (MistralConfig(**SHAPE, sliding_window=4096), 512, 512),
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
        (Gemma3TextConfig(**SHAPE, sliding_window=64), 64, 512),
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
    drafted = sampled(policy, [long], [12], [lambda text: right * 5], AcceptanceModel("7"))
    assert drafted[0].tokens == plain[0].tokens

    with pytest.raises(UserError, match="window is 64 tokens, but prompt and completion have 65"):
        sampled(policy, [long], [16])


@pytest.mark.parametrize(
    "config",
    [
        lambda: LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LONGROPE),
        lambda: Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=32),
    ],
)
def test_longrope_models_stay_within_the_context_that_it_extends(tmp_path, config):
    """Beyond it, a sample would depend on the longest one beside it."""
    policy = policy_of(config(), tmp_path)
    assert policy.context == 32 and "LongRoPE beyond 32 tokens" in policy.notes[0]

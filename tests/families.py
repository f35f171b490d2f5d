"""Small models of several families, and a rollout that any of them can do."""

import torch
from transformers import (
    AutoConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo.model.load import BUILTIN
from grpo.rollout.generate import generate
from grpo.rollout.sampling import sample_key

VOCABULARY = AutoConfig.from_pretrained(BUILTIN).vocab_size
PROMPTS = [
    "Copy text A.\nA: the owl",
    "Copy A, then B.\nA: one two three four five six\nB: seven",
    "A",
]


def rollout(policy, prompts=PROMPTS, samples=4, budget=24, temperature=1.0, **settings):
    ids = [policy.encode(prompt) for prompt in prompts]
    keys = [
        [sample_key(0, 1, prompt, sample, 0) for sample in range(samples)] for prompt in prompts
    ]
    return ids, generate(
        policy,
        ids,
        keys=keys,
        temperatures=[temperature] * len(ids),
        budgets=[budget] * len(ids),
        **settings,
    )


SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=3,
    pad_token_id=0,
    initializer_range=0.15,
)
FAMILIES = {
    "llama-3 rotary scaling": lambda: LlamaConfig(
        **SHAPE,
        head_dim=32,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=3,
        pad_token_id=1,
        init_std=0.3,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        eos_token_id=3,
        bos_token_id=3,
        initializer_range=0.15,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": 4}),
}


def neighbouring_logprobs(logits, truncate, token, nudge=1e-3):
    """Return the log-probabilities of `token` that rounding may give it where logits (1, V) are
    truncated.

    There is more than one where a change of `nudge` in one logit changes which tokens are kept.
    """
    kept = truncate(logits, None).isfinite()
    ranked = logits[0].argsort(descending=True)[: int(kept.sum()) + 1].tolist()
    found = []
    for candidate in ranked:
        for change in (0.0, nudge, -nudge):
            nudged = logits.clone()
            nudged[0, candidate] += change
            kept = truncate(nudged, None).isfinite()
            if kept[0, token]:
                logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
                found.append(logprobs[0, token].item())
    return found

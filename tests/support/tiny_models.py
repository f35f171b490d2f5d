"""Small models of several families, and a rollout for any of them."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo.model.load import BUILTIN
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key, uniform

VOCABULARY = AutoConfig.from_pretrained(BUILTIN).vocab_size
PROMPTS = [
    "Copy text A.\nA: the owl",
    "Copy A, then B.\nA: one two three four five six\nB: seven",
    "A",
]


def make_tiny_model(folder, *, layers=2, heads=(4, 2), context=1024, seed=0):
    """Write a random Llama with 64 hidden units and the embedded tokenizer into `folder`.

    `heads` are those of the queries, and those of the keys and values. Its weights are large, so
    that its distributions are peaked and its texts vary.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_model(config, folder):
    """Write a random model of this configuration and the embedded tokenizer into `folder`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)
    return str(folder)


def rollout(policy, prompts=PROMPTS, samples=4, budget=24, temperature=1.0, **settings):
    """Return the tokens of the prompts, and completions of each."""
    ids = [policy.encode(prompt) for prompt in prompts]
    keys = [
        [sample_key(0, 1, prompt, sample, 0) for sample in range(samples)] for prompt in prompts
    ]
    request = RolloutRequest(
        ids,
        keys=keys,
        temperature=temperature,
        budgets=[budget] * len(ids),
        **settings,
    )
    return ids, generate(policy, request)


@torch.no_grad()
def hidden_states(policy):
    """Return the hidden states that predict a completion of three tokens."""
    return policy.forward.predict(policy.forward.pack([(40, 41, 42)], [(50, 51, 52)]))


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


OTHERS = {  # they do not pass attention arguments on
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        eos_token_id=3,
        initializer_range=0.3,
    ),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        eos_token_id=3,
        initializer_range=0.3,
    ),
}


def rounded_masses(logits, truncate, nudge=1e-4):
    """Return the probabilities (V,) of a place, for each set of tokens that truncation may keep.

    `logits` (V,) are divided by the temperature, and rounding may change each by `nudge`. Usually
    there is one set, but near the border of truncation there are several. They are found by the
    extremes: the likeliest r tokens gain while the others lose, and the other way round.
    """
    if truncate is None:
        return [logits.double().softmax(-1)]

    order = logits.argsort(descending=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    most = 2 + int(truncate(logits[None], None).isfinite().sum())
    nudged = [logits]
    for r in range(1, min(most, len(order))):
        sign = torch.where(rank < r, 1.0, -1.0)
        nudged += [logits + nudge * sign, logits - nudge * sign]

    kept = truncate(torch.stack(nudged), None).isfinite().unique(dim=0)
    return [logits.double().masked_fill(~each, -torch.inf).softmax(-1) for each in kept]


@dataclass(frozen=True)
class Sampling:
    """How completions were sampled: at which temperature, and from which tokens.

    `rounding` is how far float32 takes the logits from float64's, if that is known.
    """

    temperature: float
    truncate: Callable | None = None
    rounding: float = 0.0

    @property
    def tolerance(self) -> float:
        """How much two log-probabilities in float32 may differ.

        Each is off by the rounding of its logits, divided by the temperature.
        """
        return max(3e-5, 2 * self.rounding) / (self.temperature or 0.3)


def rounding_of_logits(policy, ids, answers):
    """Return the largest difference of a float32 policy's logits, in the trainer's forward pass of
    these completions, from those of `transformers` in float64.
    """
    exact = deepcopy(policy.causal).double().cpu()
    exact.set_attn_implementation("eager")
    largest = 0.0
    for prompt, group in zip(ids, answers, strict=True):
        for tokens in {answer.tokens for answer in group}:
            with torch.no_grad():
                found = policy.head(policy.forward.predict(policy.forward.pack([prompt], [tokens])))
                whole = exact(torch.tensor([[*prompt, *tokens]])).logits
            wanted = whole[0, len(prompt) - 1 : -1].log_softmax(-1)
            difference = found.double().cpu().log_softmax(-1) - wanted
            largest = max(largest, difference.abs().max().item())
    return largest


def assert_same_samples(policy, ids, found, expected, sampling):
    """Assert that tokens and log-probabilities are the same, except where rounding decides.

    Log-probabilities may differ by the tolerance of `sampling`, or be those of another set of kept
    tokens, if logits within the tolerance change the set. Two completions may differ from a place
    on if the place's uniform number is within 1e-4 of the border of the token's share, in one of
    those sets.
    """
    temperature = sampling.temperature
    atol = sampling.tolerance

    def masses(prompt, tokens):
        with torch.no_grad():
            logits = policy.head(
                policy.forward.predict(policy.forward.pack([prompt], [tokens]))[-1]
            ).float()
        return rounded_masses(logits / (temperature or 1.0), sampling.truncate, atol)

    for p, (prompt, ours, theirs) in enumerate(zip(ids, found, expected, strict=True)):
        for sample, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same = [a == b for a, b in zip(one.tokens, other.tokens)]
            place = same.index(False) if False in same else min(len(one.tokens), len(other.tokens))
            for t, (mine, wanted) in enumerate(zip(one.logprobs[:place], other.logprobs[:place])):
                if not abs(mine - wanted) <= atol:
                    token, near = other.tokens[t], masses(prompt, other.tokens[: t + 1])
                    allowed = [mass[token].log().item() for mass in near]
                    assert any(abs(mine - each) <= atol for each in allowed), (t, mine, wanted)

            if one.tokens != other.tokens:
                token, key = one.tokens[place], sample_key(0, 1, PROMPTS[p], sample, 0)
                number = uniform(torch.tensor(key), place).item()
                shares = [
                    (total[token - 1].item() if token else 0.0, total[token].item())
                    for total in (
                        mass.cumsum(0) for mass in masses(prompt, other.tokens[: place + 1])
                    )
                ]
                assert any(
                    low < high and low - 1e-4 < number < high + 1e-4 for low, high in shares
                ), (place, token, number, shares)

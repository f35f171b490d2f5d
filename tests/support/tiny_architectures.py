"""Tiny random models of many architectures, each compared with the unmodified model.

`test_families.py` tests them, and can print the table of architectures.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from grpo.data.errors import UserError
from grpo.learn.batch import completion_logprobs, micro_batches
from grpo.model.load import BUILTIN, load_adapter, load_policy
from grpo.model.policy import Policy
from grpo.model.rows import PlainRows
from grpo.records import Group
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key
from grpo.tasks.base import Problem

# Sizes under all names that configurations use; a configuration takes the names that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"), 96),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    "vocab_size": 4096,
    "word_embed_proj_dim": 64,
    "decoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "num_experts_per_tok": 2,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "attention_chunk_size": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}

# Stands for the configuration's own value of a size.
OWN = object()

LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": OWN}  # keys from a latent vector
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
BLOCKS: dict[str, Any] = {  # longer than the sequences that are compared when a model is loaded
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "sliding_attention"],
    "compress_rates": {"heavily_compressed_attention": 24, "compressed_sparse_attention": 4},
}
EVERY_SECOND = ["linear_attention", "full_attention", "linear_attention"]


# The kinds whose tests are not slow: at least one for each way that a model may differ.
TELLING = frozenset(
    "llama qwen2 qwen3 mistral gemma3_text phi3 gpt2 smollm3 bloom granite mixtral gpt_oss "
    "deepseek_v3 deepseek_v4 mamba qwen3_next lfm2 gemma2 cohere rwkv doge".split()
)


@dataclass(frozen=True)
class Architecture:
    """A model type of `transformers`, and how it is expected to run.

    - `outcome`: "fast", "shared", "cached" or "plain", or a part of the message that refuses it;
    - `changes`: what its configuration has in addition to SIZES.
    """

    kind: str
    outcome: str
    changes: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.variant}" if self.variant else self.kind


def _all(outcome: str, kinds: str, changes: dict | None = None) -> list[Architecture]:
    return [Architecture(kind, outcome, changes or {}) for kind in kinds.split()]


CONVOLUTIONS = ["conv", "full_attention", "conv"]
ARCHITECTURES = [
    *_all("fast", "llama qwen2 qwen3"),
    Architecture("mistral", "fast", {"sliding_window": None}, "full attention"),
    # Attention alone
    *_all("shared", "mistral gemma gemma3_text phi phi3 gpt2 gpt_neox gpt_bigcode opt biogpt ctrl"),
    *_all("shared", "starcoder2 persimmon olmo olmo2 olmo3 glm glm4 helium arcee smollm3 ernie4_5"),
    *_all("shared", "exaone4 hunyuan_v1_dense seed_oss apertus bitnet ministral llama4_text"),
    *_all("cached", "bloom mpt codegen gptj xglm stablelm nemotron diffllama"),
    *_all("shared", "aria_text cwm fuyu hyperclovax jais2 ministral3 gpt-sw3 whisper"),
    *_all("shared", "minimax_m3_vl_text gemma4_text"),
    *_all("plain", "openai-gpt"),
    *_all("cached", "gpt_neox_japanese granite_swa hrm_text mbart mvp"),
    *_all("cached", "plbart trocr marian blenderbot-small moshi"),
    *_all("cached", "bart blenderbot bigbird_pegasus pegasus"),
    Architecture("falcon", "cached", {"head_dim": OWN}),
    Architecture("falcon", "cached", {"head_dim": OWN, "alibi": True}, "ALiBi"),
    Architecture("falcon", "cached", {"head_dim": OWN, "new_decoder_architecture": True}, "40B"),
    # Logits times a constant
    *_all("shared", "granite granitemoe granitemoeshared"),
    # Experts
    *_all("shared", "mixtral qwen2_moe qwen3_moe phimoe olmoe glm4_moe dots1 minimax_m2"),
    *_all("shared", "ernie4_5_moe"),
    *_all("cached", "jetmoe gpt_oss"),
    *_all("shared", "exaone_moe flex_olmo hunyuan_v1_moe hy_v3 laguna mellum"),
    *_all("shared", "solar_open"),
    *_all("cached", "afmoe deepseek_v4 granitemoe_swa hy_v4 mimo_v2_flash"),
    Architecture("deepseek_v4", "cached", BLOCKS, "blocks of 24"),
    Architecture("zaya", "cached", {"num_experts_per_tok": 1}),
    Architecture(
        "dbrx",
        "shared",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    # Windows and chunks that the sequences outgrow
    Architecture("mistral", "cached", {"sliding_window": 16}, "window of 16"),
    Architecture("gemma3_text", "cached", {"sliding_window": 16}, "window of 16"),
    Architecture("llama4_text", "cached", {"attention_chunk_size": 16}, "chunks of 16"),
    Architecture(
        "gpt_neo",
        "cached",
        {"attention_types": [[["global", "local", "global"], 1]], "window_size": 16},
    ),
    # Keys from a latent vector
    *_all("cached", "deepseek_v2 deepseek_v3", LATENT),
    *_all("cached", "axk1 axk2 deepseek_v32 glm4_moe_lite glm_moe_dsa", LATENT),
    *_all("cached", "youtu", LATENT),
    # States and convolutions
    *_all("cached", "mamba falcon_mamba falcon_h1"),
    *_all("plain", "rwkv recurrent_gemma"),
    *_all("cached", "qwen3_next qwen3_5_text minimax", {"layer_types": EVERY_SECOND}),
    *_all("cached", "qwen3_5_moe_text", {"layer_types": EVERY_SECOND}),
    *_all("cached", "olmo_hybrid"),
    Architecture("lfm2", "cached", {"layer_types": CONVOLUTIONS}),
    Architecture("lfm2_moe", "cached", {"layer_types": CONVOLUTIONS}),
    Architecture("bamba", "cached", {"attn_layer_indices": [1]}),
    Architecture("granitemoehybrid", "cached", {"layer_types": ["mamba", "attention", "mamba"]}),
    Architecture("jamba", "cached", {"attn_layer_offset": 1, "attn_layer_period": 2}),
    Architecture("zamba", "cached", HYBRID),
    Architecture(
        "mamba2", "cached", {"num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16}
    ),
    Architecture(
        "nemotron_h", "plain", {"n_groups": 1, "layers_block_type": ["mamba", "attention", "moe"]}
    ),
    Architecture("xlstm", "plain", {"v_head_dim": OWN}),
    # Logits that are capped or scaled
    *_all("shared", "cohere cohere2 nanochat modernbert-decoder"),
    *_all("cached", "inkling_text gemma2 vaultgemma"),
    Architecture("minicpm3", "cached", LATENT),
    Architecture(
        "gemma3n_text",
        "shared",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 0,
        },
    ),
    # Refused
    *_all("depend on more than the tokens before", "doge"),
]


def config_of(architecture: Architecture):
    """Return the tiny configuration of an architecture."""
    kind = CONFIG_MAPPING[architecture.kind]
    known = kind()
    sizes = {
        name: value
        for name, value in SIZES.items()
        if name in known.to_dict() or hasattr(known, name)
    }
    sizes |= architecture.changes
    return kind(**{name: value for name, value in sizes.items() if value is not OWN})


def write(architecture: Architecture, folder: Path):
    """Write a random model and the embedded tokenizer into `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(architecture))
    for parameter in model.parameters():
        # Norms, biases and sinks are 0 or 1 in a new model, which would hide mistakes.
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)


@dataclass(frozen=True)
class Comparison:
    """How an architecture runs, compared with the unmodified model.

    `path` is "fast", "shared", "cached", "plain" or "refused"; then `reason` says why. `sampler`
    and `trainer` are the largest differences of a log-probability, in nats.
    """

    path: str
    sampler: float = 0.0
    trainer: float = 0.0
    reason: str = ""


def compare(architecture: Architecture, folder: Path, lora_rank: int = 0) -> Comparison:
    """Load a model as a user does, sample, and compare the log-probabilities with those of the
    unmodified model, which runs each sequence alone. An adapter is saved, and loaded into that.
    """
    write(architecture, folder)
    try:
        policy = load_policy(str(folder), device="cpu", dtype="float32", lora_rank=lora_rank)
    except UserError as error:
        return Comparison("refused", reason=str(error))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if lora_rank:
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:  # 0 in a new adapter
                weight.data += 0.1 * torch.randn_like(weight)
        policy.save(folder / "adapter")
        plain = load_adapter(plain, folder / "adapter")
    policy.stops = tuple(range(0, 4096, 12))  # so that completions end at different places

    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(4096, (length,), generator=generator).tolist())
        for length in (25, 3, 14)
    ]
    keys = [[sample_key(0, 1, prompt, sample, 0) for sample in range(3)] for prompt in range(3)]
    request = RolloutRequest(prompts, keys=keys, temperature=1.0, budgets=[14] * 3)
    groups = generate(policy, request)
    if policy.path == "cached":
        policy.rows = PlainRows
        expected = [[each.tokens for each in group] for group in generate(policy, request)]
        assert [[each.tokens for each in group] for group in groups] == expected
    trained = trained_logprobs(policy, prompts, groups)

    sampler = trainer = 0.0
    for prompt, completions, rows in zip(prompts, groups, trained.split(3), strict=True):
        for completion, row in zip(completions, rows, strict=True):
            expected = own_logprobs(plain, prompt, completion.tokens)
            sampler = max(
                sampler, (torch.tensor(completion.logprobs) - expected).abs().max().item()
            )
            trainer = max(trainer, (row[: len(expected)] - expected).abs().max().item())
    if lora_rank:  # the last completion again, by the adapter merged into its weights
        merged = own_logprobs(plain.merge_and_unload(), prompt, completion.tokens)
        trainer = max(trainer, (row[: len(merged)] - merged).abs().max().item())
    return Comparison(policy.path, sampler, trainer)


@torch.no_grad()
def own_logprobs(model, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities (T,) of `tokens` after `prompt` under a `transformers` model."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def trained_logprobs(policy: Policy, prompts, completions) -> torch.Tensor:
    """Return the log-probabilities (R, T) of the update.

    A backward pass must give most parameters a gradient.
    """
    problem = Problem("any", 1, "", "", "")
    groups = [
        Group(i, problem, prompt, 1.0, answers, advantages=[1.0, -1.0, 0.5])
        for i, (prompt, answers) in enumerate(zip(prompts, completions, strict=True))
    ]
    (batch,) = micro_batches(groups, "grpo", max_length=14, device=policy.device)
    logp_RT, _ = completion_logprobs(policy, batch)
    logp_RT.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    learned = sum(bool(gradient.any()) for gradient in gradients)
    assert learned > len(policy.parameters) / 2
    return logp_RT.detach()

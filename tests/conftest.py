"""What several rooms' tests share: a tiny random model that any machine runs in milliseconds."""

import pytest
import torch
from hypothesis import Phase, settings
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.load import BUILTIN, load_policy


settings.register_profile(
    "house", deadline=None
)  # shared machines are slow at times; that is no failure
settings.register_profile(
    "mutation", deadline=None, phases=[Phase.explicit, Phase.generate]
)  # a failure need not be made small
settings.load_profile("house")


def make_tiny_model(folder, *, layers=2, heads=4, kv_heads=2, context=1024, seed=0, scale=0.15):
    """Write a random Llama (64 wide) with the embedded tokenizer into `folder`, large weights: peaked, varied texts."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=scale,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture()
def tiny_policy(tiny_model):
    return load_policy(str(tiny_model), device="cpu")

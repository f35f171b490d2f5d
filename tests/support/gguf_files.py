"""Write GGUF files as llama.cpp's converter does, to test how they are read."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


# The tokens of a file, the first of the tokenizer: few, so that it is small.
VOCABULARY = 320


def write_gguf(
    folder: Path,
    path: Path,
    *,
    eos: int = 3,
    eot: int | None = None,
    template: str | None = None,
    precision: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """Write the Llama in the directory `folder` as a GGUF file.

    The matrices are in `precision`, and `eos` is the end token, `eot` that of a turn. Only the
    first VOCABULARY tokens are written.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("A tiny model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCABULARY)

    _add_tokenizer(writer, folder, eos, template)
    if eot is not None:
        writer.add_eot_token_id(eot)

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        rows = VOCABULARY if name == "model.embed_tokens.weight" else len(weight)
        _add_tensor(writer, name, weight[:rows], heads, precision)
    return _written(writer, path)


def _written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, folder: Path, eos: int, template: str | None):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary][:VOCABULARY]
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) in tokens]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index("<|user|>"))
    writer.add_eos_token_id(eos)
    if template:
        writer.add_chat_template(template)


def _add_tensor(
    writer: GGUFWriter,
    name: str,
    weight: np.ndarray,
    heads: dict[str, int],
    precision: GGMLQuantizationType,
):
    for part, count in heads.items():
        if part in name:  # llama.cpp interleaves the two halves of a head
            halves = weight.reshape(count, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    if weight.ndim == 1:
        writer.add_tensor(name, weight.astype(np.float32))
    else:
        writer.add_tensor(name, quants.quantize(weight, precision), raw_dtype=precision)


def write_gemma_vocabulary(path: Path) -> Path:
    """Write a GGUF file of the Gemma architecture with its vocabulary (SentencePiece) alone."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    user_defined = ["\n", "\n\n"]
    ranked = ["▁a", "▁ab", "bc", "▁abc"]
    letters = ["▁", "a", "b", "c"]
    byte = [f"<0x{i:02X}>" for i in range(256)]

    tokens = [*control, *user_defined, *ranked, *letters, *byte]
    scores = [0.0] * len(tokens)
    for place, token in enumerate([*ranked, *letters]):
        scores[tokens.index(token)] = -float(place)
    kinds = [
        *[TokenType.CONTROL] * len(control),
        *[TokenType.USER_DEFINED] * len(user_defined),
        *[TokenType.NORMAL] * len([*ranked, *letters]),
        *[TokenType.BYTE] * len(byte),
    ]

    writer = GGUFWriter(str(path), "gemma3")
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    return _written(writer, path)


# The characters by which byte-level vocabularies write the bytes of ASCII, a blank among them.
LETTERS = ["Ċ", "Ġ", *map(chr, range(ord("!"), ord("~") + 1))]
MERGES = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ a", "a b"]


def write_byte_level_vocabulary(path: Path, pre: str, **fields: bool) -> Path:
    """Write a GGUF file of the Llama architecture with a small byte-level vocabulary alone.

    `fields` are the tokenizer's, e.g. ``add_bos_token=True``.
    """
    merged = [pair.replace(" ", "") for pair in MERGES]
    tokens = ["<s>", "</s>", "<think>", *LETTERS, *merged, "xyz"]  # no merges lead to xyz
    kinds = [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    return _written(writer, path)

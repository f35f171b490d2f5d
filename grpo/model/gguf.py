"""Models in one GGUF file: the arguments of `from_pretrained`, and corrections of what it returns.

`transformers` reads the file (extra `gguf`). The weights are dequantised while they are loaded, so
the result is an ordinary model: it can be trained, saved in Hugging Face layout, and loaded again
without the file.

Its tokenizer is corrected where `transformers` 5 reads another than the model's own: byte-level
vocabularies (Llama 3, SmolLM, Qwen) are split into words as GPT-2's is, lose the first blank of a
text, and have only some of their added tokens; `add_bos_token` is ignored.

Source of the format: the GGUF specification, `tokenizer.ggml.*`; `tokenizer.ggml.pre` names the
rule of splitting.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from data.errors import UserError, needs, shown
from data.files import kind_of

SUFFIX = ".gguf"

# How texts are split into words, by `tokenizer.ggml.pre`: a pattern, and whether GPT-2's follows.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": (LLAMA_3, False),
    "qwen2": (LLAMA_3.replace("{1,3}", ""), False),
    "smollm": (r"\p{N}", True),
}


def is_gguf(source: str) -> bool:
    """Return whether `source`, the name of a model, is that of a GGUF file."""
    return source.endswith(SUFFIX)


def check_file(source: str) -> None:
    """Raise UserError if there is no such file, or if the reader is not installed."""
    if kind_of(source) != "file":
        raise UserError(
            f"--model {source}: no such file; give the path of a GGUF file on disk, "
            "a directory in Hugging Face layout, or a hub id"
        )
    with needs("gguf", "gguf", f"--model {source}"):
        import gguf  # noqa: F401


def place_of(source: str) -> tuple[str, dict[str, str]]:
    """Return the directory or hub id for `from_pretrained`, and the keyword for a GGUF file."""
    if not is_gguf(source):
        return source, {}
    path = Path(source)
    return str(path.parent), {"gguf_file": path.name}


def correct_tokenizer(tokenizer: Any, path: str) -> list[str]:
    """Make the `tokenizer` the one that the file at `path` describes; return warnings.

    Raises UserError for SentencePiece's vocabularies: `transformers` reads those of byte pairs as
    a unigram model, and so the policy would get tokens that it never saw in training.
    """
    fields = tokenizer_fields(path)
    if fields.get("model") != "gpt2":
        raise UserError(
            f"--model {path}: its vocabulary ({shown(fields.get('model'))}) is not byte-level; "
            "give the model's directory in Hugging Face layout"
        )

    _correct_byte_level(tokenizer, fields)
    pre, end = fields.get("pre"), fields.get("eos_token_id")
    if end is not None:  # the reader takes the first token of a turn for some models
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_bos_token = fields.get("add_bos_token", pre == "llama-bpe")
    if pre in (*SPLITS, "gpt-2"):
        return []
    return [
        f"--model {path}: how it splits texts into words ({shown(pre)}) is not known here, so its "
        "token ids may not be the model's own; to be sure, give --model the directory in Hugging "
        "Face layout"
    ]


def tokenizer_fields(path: str) -> dict[str, Any]:
    """Return the file's fields `tokenizer.ggml.NAME`, by name; the merges are only counted."""
    from transformers.integrations.gguf import read_gguf_metadata

    prefix = "tokenizer.ggml."
    fields, _ = read_gguf_metadata(path, (prefix + "tokens",))
    return {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix)
    }


def _correct_byte_level(tokenizer: Any, fields: dict[str, Any]) -> None:
    """Make the `tokenizer` of a byte-level vocabulary split, decode and add tokens as it should."""
    from gguf import TokenType

    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    pre = fields.get("pre")
    if pre in SPLITS:
        pattern, is_gpt2 = SPLITS[pre]
        backend.pre_tokenizer = Sequence(
            [
                Split(Regex(pattern), "isolated"),
                ByteLevel(add_prefix_space=False, use_regex=is_gpt2),
            ]
        )
    backend.model.ignore_merges = pre == "llama-bpe"  # a word in the vocabulary is one token

    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    kinds = zip(fields["tokens"], fields["token_type"], strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=special[kind])
            for token, kind in kinds
            if kind in special
        ]
    )

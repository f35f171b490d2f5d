"""The tokenizer of a GGUF file, where `transformers` 5 reads another than the model's own.

- SentencePiece's byte pairs (Gemma) are read as a unigram model: it maximises the sum of the
  scores, which are ranks of merges and not log-probabilities. So " quick" becomes "▁qu" and "ick",
  which the model never saw in training. Here the merges are rebuilt from the ranks.
- Byte-level vocabularies (Llama 3, SmolLM, Qwen) are split into words as GPT-2's is, lose the first
  blank of a text, and have only some of their added tokens.
- `add_bos_token` is ignored.

Source of the format: the GGUF specification, `tokenizer.ggml.*`; `tokenizer.ggml.model` is "llama"
for SentencePiece, "gpt2" for byte-level vocabularies, whose rule of splitting is
`tokenizer.ggml.pre`.
"""

from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.convert_slow_tokenizer import generate_merges

from data.text import shown
from grpo.model.encoding import Tokenizer

# A user-defined token, such as a run of line breaks, is merged before any ordinary one.
# The score of an ordinary token is minus its rank.
USER_DEFINED_SCORE = 1.0

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


def correct_vocabulary(tokenizer: Any, path: str) -> tuple[Tokenizer, str]:
    """Return the tokenizer that the file at `path` describes, and a warning ("": there is none)."""
    fields = tokenizer_fields(path)
    kind, pre = fields.get("model"), fields.get("pre")
    note = ""
    if kind == "llama" and isinstance(tokenizer.backend_tokenizer.model, Unigram):
        tokenizer = _byte_pair_tokenizer(tokenizer, fields)
        note = (
            f"--model {path}: transformers reads its vocabulary as a unigram model; it is one of "
            "byte pairs, and is used as such"
        )
    elif kind == "gpt2":
        _correct_byte_level(tokenizer, fields)
        if pre not in (*SPLITS, "gpt-2"):
            note = (
                f"--model {path}: how it splits texts into words ({shown(pre)}) is not known here, "
                "so its token ids may not be the model's own; to be sure, give --model the "
                "directory in Hugging Face layout"
            )
    is_default = kind == "llama" or pre == "llama-bpe"
    tokenizer.add_bos_token = fields.get("add_bos_token", is_default)
    return tokenizer, note


@lru_cache(maxsize=1)
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


def _byte_pair_tokenizer(read: Any, fields: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer of the class of `read` that merges pairs by the file's ranks."""
    from gguf import TokenType

    tokens, kinds = fields["tokens"], fields["token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens)}

    scores = {}
    for token, score, kind in zip(tokens, fields["scores"], kinds, strict=True):
        if kind == TokenType.NORMAL:
            scores[token] = score
        elif kind == TokenType.USER_DEFINED:
            scores[token] = USER_DEFINED_SCORE

    named = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokenizer = type(read)(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        add_bos_token=fields.get("add_bos_token", True),
        add_eos_token=fields.get("add_eos_token", False),
        chat_template=read.chat_template,
        **{name: getattr(read, name) for name in named},
    )

    control = [token for token, kind in zip(tokens, kinds) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    return tokenizer

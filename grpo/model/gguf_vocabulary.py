"""The tokenizer of a GGUF file whose vocabulary is SentencePiece's byte-pair encoding.

`transformers` 5 reads Gemma's as a unigram model: it maximises the sum of the scores, which are
ranks of merges and not log-probabilities. So " quick" becomes "▁qu" and "ick", which the model
never saw in training. Here the merges are rebuilt from the ranks.

Source of the format: the GGUF specification, `tokenizer.ggml.*`; `tokenizer.ggml.model` is "llama"
for SentencePiece.
"""

from functools import lru_cache
from typing import Any

from tokenizers.models import Unigram
from transformers.convert_slow_tokenizer import generate_merges

from grpo.model.encoding import Tokenizer

# A user-defined token, such as a run of line breaks, is merged before any ordinary one.
# The score of an ordinary token is minus its rank.
USER_DEFINED_SCORE = 1.0


def correct_vocabulary(tokenizer: Tokenizer, path: str) -> tuple[Tokenizer, str]:
    """Return the tokenizer that the file at `path` describes, and a warning ("": it was right)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, Unigram):
        return tokenizer, ""

    fields = tokenizer_fields(path)
    if fields.get("model") != "llama":
        return tokenizer, ""
    return (
        _byte_pair_tokenizer(tokenizer, fields),
        f"--model {path}: its vocabulary was read as a unigram model; it is used as byte pairs, "
        "which it is",
    )


@lru_cache(maxsize=1)
def tokenizer_fields(path: str) -> dict[str, Any]:
    """Return the file's fields `tokenizer.ggml.NAME`, by name. Reading them takes seconds."""
    from gguf import GGUFReader

    prefix = "tokenizer.ggml."
    fields = GGUFReader(path).fields
    return {
        name.removeprefix(prefix): field.contents()
        for name, field in fields.items()
        if name.startswith(prefix)
    }


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

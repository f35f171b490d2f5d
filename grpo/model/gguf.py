"""Models in one GGUF file: the arguments of `from_pretrained`, and corrections of what it returns.

`transformers` reads the file (extra `gguf`). The weights are dequantised while they are loaded, so
the result is an ordinary model: it can be trained, saved in Hugging Face layout, and loaded again
without the file.

Its tokenizer is corrected where `transformers` 5 reads another than the model's own:

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

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, decoders
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.convert_slow_tokenizer import generate_merges

from data.errors import UserError, needs
from data.files import kind_of
from data.text import shown
from grpo.model.encoding import Tokenizer, end_of_turn, name_of
from grpo.model.forward import Model

SUFFIX = ".gguf"

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


@contextmanager
def reading() -> Iterator[None]:
    """Within this context, a GGUF file is read without a progress bar, which no setting turns off.

    Turns all exceptions that the readers, in Python and Rust, raise for damaged files into
    ValueError.
    """
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except (OSError, ValueError, RuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def dequantised() -> dict[str, Any]:
    """Return the keywords with which `from_pretrained` dequantises the weights.

    Without them they would stay in their blocks on a GPU.
    """
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def name_model(model: Model, source: str) -> None:
    """Name `model` after its file, from where an adapter takes `base_model_name_or_path`."""
    model.name_or_path = model.config.name_or_path = source
    vars(model.config).pop("_model_name_or_path", None)  # the file's title, not a path


def correct_end(tokenizer: Tokenizer, source: str) -> str:
    """Correct the end token of a GGUF file's tokenizer.

    The right one is that of its chat template, else the file's own; the reader of `transformers` 5
    takes the first token of a turn for models such as SmolLM2. Returns a warning that names both,
    or "" if the reader was right.
    """
    read = tokenizer.eos_token_id
    end = end_of_turn(tokenizer)
    where = "its chat template"
    if end is None:
        end = tokenizer_fields(source).get("eos_token_id")
        where = "the file"
    if end is None or end == read:
        return ""

    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return (
        f"--model {source}: its end token is read as {name_of(tokenizer, read)}; {where} ends an "
        f"answer with {name_of(tokenizer, end)}, which is used"
    )


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

"""Models in one GGUF file: what `from_pretrained` is told of them, and what is put right in what
it returns.

`transformers` reads the file (extra `gguf`). The weights are dequantised while they are loaded, so
that the result is an ordinary model: it can be trained, saved in Hugging Face layout, and loaded
again without the file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import transformers

from grpo.model.endings import end_of_turn, name_of
from tasks.base import UserError, needs

SUFFIX = ".gguf"


def is_gguf(source: str) -> bool:
    """Return whether `source`, the name of a model, is that of a GGUF file."""
    return source.endswith(SUFFIX)


def check_file(source: str) -> None:
    """Raise UserError where there is no such file, or nothing to read it with."""
    if not Path(source).is_file():
        raise UserError(
            f"--model {source}: no such file; give the path of a GGUF file on disk, "
            "a directory in Hugging Face layout, or a hub id"
        )
    with needs("gguf", "gguf", f"--model {source}"):
        import gguf  # noqa: F401


def place_of(source: str) -> tuple[str, dict[str, str]]:
    """Return what `from_pretrained` is given: a directory or hub id, and of a GGUF file its name
    there.
    """
    if not is_gguf(source):
        return source, {}
    path = Path(source)
    return str(path.parent), {"gguf_file": path.name}


@contextmanager
def reading() -> Iterator[None]:
    """Within this context a GGUF file is read: without a bar of progress, which no setting turns
    off.

    Raises ValueError for whatever else its readers, in Python and Rust, raise on a damaged file.
    """
    try:
        with redirect_stderr(io.StringIO()):
            yield
    except (OSError, ValueError, RuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def unpacking() -> dict[str, Any]:
    """Return the keywords that have the weights dequantised, on a GPU too, where they would stay
    in their blocks.
    """
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def name_model(model, source: str) -> None:
    """Let `model` be named after its file: an adapter's `base_model_name_or_path` is taken from
    there.
    """
    model.name_or_path = model.config.name_or_path = source
    vars(model.config).pop("_model_name_or_path", None)  # the file's title, not a place


def correct_end(tokenizer, source: str) -> str:
    """Give the tokenizer of a GGUF file the end token of its chat template, else the file's own.

    Returns a warning that names both, or "" where the reader was right. The reader of
    `transformers` 5 names the first token of a turn for models such as SmolLM2.
    """
    read, end, why = tokenizer.eos_token_id, end_of_turn(tokenizer), "its chat template"
    if end is None:
        folder, options = place_of(source)
        end = transformers.AutoConfig.from_pretrained(folder, **options).eos_token_id
        why = "the file"
    if end is None or end == read:
        return ""

    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return (
        f"--model {source}: its end token is read as {name_of(tokenizer, read)}; {why} ends an "
        "answer with "
        f"{name_of(tokenizer, end)}, which is used"
    )

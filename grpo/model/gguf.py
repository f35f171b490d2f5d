"""Models in one GGUF file: the arguments of `from_pretrained`, and corrections of what it returns.

`transformers` reads the file (extra `gguf`). The weights are dequantised while they are loaded, so
the result is an ordinary model: it can be trained, saved in Hugging Face layout, and loaded again
without the file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import transformers

from data.errors import UserError, needs
from data.files import kind_of
from grpo.model.encoding import Tokenizer
from grpo.model.endings import end_of_turn, name_of
from grpo.model.gguf_vocabulary import tokenizer_fields
from grpo.model.interfaces import Model

SUFFIX = ".gguf"


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

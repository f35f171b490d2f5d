"""Fingerprints of the sources of a run: the files outside its directory that it depends on.

The sources are the base model, the adapter that the run started from, the dataset, the corpus, the
configuration, and the user's own task, reward and loss, which are files or Python functions. Every
checkpoint holds their fingerprints in sources.json. `--resume` compares them with those of today
and refuses each difference, unless `--accept-changes` names its kind. eval.py and grpo.export do
the same for the base model under an adapter.

A fingerprint is 16 hex digits of SHA-256, under the name of the file or document. Small files are
hashed completely. Of a file of weights, the header (names, shapes, types) is hashed completely, but
only PAGES evenly spaced pages of PAGE bytes of each larger tensor, with the first and the last page
among them. So 6 GB take well under a second.

Fine-tuning changes every page of the matrices that it trains. A change can be missed if it is
confined to bytes between the pages, such as a few rows of the embedding. For a user's own task, the
fingerprint covers its file but not what that imports; for a function see
`tasks.user_code.function_digest`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from data.errors import UserError
from data.files import kind_of, read_json
from data.text import shortened
from grpo.config import FROM_PYTHON, SOURCES, Config, program_of
from grpo.learn.loss import OwnLoss
from grpo.model import load
from grpo.model.adapter import layers_of
from grpo.model.gguf import is_gguf
from tasks.base import Task, python_functions_of, sources_of
from tasks.registry import programs_of
from tasks.user_code import function_digest

NAME = "sources.json"
DIGITS = 16
PAGE = 4096
PAGES = 8

# A message names this many differences of a kind, and counts the others.
SHOWN = 3

# The files of a model that transformers reads. Others, such as a README or a license, may change.
BASE_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)

# Fingerprints by the name of a file, a document or a setting.
Fingerprints = Mapping[str, str]


def sources_now(config: Config, task: Task, own_loss: OwnLoss | None) -> dict[str, Any]:
    """Return today's fingerprints of all kinds except the configuration."""
    dataset = config.dataset
    rewards = {f"{FROM_PYTHON}{name}": f for name, f in python_functions_of(task).items()}
    is_in_python = config.loss.startswith(FROM_PYTHON)
    losses = {config.loss: own_loss.function} if own_loss and is_in_python else {}
    return {
        "base": base_sources(config.model),
        "start": start_sources(config.model, config.start),
        "dataset": {dataset: file_digest(Path(dataset))} if dataset else {},
        "corpus": sources_of(task),
        "task": _programs(programs_of(config.task, task), rewards),
        "loss": _programs(program_of(config.loss), losses),
    }


def _programs(files: Sequence[Path], functions: Mapping[str, Callable]) -> Fingerprints:
    """Return the fingerprints of the user's own files and Python functions."""
    of_files = {str(file): file_digest(file) for file in files}
    return of_files | {name: function_digest(f) for name, f in functions.items()}


def base_sources(model: str) -> dict[str, str] | None:
    """Return the fingerprints of a model's files; of an adapter, also those of its base model.

    Returns None for a model of the hub that has not been downloaded yet.
    """
    whole, adapters = layers_of(model)
    if adapters:
        found = base_sources(whole)
        if found is not None:
            for each in adapters:
                found |= {f"{each.name}/{name}": value for name, value in _digests(each).items()}
        return found

    if is_gguf(model):
        return {Path(model).name: file_digest(Path(model))} if kind_of(model) == "file" else None

    folder = _folder_of(model)
    return None if folder is None else _digests(folder)


def _digests(folder: Path) -> dict[str, str]:
    """Return the fingerprints of the files in `folder` that belong to a model."""
    files = {path for pattern in BASE_FILES for path in folder.glob(pattern) if path.is_file()}
    return {
        path.name: weights_digest(path) if path.suffix == ".safetensors" else file_digest(path)
        for path in sorted(files)
        # A checkpoint may be the base. Its optimizer state is not read.
        if not path.name.startswith("optimizer")
    }


def start_sources(model: str, start: str | None) -> Fingerprints | None:
    """Return the fingerprints of the adapter that a run started from; {} if it has none.

    Returns None if the adapter no longer exists. Only the reference of --beta still depends on it.
    """
    if start is None or start == model:
        return {}
    if kind_of(start) != "folder":
        return None
    return {path.name: file_digest(path) for path in sorted(Path(start).glob("adapter_*"))}


def read_sources(checkpoint: Path) -> dict[str, Any]:
    """Return the sources that a checkpoint holds. Raises UserError if they are damaged."""
    path = checkpoint / NAME
    saved = read_json(path)
    is_sound = isinstance(saved, dict) and isinstance(saved.get("accepted"), list)
    if not (is_sound and all(isinstance(saved.get(kind) or {}, dict) for kind in SOURCES)):
        raise UserError(f"{path}: does not hold the sources of a run; give another checkpoint")
    return saved


def check(
    checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], accept: Sequence[str]
) -> dict[str, str]:
    """Return the accepted changes since `checkpoint` was saved, by kind.

    `saved` are the sources from `read_sources`, `now` those of today. Kinds that one of them lacks
    are not compared. Raises UserError, which names all changes, if a kind that has changed is not
    in `accept`.
    """
    found = {
        kind: ", ".join(_some(lines))
        for kind in SOURCES
        if (lines := differences(saved.get(kind), now.get(kind), is_config=kind == "config"))
    }
    if not set(found) <= set(accept):
        changes = "; ".join(f"{kind}: {change}" for kind, change in found.items())
        raise UserError(
            f"{checkpoint}: changed since it was saved: {changes}; undo that, or if it is intended "
            f"give --accept-changes {','.join(found)}"
        )
    return found


def check_base(checkpoint: Path, model: str, accept: Sequence[str]) -> list[str]:
    """Check the base model under the adapter of `checkpoint`; return notes for the user.

    A checkpoint that is a whole model does not depend on its base. Raises UserError if the base has
    changed and that is not accepted.
    """
    if not (checkpoint / "adapter_config.json").exists():
        return []

    changes = check(checkpoint, read_sources(checkpoint), {"base": base_sources(model)}, accept)
    return [accepted(checkpoint, kind, change) for kind, change in changes.items()]


def accepted(checkpoint: Path, kind: str, change: str) -> str:
    """Return the note that a change was accepted."""
    return f"changed since {checkpoint} was saved, and accepted: {kind}: {change}"


def differences(
    saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, is_config: bool = False
) -> list[str]:
    """Return a line for each name whose value differs, with both values.

    Returns [] if one side is unknown (None).
    """
    if saved is None or now is None:
        return []
    return [
        f"{name} {_shown(saved, name, is_config)} → {_shown(now, name, is_config)}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]


def file_digest(path: Path) -> str:
    """Return the fingerprint of a whole file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def weights_digest(path: Path) -> str:
    """Return the fingerprint of a safetensors file.

    It covers the size, the header, and some pages of each tensor.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for start, stop in _spans(file.fileno(), size):
                for offset in _places(start, stop):
                    page = os.pread(file.fileno(), min(PAGE, stop - offset), offset)
                    digest.update(page)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:DIGITS]


def _spans(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of the parts of a file: the pages of its header, then each tensor.

    A part of one page is hashed completely. Yields the whole file if it has no valid header.
    """
    # The file begins with the length of the header, in 8 bytes, and the header as JSON.
    data = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    try:
        header = json.loads(os.pread(descriptor, data - 8, 8)) if data <= size else {}
        offsets = [entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"]
        tensors = sorted((data + start, data + stop) for start, stop in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        tensors = []
    if not tensors:  # the file is damaged, and loading it will raise an error
        yield 0, size
        return

    for start in range(0, data, PAGE):
        yield start, min(data, start + PAGE)
    yield from tensors


def _places(start: int, stop: int) -> range | list[int]:
    """Return the offsets of the pages to hash: all pages of the span, or PAGES of them."""
    if stop - start <= PAGE * PAGES:
        return range(start, stop, PAGE)
    last = stop - PAGE
    return [start + (last - start) * i // (PAGES - 1) for i in range(PAGES)]


def _folder_of(model: str) -> Path | None:
    """Return the directory of a model; None for a hub model that is not downloaded yet."""
    if model == "builtin":
        return load.BUILTIN
    if kind_of(model):
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def _shown(values: Mapping[str, Any], name: str, is_config: bool) -> str:
    """Return a setting, or the first digits of a fingerprint."""
    if name not in values:
        return "absent"
    return shortened(str(values[name])) if is_config else str(values[name])[:8]


def _some(lines: list[str]) -> list[str]:
    """Return the first lines, and how many others there are."""
    others = len(lines) - SHOWN
    return lines[:SHOWN] + ([f"and {others} more"] if others > 0 else [])

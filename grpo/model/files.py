"""Checks of a model's directory before its files are read."""

import json
from pathlib import Path

from data.errors import UserError
from data.files import MAX_BYTES

# Bytes of the largest file in which impossible characters are looked for.
MAX_SETTINGS = 1 << 20

# What `transformers` and `tokenizers` read of a directory.
KINDS = (".json", ".jinja", ".safetensors", ".txt", ".model")

# One of these holds the vocabulary of a tokenizer.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

# How a file begins that a clone without Git LFS leaves in place of a large one.
LFS_POINTER = b"version https://git-lfs"


def check_files(folder: Path) -> None:
    """Raise UserError if a file that `transformers` reads is not an ordinary one, or too large."""
    for path in sorted(folder.iterdir()):
        if path.suffix in KINDS:
            if not path.is_file():
                raise UserError(f"--model {folder}: {path.name} is no ordinary file")
            if path.suffix in (".json", ".jinja") and path.stat().st_size > MAX_BYTES:
                raise UserError(
                    f"--model {folder}: {path.name} has {path.stat().st_size >> 20:,} MiB; at "
                    f"most {MAX_BYTES >> 20:,} MiB are read"
                )
            if path.suffix == ".json" and path.stat().st_size <= MAX_SETTINGS:
                _check_characters(path)


def why_unreadable(folder: Path) -> str:
    """Return what is wrong with a model's folder, if its files show it; otherwise ""."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (*KINDS, ".bin") and path.is_file():
            with path.open("rb") as file:
                if file.read(len(LFS_POINTER)) == LFS_POINTER:
                    return f"{path.name} is a pointer of Git LFS, not the file itself: git lfs pull"

    if not any((folder / name).exists() for name in TOKENIZERS):
        return "it has no tokenizer: no tokenizer.json, and no older kind"
    return ""


def _check_characters(path: Path) -> None:
    """Raise UserError if a JSON file holds half a surrogate pair, which cannot be saved again."""
    try:
        json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--model {path.parent}: {path.name} holds a lone surrogate") from error
    except (ValueError, RecursionError):
        return  # `transformers` says what is wrong with it

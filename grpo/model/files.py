"""Checks of a model's directory before its files are read."""

import json
from pathlib import Path

from data.files import MAX_BYTES
from tasks.base import UserError

# Bytes of the largest file in which impossible characters are looked for.
MAX_SETTINGS = 1 << 20

# What `transformers` and `tokenizers` read of a directory.
KINDS = (".json", ".jinja", ".safetensors", ".txt", ".model")


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


def _check_characters(path: Path) -> None:
    """Raise UserError if a JSON file holds half a surrogate pair, which cannot be saved again."""
    try:
        json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--model {path.parent}: {path.name} holds a lone surrogate") from error
    except (ValueError, RecursionError):
        return  # `transformers` says what is wrong with it

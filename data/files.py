"""Files in and out: text and JSON whose damage is named by file and line, and writing that leaves
no half files.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
import zstandard

from data.errors import UserError


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file; UserError when it cannot be read or is no UTF-8."""
    return _decode(str(path), _read_bytes(path))


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file; UserError when it cannot be read or is no JSON."""
    return _parse(str(path), read_text(path))


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield ("FILE, line N", object) for each line that is not blank; UserError names the file and
    line of damage.
    """
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            value = _parse(where, _decode(where, line))
            if not isinstance(value, dict):
                raise UserError(f"{where}: is {json_kind(value)}; each line must be a JSON object")
            yield where, value


def read_jsonl_zst(path: str | Path) -> list[dict]:
    """Return the lines of a JSON Lines file under zstandard; UserError when it is not whole."""
    content = _read_bytes(path)
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        text = frame.decompress(content).decode()
        if not frame.eof:
            raise ValueError("it is cut")
        if frame.unused_data:
            raise ValueError("something was added to it")
        return [json.loads(line) for line in text.splitlines()]
    except (ValueError, zstandard.ZstdError) as error:
        raise UserError(f"{path}: not a whole rollout file ({error})") from error


def write_jsonl_zst(path: str | Path, lines: Iterable[dict]) -> None:
    """Write JSON Lines compressed by zstandard with a checksum, whole or not at all.

    Raises UserError if the disk refuses it.
    """
    text = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)
    write_whole(
        path, zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text.encode())
    )


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file aside and rename it, so that it is either whole or unchanged.

    A device or a named pipe (/dev/stdout) is written directly. Raises UserError if the disk refuses
    the content.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(path.parent)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def check_output(path: str, flag: str) -> None:
    """Raise UserError if `flag` names a file that can surely not be written.

    Called before a long computation whose result goes there.
    """
    if "\0" in path:
        raise UserError(f"{flag} {path}: has a null byte; give the path of a file")

    target = Path(path).absolute()
    if target.is_dir():
        raise UserError(f"{flag} {path}: is a directory; give the path of a file")
    if target.exists():
        return
    folder = next(one for one in target.parents if one.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot be written, because of {folder}")


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Make the next read of a synced file come from the disk, on systems that allow it (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def json_kind(value: Any) -> str:
    """Return what a JSON value is, for an error line: "an object", "a list", "a string", ..."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "an integer",
        float: "a fraction",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds[type(value)]


def _read_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null byte in the path
        raise UserError(f"{path}: cannot be read: {error}") from error


def _decode(where: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: is not UTF-8 text (byte 0x{content[error.start]:02x})"
        ) from error


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON ({error})") from error


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of a run's config.yaml, unchecked. Raises UserError unless it is a
    mapping.
    """
    try:
        values = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise UserError(
            f"{path}: not valid YAML, so not the configuration of a run "
            f"({str(error).splitlines()[0]})"
        ) from error

    if not isinstance(values, dict):
        raise UserError(f"{path}: not the configuration of a run (no mapping of names to values)")
    return values

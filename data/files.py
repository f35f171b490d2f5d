"""Files in and out: text, JSON and YAML whose damage is named by file and line, and writing that
leaves no half files.
"""

import gzip
import json
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
import zstandard

from grpo.data.errors import UserError, blaming, shown

# The largest file that is read at once, and what a compressed one may expand to (bytes). The
# rollouts of a step of 256 completions with 1,300 tokens each take 10 MB.
MAX_BYTES = 1 << 30
MAX_EXPANDED = 1 << 29


def kind_of(path: str | Path) -> Literal["file", "folder", "other", ""]:
    """Return what stands at `path`, which may be any text of the user's; "" if nothing does.

    `Path.exists` and the like raise OSError for a text that is too long for a path.
    """
    try:
        mode = os.stat(path).st_mode
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # ValueError: a null byte, or half of a surrogate pair
        return ""
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def check_output(path: str, flag: str) -> None:
    """Raise UserError, before a long computation, if `flag` names a file that cannot be written."""
    target = Path(path).absolute()
    if kind_of(target) == "folder":
        raise UserError(f"{flag} {path}: is a directory; give the path of a file")

    folder = next(one for one in target.parents if kind_of(one))
    if not kind_of(target) and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot be written, because of {folder}")


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file; UserError when it cannot be read or is no UTF-8."""
    return _decode(str(path), read_bytes(path))


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file; UserError when it cannot be read or is no JSON."""
    return _parse(str(path), read_text(path))


class _StrictLoader(yaml.SafeLoader):
    """Refuses names that stand twice in a mapping, and aliases, which can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported; write the value again")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for name, count in Counter(names).items():
            if count > 1:
                raise yaml.YAMLError(f"{name} stands twice in a mapping")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError also for a name that stands twice."""
    return yaml.load(text, Loader=_StrictLoader)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, unchecked."""
    text = read_text(path)
    with blaming(f"{path}: not valid YAML"):
        values = load_yaml(text)
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping of names to values")
    return values


def read_jsonl(path: str | Path, *, is_log: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield ("FILE, line N", object) for each line that is not blank.

    The last line of a log may be incomplete, because its writer was killed, and is left out.
    """
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1] if is_log else lines, start=1):
        if line.strip():
            where, fix = f"{path}, line {number}", "each line must be a JSON object"
            value = _parse(where, _decode(where, line), f"; {fix}")
            if not isinstance(value, dict):
                raise UserError(f"{where}: is {shown(value)}; {fix}")
            yield where, value


def read_jsonl_zst(path: str | Path) -> list[dict]:
    """Return the objects of a file that `write_jsonl_zst` wrote."""
    return [line for _, line in read_jsonl(path)]


def write_jsonl_zst(path: str | Path, lines: Iterable[dict]) -> None:
    """Write JSON Lines compressed by zstandard with a checksum, whole or not at all.

    Wherever a line may have NaN, an infinity or a lone surrogate, it has a `raw_json`. Raises
    UserError if the disk refuses the file.
    """
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    write_whole(path, zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content))


def raw_json(value: Any) -> msgspec.Raw:
    """Return the JSON of a value that json can write, in a tenth of the time if msgspec can."""
    try:
        content = msgspec.json.encode(value)
        if b"null" not in content:  # msgspec writes it for NaN and infinities, too
            return msgspec.Raw(content)
    except (TypeError, ValueError, OverflowError):  # a lone surrogate, NumPy's float, 2**64
        pass
    return msgspec.Raw(json.dumps(value).encode())


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file aside and rename it, so that it is either whole or unchanged.

    Of several threads or processes that write the same file, the last one wins. A device or a named
    pipe (/dev/stdout) is written directly. Raises UserError if the disk refuses the content.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{threading.get_native_id()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return

        aside.unlink(missing_ok=True)
        with open(aside, "xb") as file:  # a new file, so no link is followed
            file.write(content)
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            aside.unlink()


def open_own(path: Path) -> Any:
    """Open a text file to append to it; OSError if it is a link, which may lead elsewhere."""
    return open(
        path,
        "a",
        encoding="utf-8",
        opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666),
    )


def check_links(folder: Path) -> None:
    """Raise UserError if a link in a run's `folder` leads out of it.

    The folder itself may be a link. Whoever has made a run cannot make us read or write elsewhere.
    """
    home = folder.resolve()
    for parent, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(home):
                where = folder / path.relative_to(home)
                raise UserError(
                    f"{where}: is a link out of the run; put the file or the folder itself there"
                )


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path) -> bytes:
    """Return what is in an ordinary file of at most MAX_BYTES; UserError otherwise.

    A file that ends in .gz or .zst is expanded, to at most MAX_EXPANDED bytes.
    """
    try:
        # A pipe without a writer would block otherwise.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UserError(f"{path}: is a folder, a pipe or a device; give an ordinary file")
            if facts.st_size > MAX_BYTES:
                raise UserError(f"{path}: has more than {MAX_BYTES >> 20:,} MiB; give less")
            content = file.read()
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: there is a null byte in the path
        said = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {said}") from error

    suffix = Path(path).suffix
    with blaming(f"{path}: not a whole {suffix} file of at most {MAX_EXPANDED >> 20} MiB"):
        if suffix == ".zst":
            if zstandard.frame_content_size(content) > MAX_EXPANDED:
                raise ValueError("it expands to more")
            decompressor = zstandard.ZstdDecompressor()
            content = decompressor.decompress(content, MAX_EXPANDED, allow_extra_data=False)
        elif suffix == ".gz":
            content = gzip.GzipFile(fileobj=BytesIO(content)).read(MAX_EXPANDED + 1)
            if len(content) > MAX_EXPANDED:
                raise ValueError("it expands to more")
    return content


def _decode(where: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise UserError(f"{where}: is not UTF-8 text (byte 0x{byte:02x})") from error


def _parse(where: str, text: str, advice: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON ({error}){advice}") from error

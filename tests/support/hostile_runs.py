"""Damaged run directories: something hostile replaces a file of a complete run, and a program reads
it.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
import zstandard
from hostile import ESCAPE

# Values that replace the value of a key.
VALUES = [None, "x", -1, [], {}, 1e308, 10**30, True, ESCAPE, {"a": ESCAPE}, [[ESCAPE]]]

# Stands for a value whose key is deleted.
DELETED = "deleted"

# At most this many keys of a line are changed; config.json and tokenizer.json have hundreds.
MAX_KEYS = 40

# The programs that read each file of a run, by their names in `test_hostile.py`.
READERS = {
    "config.yaml": ("resume", "continue", "eval", "steps", "report", "audit", "export"),
    "metrics.jsonl": ("resume", "steps", "report"),
    "eval.jsonl": ("resume", "report"),
    "groups.jsonl": ("resume", "degenerate", "report"),
    "seen.jsonl": ("resume", "continue", "eval", "audit"),
    "curriculum.jsonl": ("resume", "report"),
    "samples.log": ("resume",),
    "rollouts/step-000002.jsonl.zst": ("step", "group", "tokens", "replay", "report"),
    "rollouts/eval-000000.jsonl.zst": ("kind", "audit", "report"),
    "checkpoints/step-000002/manifest.json": ("resume", "continue", "eval", "export"),
    "checkpoints/step-000002/trainer.json": ("resume", "continue", "eval"),
    "checkpoints/step-000002/tokenizer.json": ("resume", "eval", "report", "tokens"),
    "checkpoints/step-000002/model.safetensors": ("resume", "continue", "export", "replay"),
    "checkpoints/step-000002/optimizer.safetensors": ("resume",),
}

CONTENTS = {
    "empty": b"",
    "zeros": bytes(4096),
    "not UTF-8": b"\xff\xfe\x80abc\n",
    "a list": b"[1, 2]\n",
    "an empty object": b"{}\n",
    "a string": json.dumps(ESCAPE).encode() + b"\n",
    "deep": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "a lone surrogate": b'{"step": 1, "purpose": "\\ud800"}\n',
    "NaN": b'{"step": NaN}\n',
    "a step alone": b'{"step": 1}\n',
}


@dataclass(frozen=True)
class Damage:
    """A way to damage a run, and the program that reads it afterwards."""

    name: str
    program: str
    apply: Callable[[Path], None]  # to the copy of a complete run


def damages(run: Path) -> Iterator[Damage]:
    """Yield ways to damage the complete `run`, always the same ones."""
    for name, programs in READERS.items():
        for program in programs:
            for what, content in CONTENTS.items():
                yield Damage(f"{program}: {name}: {what}", program, _write(name, content))
            for what, replace in REPLACED.items():
                yield Damage(f"{program}: {name}: {what}", program, _replace(name, replace))
        yield from _changed_keys(run, name, programs)


def _changed_keys(run: Path, name: str, programs: tuple[str, ...]) -> Iterator[Damage]:
    """Yield damages to keys of the first and the last line of a file of JSON or YAML."""
    if not (run / name).exists() or not name.endswith((".json", ".jsonl", ".zst", ".yaml")):
        return
    chosen = random.Random(name)
    for place in (0, -1) if name.endswith(("jsonl", "zst")) else (0,):
        paths = list(_paths(_lines(run / name)[place]))
        for path in chosen.sample(paths, min(MAX_KEYS, len(paths))):
            for value in [*chosen.sample(VALUES, 2), DELETED]:
                program = chosen.choice(programs)
                at = ".".join(map(str, path))
                yield Damage(
                    f"{program}: {name}, line {place}: {at} = {str(value)[:20]!a}",
                    program,
                    _set(name, place, path, value),
                )


def _paths(value: Any, depth: int = 0) -> Iterator[tuple]:
    """Yield the paths of keys to all values down to the third level; of a list, the first item."""
    if depth == 3:
        return
    items: list = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:1]))
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(item, depth + 1))


def _lines(path: Path) -> list[Any]:
    if path.suffix == ".yaml":
        return [yaml.safe_load(path.read_text())]
    if path.suffix == ".json":
        return [json.loads(path.read_text())]
    content = path.read_bytes()
    if path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    return [json.loads(line) for line in content.splitlines()]


def _set(name: str, place: int, path: tuple, value: Any) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / name
        lines = _lines(file)
        target = lines[place]
        for key in path[:-1]:
            target = target[key]
        if value is DELETED:
            del target[path[-1]]
        else:
            target[path[-1]] = value

        if file.suffix == ".yaml":
            _seal(run, name, yaml.safe_dump(lines[0], allow_unicode=True).encode())
        else:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            _seal(run, name, text.encode())

    return apply


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: _seal(run, name, content)


def _seal(run: Path, name: str, content: bytes) -> None:
    """Write a file, compressed if its name says so, and correct the checkpoint's manifest."""
    file = run / name
    if file.suffix == ".zst":
        content = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    file.unlink(missing_ok=True)  # it may be a hard link to the file of the complete run
    file.write_bytes(content)

    manifest = file.with_name("manifest.json")
    if manifest.exists() and file != manifest:
        saved = json.loads(manifest.read_text())
        saved["files"][file.name] = hashlib.sha256(content).hexdigest()
        manifest.unlink()
        manifest.write_text(json.dumps(saved))


def _replace(name: str, replace: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        replace(run / name, run.parent.parent / "outside")

    return apply


def _bomb(path: Path, _: Path) -> None:
    if path.suffix == ".zst":
        frame = zstandard.ZstdCompressor(level=3).compressobj()
        with open(path, "wb") as file:
            for _ in range(600):
                file.write(frame.compress(bytes(1 << 20)))
            file.write(frame.flush())
    else:  # a sparse file
        with open(path, "wb") as file:
            file.truncate(3 << 30)


REPLACED: dict[str, Callable[[Path, Path], None]] = {
    "a folder": lambda path, outside: path.mkdir(),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a link to itself": lambda path, outside: path.symlink_to(path.name),
    "a link to a file outside": lambda path, outside: path.symlink_to(outside / "precious.txt"),
    "a link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "gigabytes": _bomb,
    "missing": lambda path, outside: None,
}


def copied(run: Path, home: Path) -> Path:
    """Return a copy of `run` below `home`, beside a folder "outside" that nothing may touch."""
    outside = home / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "precious.txt").write_text("precious\n")
    target = home / "runs" / run.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target, copy_function=os.link)

    # Files that programs write in place must not be hard links.
    for path in target.rglob("*"):
        if path.is_file() and path.suffix in (".jsonl", ".log", ".yaml", ".txt"):
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    return target

"""The logs of a run: JSON Lines such as metrics.jsonl, and samples.log for people."""

import json
import math
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from data.errors import UserError
from data.files import open_own, read_bytes, write_whole
from grpo.records import Group
from grpo.run.folders import way_on
from grpo.run.schemas import check_line
from grpo.show.group import best_and_worst


class MetricsLog:
    """A file of JSON Lines, each with a "step". Lines are on the disk when `append` returns."""

    def __init__(self, folder: Path, name: str = "metrics.jsonl"):
        self.path = Path(folder) / name

    def append(self, *lines: dict[str, Any]) -> None:
        """Write lines at once. JSON has no NaN or infinity, so such numbers become null."""
        texts = [json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) for line in lines]
        append(self.path, "".join(f"{text}\n" for text in texts))

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, which are made again, and an incomplete last line."""
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            texts = [json.dumps(line, ensure_ascii=False) for line in kept]
            write_whole(self.path, "".join(f"{text}\n" for text in texts).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without an incomplete last one.

    Raises UserError, which names the line, if the log is damaged in any other way.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(_whole_lines(path), start=1):
        try:
            # msgspec also refuses NaN and lone surrogates, which no log contains.
            line = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: is not JSON ({error})") from error
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise UserError(
                f'{path}, line {number}: has no whole number "step"; the file is not a log of a run'
            )
        check_line(f"{path}, line {number}", path.name, line)
        lines.append(line)
    return lines


class SamplesLog:
    """samples.log: the best and the worst completion of every `every`-th step."""

    HEAD = re.compile(rb"^=== step (\d+) ")

    def __init__(self, folder: Path, every: int):
        self.path = Path(folder) / "samples.log"
        self.every = every

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Write the best and the worst completion of every `every`-th step and of the first."""
        if step % self.every and step != 1:
            return

        date = datetime.now(UTC).isoformat(timespec="seconds")
        append(self.path, f"=== step {step} {date}\n{best_and_worst(groups)}")

    def truncate_after(self, step: int) -> None:
        """Drop the entries of later steps, and an incomplete last line."""
        if not self.path.exists():
            return

        kept = []
        is_kept = True
        for line in _whole_lines(self.path):
            if head := self.HEAD.match(line):
                is_kept = int(head[1]) <= step
            if is_kept:
                kept.append(line + b"\n")
        write_whole(self.path, b"".join(kept))


def append(path: Path, text: str) -> None:
    """Append `text` to a file. It is on the disk when this function returns.

    Raises UserError if it cannot be written.
    """
    try:
        with open_own(path, "a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; free some space and "
            f"{way_on(path.parent)}"
        ) from error


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a log as bytes, without an incomplete last one.

    The file is not decoded, because the last line may end in the middle of a character.
    """
    return read_bytes(path).split(b"\n")[:-1]


def _finite(value: Any) -> Any:
    """Return a JSON value with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

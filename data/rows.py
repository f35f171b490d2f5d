"""Rows of a user's own data: JSON, Parquet, a dataset of the hub, or Python mappings."""

import codecs
import math
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import date, time
from io import BytesIO
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from grpo.data.errors import UserError, blaming, needs, shortened
from grpo.data.files import kind_of, read_bytes, read_json, read_jsonl

# The name of a dataset of the hub, with its configuration and its split.
ON_THE_HUB = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?(:.*)?")

# The most rows read from an iterable without a length, which may be endless: a fifth held out,
# enough for 500 steps of 32 different prompts. Every PAUSE seconds a line says how many were read.
MOST = 20_000
PAUSE = 5

# Where a row is from, e.g. "problems.jsonl, line 3", and its columns.
Row = tuple[str, dict[str, Any]]


def read_rows(source: Any) -> list[Row]:
    """Return the rows of `source`, with JSON values.

    `source` is a file (JSON Lines or a JSON list of objects, also as .gz or .zst, or Parquet), a
    dataset of the hub, "NAME", "NAME:CONFIG" or "NAME:CONFIG:SPLIT", a pandas DataFrame, a Hugging
    Face `Dataset`, or any iterable of mappings; the first MOST if it has no length. Numbers and
    arrays of NumPy become Python's, dates and times become texts (ISO 8601), and missing values
    (NaN) become None.
    """
    if isinstance(source, str | Path):
        name = str(source)
        rows = _read_named(name)
    else:
        name = f"data ({type(source).__name__})"
        rows = _given_rows(source, name)
    if not rows:
        raise UserError(f"{name}: holds no row")
    return rows


def _read_named(name: str) -> list[Row]:
    path = Path(name)
    if path.suffix == ".parquet":
        content = read_bytes(path)
        with needs("pyarrow", "data", f"{path}"):
            from pyarrow import parquet
        with blaming(f"{path}: is not a Parquet file"):
            return _numbered(str(path), parquet.read_table(BytesIO(content)).to_pylist())

    if path.suffix in (".jsonl", ".json", ".ndjson") or kind_of(path):
        if read_bytes(path).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return _numbered(str(path), read_json(path))
        return [(where, _columns(row, where)) for where, row in read_jsonl(path)]

    if path.suffix[1:].isalpha() or path.is_absolute() or not ON_THE_HUB.fullmatch(name):
        raise UserError(
            f"{shortened(name)}: no such file; give a .jsonl or .parquet file, or a hub dataset"
        )

    # A dataset of the hub. Nothing that it brings along is executed.
    with needs("datasets", "data", name):
        import datasets
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    with blaming(f"{name}: is neither a file nor a dataset of the hub that can be loaded"):
        loaded = datasets.load_dataset(repository, config or None, split=split or "train")
    return _given_rows(loaded, name)


def _given_rows(source: Any, name: str) -> list[Row]:
    if hasattr(source, "to_dict") and hasattr(source, "iterrows"):  # of pandas
        filled = source.astype(object).where(source.notna(), None)  # NaN, NaT and NA alike
        source = filled.to_dict("records")
    if not isinstance(source, Iterable) or isinstance(source, Mapping | bytes):
        raise UserError(f"{name}: give a file, a dataset (one split of it), or a list of mappings")
    return _numbered(name, source if hasattr(source, "__len__") else islice(source, MOST))


def _numbered(name: str, rows: Iterable[Any]) -> list[Row]:
    numbered, said = [], monotonic()
    for number, row in enumerate(rows, start=1):
        if monotonic() > said + PAUSE:
            said = monotonic()
            print(f"{name}: {number:,} rows read", file=sys.stderr)
        where = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: is {type(row).__name__}; each row must map names to values")
        numbered.append((where, _columns(row, where)))
    return numbered


def _columns(row: Mapping, where: str) -> dict[str, Any]:
    columns = {}
    for name, value in row.items():
        try:
            columns[str(name)] = _plain(value)
        except RecursionError as error:
            raise UserError(f"{where}: column {name!r} is nested too deeply") from error
        except TypeError as error:
            raise UserError(
                f"{where}: column {name!r} holds {error}; give texts, numbers, lists or mappings"
            ) from error
    return columns


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it; TypeError names what JSON cannot hold."""
    if hasattr(value, "tolist"):  # of NumPy
        if str(getattr(value, "dtype", "")) == "datetime64[ns]":  # as of pandas; it is a number
            value = value.astype("datetime64[us]")
        value = value.tolist()
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat() if value == value else None  # pandas' NaT differs from itself
    if isinstance(value, float) and not math.isfinite(value):
        if math.isinf(value):
            raise TypeError(str(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(type(value).__name__)

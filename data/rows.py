"""Rows of a user's own data: JSON Lines, Parquet, a dataset of the hub, or Python mappings."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError, blaming, needs
from data.files import check_file, read_jsonl

# Where a row is from, e.g. "problems.jsonl, line 3", and its columns.
Row = tuple[str, dict[str, Any]]


def read_rows(source: Any) -> list[Row]:
    """Return the rows of `source`, with JSON values.

    `source` is a file (.jsonl or .parquet), a dataset of the hub, "NAME", "NAME:CONFIG" or
    "NAME:CONFIG:SPLIT", a pandas DataFrame, a Hugging Face `Dataset`, or any iterable of mappings.
    Numbers and arrays of NumPy become Python's, and NaN becomes None. Raises UserError, which names
    the row, for anything else, and if there is no row.
    """
    if isinstance(source, str | Path):
        rows = _read_named(str(source))
    else:
        rows = _given_rows(source)
    if not rows:
        raise UserError(f"{_name_of(source)}: holds no row")
    return rows


def _name_of(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else f"data ({type(source).__name__})"


def _read_named(name: str) -> list[Row]:
    path = Path(name)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in (".csv", ".tsv", ".xlsx") and path.exists():
        raise UserError(f"{name}: is a table of another format; give a .jsonl or .parquet file")
    if path.suffix in (".jsonl", ".json", ".ndjson") or path.exists():
        return list(read_jsonl(path))
    if path.suffix or path.is_absolute():
        raise UserError(
            f"{name}: no such file; give a .jsonl or .parquet file, or a dataset of the hub"
        )
    return _read_hub(name)


def _read_parquet(path: Path) -> list[Row]:
    check_file(path)
    with needs("pyarrow", "data", f"{path}"):
        from pyarrow import parquet
    with blaming(f"{path}: is not a Parquet file"):
        rows = parquet.read_table(path).to_pylist()
    return _numbered(str(path), rows)


def _read_hub(name: str) -> list[Row]:
    """Return the rows of a dataset of the hub; the split is "train" unless the name says another.

    Nothing that a dataset brings along is executed.
    """
    with needs("datasets", "data", name):
        import datasets
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    with blaming(f"{name}: is neither a file nor a dataset of the hub that can be loaded"):
        loaded = datasets.load_dataset(repository, config or None, split=split or "train")
    return _given_rows(loaded, name)


def _given_rows(source: Any, name: str = "") -> list[Row]:
    """Return the rows of a data frame, a dataset, or an iterable of mappings."""
    name = name or _name_of(source)
    if hasattr(source, "to_dict") and hasattr(source, "iterrows"):  # of pandas
        source = source.to_dict("records")
    if not isinstance(source, Iterable) or isinstance(source, Mapping | bytes):
        raise UserError(f"{name}: give a file, a dataset, or a list of mappings")
    return _numbered(name, source)


def _numbered(name: str, rows: Iterable[Any]) -> list[Row]:
    numbered = []
    for number, row in enumerate(rows, start=1):
        where = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: is {type(row).__name__}; each row must map names to values")
        try:
            numbered.append((where, {str(key): _plain(value) for key, value in row.items()}))
        except RecursionError as error:
            raise UserError(f"{where}: holds lists in lists without end") from error
    return numbered


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it, as far as that is possible; None for a missing number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

"""Records of completions as files that other programs read: .jsonl, .csv, .parquet."""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from data.files import write_whole
from tasks.base import UserError, needs

Record = Mapping[str, Any]


def export(path: Path, records: Iterable[Record]) -> int:
    """Write the records (`grpo.run.reader.RunData.each_rollout`) in the format of the file's name;
    return how many there were.

    Raises UserError for another ending, when pyarrow is asked for and not there, and when the disk
    will not take the file.
    """
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise UserError(f"{path}: give a name that ends in {', '.join(writers)}")
    try:
        return writers[path.suffix](path, records)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _write_lines(path: Path, records: Iterable[Record]) -> int:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_whole(path, "".join(line + "\n" for line in lines).encode())
    return len(lines)


def _write_csv(path: Path, records: Iterable[Record]) -> int:
    """Write the records; lists and mappings are JSON in their cells."""
    records, written = iter(records), 0
    first = next(records, None)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first or ()))
        writer.writeheader()
        for record in chain([first] if first else [], records):
            writer.writerow(
                {
                    key: json.dumps(value) if isinstance(value, (list, dict)) else value
                    for key, value in record.items()
                }
            )
            written += 1
    return written


def _write_parquet(path: Path, records: Iterable[Record]) -> int:
    with needs("pyarrow", "notebook", f"{path} (names in .csv and .jsonl go without)"):
        import pyarrow
        import pyarrow.parquet
    rows = [_columns(record) for record in records]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)


def _columns(record: Record) -> dict[str, Any]:
    """Return a record whose values have one type a key: `parts` is JSON, and advantages of single
    tokens are a key of their own.
    """
    advantage = record["advantage"]
    by_token = isinstance(advantage, list)
    return {
        **record,
        "parts": json.dumps(record["parts"]),
        "advantage": None if by_token else advantage,
        "token_advantages": advantage if by_token else None,
    }

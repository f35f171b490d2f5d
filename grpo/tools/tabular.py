"""Export records of completions to files that other programs read: .csv, .jsonl, .parquet."""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from data.errors import UserError, needs
from data.files import replacing, write_whole

Record = Mapping[str, Any]


def export(path: Path, records: Iterable[Record]) -> int:
    """Write the records in the format that the file's name ends in; return their number.

    The records are those of `grpo.run.reader.RunData.each_rollout`. Raises UserError for any other
    ending, if the format needs pyarrow and it is missing, and if the file cannot be written.
    """
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise UserError(f"{path}: give a name that ends in {', '.join(writers)}")
    try:
        return writers[path.suffix](path, records)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _write_lines(path: Path, records: Iterable[Record]) -> int:
    """Write a JSON object a line; return their number."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_whole(path, "".join(line + "\n" for line in lines).encode())
    return len(lines)


def _write_csv(path: Path, records: Iterable[Record]) -> int:
    """Write a row for each record; return their number. Lists and mappings become JSON."""
    records = iter(records)
    first = next(records, None)
    count = 0
    with replacing(path) as aside, open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first or ()))
        writer.writeheader()
        for record in chain([first] if first else [], records):
            writer.writerow(
                {
                    key: json.dumps(value) if isinstance(value, (list, dict)) else value
                    for key, value in record.items()
                }
            )
            count += 1
    return count


def _write_parquet(path: Path, records: Iterable[Record]) -> int:
    """Write a table with a row for each record; return their number."""
    with needs("pyarrow", "notebook", f"{path} (.csv and .jsonl do not need it)"):
        import pyarrow
        import pyarrow.parquet
    rows = [_columns(record) for record in records]
    with replacing(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), aside)
    return len(rows)


def _columns(record: Record) -> dict[str, Any]:
    """Return a record in which each key has values of one type only.

    `parts` becomes JSON, and advantages of single tokens get the key `token_advantages`.
    """
    advantage = record["advantage"]
    by_token = isinstance(advantage, list)
    return {
        **record,
        "parts": json.dumps(record["parts"]),
        "advantage": None if by_token else advantage,
        "token_advantages": advantage if by_token else None,
    }

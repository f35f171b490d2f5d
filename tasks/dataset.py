"""Problems on disk: JSONL, one `Problem` a line, in UTF-8.

Beside such files `tasks.generate` writes a manifest, which says how each was made.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.files import kind_of, read_json, read_jsonl, write_whole
from tasks.base import SPLITS, Problem, Task, UserError, is_of_project
from tasks.checks import FIELDS, check_problem, check_stored

MANIFEST = "manifest.json"


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write one problem a line. The file is complete, or as it was before.

    Raises UserError if it cannot be written.
    """
    lines = [json.dumps(problem.to_json(), ensure_ascii=False) + "\n" for problem in problems]
    write_whole(path, "".join(lines).encode())


def read_problems(path: str | Path, task: Task | None = None) -> list[Problem]:
    """Return the problems of a file, in its order.

    Raises UserError if the file cannot be read or holds no problem. Raises UserError, which names
    the line, unless every line is a JSON object with exactly the fields of `Problem` and suits the
    `task`, if one is given.
    """
    problems = [_problem(where, value, task) for where, value in read_jsonl(path)]
    if not problems:
        raise UserError(f"{path}: holds no problem; make some with python -m tasks.generate")
    return problems


def _problem(where: str, value: dict[str, Any], task: Task | None) -> Problem:
    missing = [name for name in FIELDS if name not in value]
    unknown = [name for name in value if name not in FIELDS]
    if missing or unknown:
        wrong = f"lacks field {missing[0]!r}" if missing else f"unknown field {unknown[0]!r}"
        raise UserError(f"{where}: {wrong}; a problem has {', '.join(FIELDS)}")

    problem = Problem(**value)
    if task is None:
        check_problem(problem, where)
    else:
        check_stored(task, problem, where)
        _require_task(task, problem, where)
    return problem


def _require_task(task: Task, problem: Problem, where: str) -> None:
    """Raise UserError if `problem` is one of another task of the project than `task`."""
    if problem.task != task.name and is_of_project(problem.task) and is_of_project(task.name):
        raise UserError(
            f"{where}: is a problem of task {problem.task}, not of {task.name}; give --task "
            f"{problem.task}"
        )


def split_of(path: Path) -> str:
    """Return the split of a data set as the manifest beside it says; "" if none does."""
    try:
        entry = manifest_files(path.parent / MANIFEST).get(path.name)
    except UserError:
        return ""
    split = entry.get("split") if isinstance(entry, dict) else None
    return split if split in SPLITS else ""


def manifest_files(path: Path) -> dict[str, dict]:
    """Return the entries of a manifest by file name. Raises UserError if it is damaged."""
    if not kind_of(path):
        return {}
    manifest = read_json(path)
    if not (isinstance(manifest, dict) and isinstance(manifest.get("files"), dict)):
        raise UserError(
            f'{path}: is not a manifest, which holds {{"files": ...}}; move it away or give '
            "another folder"
        )
    return manifest["files"]

"""Write data sets of problems as JSONL files, one per level, with a manifest.

python -m tasks.generate --curriculum
python -m tasks.generate --split validation --levels 10,25 --size 200 --oversize 1.5
python -m tasks.generate --task arithmetic --family product --levels 32 --split test --size 500
"""

import hashlib
import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path

from data.errors import Parser, UserError, exit_status
from data.files import write_whole
from data.text import escape_control
from tasks.base import SPLITS, Task
from tasks.registry import load_task, split_options
from tasks.supply import (
    LADDER,
    MANIFEST,
    distinct_problems,
    manifest_files,
    parse_levels,
    write_problems,
)


def generate(task: Task, split: str, levels: list[int], size: int, seed: int, folder: Path) -> None:
    """Write ``<task>-<split>-<level>.jsonl``, of `size` problems, for each level.

    Each file is entered in the manifest as soon as it is complete. The manifest is ``{"files":
    {name: {"task", "split", "level", "seed", "size", "sha256", "date"}}}``; entries of other files
    are kept. Raises UserError if there are too few problems of a level; the files of the levels
    before it are kept.
    """
    manifest = folder / MANIFEST
    manifest_files(manifest)  # reports a damaged manifest before the work rather than after it

    for level in levels:
        problems = distinct_problems(task, seed=seed, split=split, level=level, size=size)
        path = folder / f"{task.name}-{split}-{level}.jsonl"
        write_problems(path, problems)

        entry = {
            "task": task.name,
            "split": split,
            "level": level,
            "seed": seed,
            "size": size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        content = {"files": manifest_files(manifest) | {path.name: entry}}
        write_whole(manifest, json.dumps(content, indent=2, ensure_ascii=False).encode())
        print(f"{escape_control(str(path))}: {size} problems")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tasks.generate",
        description="Write problems as JSONL files.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--task",
        default="interleave",
        metavar="TASK",
        help="name, or path/to/file.py:ClassName (default: %(default)s); the task's own flags work "
        "as well",
    )
    parser.add_argument("--split", default="train", choices=SPLITS, help="default: %(default)s")
    levels = parser.add_mutually_exclusive_group()
    levels.add_argument(
        "--levels", metavar="L,L,...", help="levels (default: the task's own level)"
    )
    levels.add_argument(
        "--curriculum", action="store_true", help=f"levels {','.join(map(str, LADDER))}"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=500,
        metavar="N",
        help="problems per level (default: %(default)s)",
    )
    parser.add_argument(
        "--oversize",
        type=float,
        default=1.0,
        metavar="F",
        help="write F times as many, to replace problems that training has seen (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the problem stream (default: %(default)s)"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("data/generated"),
        metavar="DIR",
        help="write the files here (default: %(default)s)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 2 for a user's mistake."""
    return exit_status("tasks.generate", lambda: write(arguments))


def write(arguments: list[str] | None) -> int:
    """Write the data set."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    task_options, others = split_options(options.task, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")

    if options.size < 1:
        raise UserError(f"--size {options.size}: must be at least 1")
    if not 1 <= options.oversize < math.inf:
        raise UserError(f"--oversize {options.oversize}: must be a factor of at least 1")

    task = load_task(options.task, options=task_options)
    levels = [task.default_level]
    if options.levels is not None:
        levels = parse_levels(options.levels, "--levels")
    elif options.curriculum:
        levels = list(LADDER)
    size = round(options.size * options.oversize)
    generate(task, options.split, levels, size, options.seed, options.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write data sets of problems as JSONL files, one per level, for --dataset.

python -m tasks.generate --levels 10,25 --size 500
python -m tasks.generate --task arithmetic --family product --levels 32 --split test
"""

import sys
from argparse import ArgumentDefaultsHelpFormatter
from pathlib import Path

from data.errors import Parser, UserError, exit_status
from data.text import escape_control
from tasks.base import SPLITS
from tasks.registry import load_task, split_options
from tasks.supply import distinct_problems, parse_levels, write_problems


def generate(arguments: list[str] | None) -> int:
    """Write ``<task>-<split>-<level>.jsonl`` for each level that the command line asks for.

    Raises UserError if there are too few problems of a level; the files of the levels before it are
    kept.
    """
    parser = Parser(
        prog="python -m tasks.generate",
        description="Write problems as JSONL files. A task's own flags work as well.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--task", default="interleave", help="name, or path/to/file.py:ClassName")
    add("--split", default="train", choices=SPLITS)
    add("--levels", metavar="L,L,...", help="levels; without them the task's own level")
    add("--size", type=int, default=500, metavar="N", help="problems per level")
    add("--seed", type=int, default=0, help="seed of the problem stream")
    add("--output-dir", type=Path, default=Path("data/generated"), metavar="DIR")

    options, others = parser.parse_known_args(arguments)
    task_options, others = split_options(options.task, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.size < 1:
        raise UserError(f"--size {options.size}: must be at least 1")

    task = load_task(options.task, options=task_options)
    split, levels = options.split, [task.default_level]
    if options.levels is not None:
        levels = parse_levels(options.levels, "--levels")
    for level in levels:
        problems = distinct_problems(
            task, seed=options.seed, split=split, level=level, size=options.size
        )
        path = options.output_dir / f"{task.name}-{split}-{level}.jsonl"
        write_problems(path, problems)
        print(f"{escape_control(str(path))}: {options.size} problems")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 2 for a user's mistake."""
    return exit_status("tasks.generate", lambda: generate(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Count the files, and their lines, from the command to the first gradient:
`python tests/tools/files_to_the_gradient.py`.

A file of the project counts if one of its functions is called, even during an import: whole, and by
the lines of the functions that are called. What is in grpo/fast, which can be deleted, is counted
apart too. Two ways are followed on the embedded model, each in a process of its own:

command  `train.py --task interleave --words 3`, with pre-flight, run directory and console
library  `make_trainer(task="interleave", level=3).step()`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SMALL = {"prompts": 2, "group_size": 4, "eval_problems": 4}
WAYS = ("command", "library")

OPTIMIZED = 1  # inspect.CO_OPTIMIZED: the flag of a function

entered: dict[str, dict[str, int]] = {}  # by file, the lines of each function that was called


def note(frame, event, argument) -> None:
    """Note the file of a function that is called. Code of modules and classes does not count."""
    code = frame.f_code
    if event == "call" and code.co_flags & OPTIMIZED and code.co_qualname[0] != "<":
        functions = entered.setdefault(code.co_filename, {})
        if code.co_qualname not in functions:
            last = max(line for _, _, line in code.co_lines() if line)
            functions[code.co_qualname] = last - code.co_firstlineno + 1


def print_at_first_gradient() -> None:
    """End this process after the first backward pass, and print the files that were entered."""
    from torch import Tensor

    backward = Tensor.backward

    def last(*arguments, **options):
        backward(*arguments, **options)
        sys.setprofile(None)
        rows = [f"{path}:{sum(lines.values())}" for path, lines in sorted(entered.items())]
        print("\n".join(rows), file=sys.__stderr__, flush=True)
        os._exit(0)

    Tensor.backward = last


def go(way: str) -> None:
    """Go this way, up to the first gradient."""
    threading.setprofile(note)
    sys.setprofile(note)
    if way == "command":
        import train

        print_at_first_gradient()
        sys.argv = ["train.py", "--task=interleave", "--words=3", "--config", json.dumps(SMALL)]
        train.main()
    else:
        from grpo import make_trainer

        print_at_first_gradient()
        make_trainer(task="interleave", level=3, **SMALL).step()


def files(way: str) -> dict[Path, int]:
    """Return the project's files on this way, and the lines of the functions that were called.

    They are found by a process in an empty folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--go", way]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.rpartition(":") for line in done.stderr.splitlines() if line.startswith(str(ROOT))]
    found = {Path(path): int(lines) for path, _, lines in rows}
    found.pop(Path(__file__).resolve(), None)
    return found


def told(found: dict[Path, int]) -> str:
    """Say how many files these are, with their lines, whole and called."""
    whole = sum(len(path.read_text().splitlines()) for path in found)
    return f"{len(found)} files, {whole:,} lines, {sum(found.values()):,} in functions called"


def main() -> None:
    """Print the number of files and lines of both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--go", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.go:
        return go(options.go)

    for way in WAYS:
        found = files(way)
        fast = {path: lines for path, lines in found.items() if "fast" in path.parts}
        print(f"{way}: {told(found)}; of these grpo/fast: {told(fast)}")
        for path, count in found.items() if options.list else ():
            whole = len(path.read_text().splitlines())
            print(f"  {whole:5,} {count:5,}  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

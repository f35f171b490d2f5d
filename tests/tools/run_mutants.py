"""Break the core on purpose, one change at a time, and run the tests that should notice.

A mutant of `mutants` is killed if a test fails (pytest's exit status 1), and survives if all
pass. Any other outcome is "broken": a mutant that cannot be imported, or whose tests do not end,
says nothing about the tests. The program works in copies of the source tree.

    python tests/tools/run_mutants.py [--jobs N] [WORD ...]

runs the mutants with one of the words in their file or name, e.g. loss.py.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]

# Seconds that the tests of one mutant may take.
LIMIT = 600

PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=0",
    "--hypothesis-profile=mutation",
]

# No byte code is written. Python would reuse it for a source file that changes twice within a
# second and keeps its size.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class _Replace(ast.NodeTransformer):
    """Replace every node whose syntax tree is `old`, and count them."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old = ast.dump(old)
        self.new = new
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.expr, ast.stmt)) and ast.dump(node) == self.old:
            self.count += 1
            return self.new
        return self.generic_visit(node)


def mutated(mutant: Mutant, text: str) -> str:
    """Return the source `text` of the mutant's file with its change made.

    Raises ValueError unless `old` occurs exactly once in the scope `where`.
    """
    tree = ast.parse(text)
    replace = _Replace(_parse(mutant.old), _parse(mutant.new))
    scope = _find_scope(tree, mutant.where) if mutant.where else tree
    if scope is not None:
        replace.visit(scope)

    if replace.count != 1:
        place = f"{mutant.file} {mutant.where}".strip()
        raise ValueError(f"{place}, '{mutant.name}': {replace.count} matches, not 1: {mutant.old}")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _parse(code: str) -> ast.expr | ast.stmt:
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _find_scope(tree: ast.AST, name: str) -> ast.AST | None:
    """Return the function or class with this qualified name, e.g. "Policy.save"."""
    first, _, rest = name.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == first:
            return _find_scope(node, rest) if rest else node
    return None


def outcome(folder: Path, tests: str) -> str:
    """Run `tests` in `folder` and return "killed", "survived", or "broken" and why."""
    try:
        done = subprocess.run(
            [*PYTEST, *tests.split()],
            cwd=folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"broken: no end within {LIMIT} seconds"

    last = "".join((done.stdout + done.stderr).strip().splitlines()[-1:])
    broken = f"broken: pytest ended with {done.returncode}: {last}"
    return {0: "survived", 1: "killed"}.get(done.returncode, broken)


def try_mutant(folders: SimpleQueue[Path], mutant: Mutant) -> tuple[str, float]:
    """Take a free folder, make the change, run its tests; return the outcome and the seconds."""
    folder, start = folders.get(), time.monotonic()
    file = folder / mutant.file
    original = file.read_text()

    file.write_text(mutated(mutant, original))
    result = outcome(folder, mutant.tests)

    file.write_text(original)
    folders.put(folder)
    return result, time.monotonic() - start


def copy_tree(folder: Path) -> Path:
    """Copy the files that git tracks, as they are now, into `folder`.

    Raises ValueError if Python would import the modules from elsewhere.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    command = [sys.executable, "-c", "import grpo; print(grpo.__file__)"]
    imported = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    found = imported.stdout.strip()
    if Path(found).resolve() != (folder / "grpo/__init__.py").resolve():
        raise ValueError(f"the tests would import {found} and not the copy in {folder}")
    return folder


def unchanged_runs(chosen: list[Mutant], jobs: int) -> list[Mutant]:
    """Return "mutants" that change nothing and between them run the tests of all `chosen`."""
    tests = list(dict.fromkeys(path for mutant in chosen for path in mutant.tests.split()))
    parts = [" ".join(tests[job::jobs]) for job in range(jobs) if tests[job:]]
    return [chosen[0]._replace(tests=part, new=chosen[0].old) for part in parts]


def run(chosen: list[Mutant], jobs: int) -> list[str]:
    """Return the outcome of each mutant. Exits if the tests fail on the unchanged code."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            folders.put(copy_tree(Path(scratch) / str(job)))

        unchanged = unchanged_runs(chosen, jobs)
        for same, (result, _) in zip(
            unchanged, list(pool.map(partial(try_mutant, folders), unchanged))
        ):
            if result != "survived":
                sys.exit(f"{result} without a mutant: {same.tests}")
        print(f"the tests pass as they are ({time.monotonic() - start:.0f} s)", flush=True)

        results = []
        for mutant, (result, seconds) in zip(
            chosen, pool.map(partial(try_mutant, folders), chosen)
        ):
            print(f"{result:<8} {seconds:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
            results.append(result)
    return results


def main() -> int:
    """Return 1 if a mutant survived or broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help="only mutants with one of these in their file or name"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options, start = parser.parse_args(), time.monotonic()

    chosen = [
        mutant
        for mutant in MUTANTS
        if not options.words
        or any(word in f"{mutant.file}: {mutant.name}" for word in options.words)
    ]
    if not chosen:
        parser.error(f"no mutant has one of these in its file or name: {' '.join(options.words)}")
    for mutant in chosen:
        mutated(mutant, (ROOT / mutant.file).read_text())  # raises before any test runs

    results = run(chosen, options.jobs)

    killed, survived = results.count("killed"), results.count("survived")
    print(
        f"{len(chosen)} mutants: {killed} killed, {survived} survived, "
        f"{len(chosen) - killed - survived} broken, "
        f"in {(time.monotonic() - start) / 60:.1f} minutes"
    )
    for mutant, result in zip(chosen, results):
        if result != "killed":
            print(f"{result}: {mutant.file}: {mutant.name} ({mutant.tests})")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())

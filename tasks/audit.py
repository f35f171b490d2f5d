"""Check, from what a run has stored, that no evaluated problem was trained on.

    python -m grpo.tasks.audit runs/NAME [runs/NAME ...]

The audit reads all problems of all stored steps and evaluations, and computes the key of each again
from the problem's own data. So it finds a forged key, and two problems that differ only in the
order of their factors. Of steps whose rollouts were removed it knows the keys in seen.jsonl.

The exit status is 0 if nothing is found, 1 if something is (one line each), and 2 if the run cannot
be read.
"""

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from grpo.data.errors import Parser, UserError, blaming, command_of, escape_control, exit_status
from grpo.data.files import check_links, read_jsonl, read_jsonl_zst, read_yaml
from grpo.tasks.base import Problem, Task
from grpo.tasks.registry import load_task, require_trusted

_NAME = re.compile(r"(step|eval|promotion|imitation|imitated)-(\d+)\.jsonl\.zst")

# A conversation as (role, text).
Turns = tuple[tuple[str, str], ...]


@dataclass
class StoredProblems:
    """The problems that a run has stored, by keys that are computed again from their data."""

    # Where each problem was trained on, by its key and also by its turns; where each was evaluated;
    # and where each example of a prompt was shown with its answer.
    trained: dict[str | Turns, str] = field(default_factory=dict)
    evaluated: dict[tuple[str, Turns], str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)

    steps: set[int] = field(default_factory=set)
    before: set[str] = field(default_factory=set)  # keys that earlier runs had trained on
    wrong_keys: list[str] = field(default_factory=list)  # a line for each


def audit(folder: Path, allowed: Collection[str | None] = ()) -> tuple[list[str], str]:
    """Return what is wrong, one line each, and a summary of what was read.

    A task or a reward that is a program is executed only if it is `allowed`.
    """
    check_links(folder)
    config = read_yaml(folder / "config.yaml")
    require_trusted(config | {"loss": None}, allowed, folder)  # which nothing here loads
    task = load_task(config["task"], config.get("reward"), config["task_options"])

    stored = _read_stored(folder, task)
    _read_seen(folder / "seen.jsonl", stored)
    start = config.get("start")
    found = [*stored.wrong_keys, *_evaluated_again(stored, start)]

    different = sum(isinstance(each, str) for each in stored.trained)
    earlier = f" (and {len(stored.before)} before, see {start})" if stored.before else ""
    return found, (
        f"{len(stored.steps)} steps, {different} different problems trained on{earlier}, "
        f"{len(stored.evaluated)} evaluated"
    )


def _read_stored(folder: Path, task: Task) -> StoredProblems:
    names = [(path, _NAME.fullmatch(path.name)) for path in sorted((folder / "rollouts").glob("*"))]
    files = [(path, name[1], int(name[2])) for path, name in names if name]
    if not files:
        raise UserError(f"{folder}: no rollouts are stored there; give the directory of a run")

    stored = StoredProblems()
    for path, kind, step in files:
        for line in read_jsonl_zst(path):
            problem = Problem(**line["problem"])
            key = task.key(problem) if hasattr(task, "key") else problem.key
            if key != problem.key:
                stored.wrong_keys.append(
                    f"{path.name}: {_short(problem.prompt)} is stored as {problem.key}, its own "
                    f"data give {key}"
                )

            for example in line.get("shots", ()):
                stored.shown.setdefault(example, path.name)
            if kind in ("step", "imitation"):
                stored.trained.setdefault(key, path.name)
                stored.trained.setdefault(problem.turns, path.name)
                stored.steps |= {step} - {0}  # step 0 is the imitation
            else:
                stored.evaluated.setdefault((key, problem.turns), path.name)
    return stored


def _read_seen(path: Path, stored: StoredProblems) -> None:
    """Add the problems in seen.jsonl, by their stored keys."""
    for _, line in read_jsonl(path, is_log=True) if path.exists() else ():
        if line["step"] == 0 and not line.get("imitated"):
            stored.before |= set(line["keys"])
            continue
        stored.steps |= {line["step"]} - {0}
        for key in line["keys"]:
            stored.trained.setdefault(key, f"step {line['step']} of seen.jsonl")


def _evaluated_again(stored: StoredProblems, start: str | None) -> list[str]:
    """Return the evaluated problems that this run trained on or showed with their answer, or that
    the run it began with (`start`) had trained on.
    """
    found = []
    for (key, turns), name in stored.evaluated.items():
        problem = f"{name}: {_short(turns[-1][1])} ({key})"
        if where := stored.trained.get(key) or stored.trained.get(turns):
            found.append(f"{problem} was trained on, in {where}")
        if where := stored.shown.get(key):
            found.append(f"{problem} was shown with its answer, in {where}")
        if key in stored.before:
            found.append(f"{problem} was trained on before this run, see {start}")
    return found


def _short(prompt: str) -> str:
    """Return the end of a prompt, where problems differ."""
    return repr(prompt if len(prompt) <= 60 else "..." + prompt[-57:])


def report(arguments: list[str] | None) -> int:
    """Print what was found; return 1 if anything was."""
    parser = Parser(
        prog=command_of("audit"), description="Look for evaluated problems that were trained on."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="runs/NAME")
    allows = "if a run's {} is a program, name it here to allow its execution"
    parser.add_argument("--task", metavar="FILE:CLASS", help=allows.format("task"))
    parser.add_argument("--reward-file", metavar="FILE:FUNCTION", help=allows.format("reward"))
    options = parser.parse_args(arguments)

    worst = 0
    for folder in options.runs:
        with blaming(f"{folder}: is not what a run writes"):
            found, summary = audit(folder, (options.task, options.reward_file))
        outcome = f"{len(found)} findings" if found else "nothing found"
        for line in (*found, f"{summary}; {outcome}"):
            print(escape_control(f"{folder}: {line}"))
        worst = max(worst, bool(found))
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return exit_status("grpo.tasks.audit", lambda: report(arguments))


if __name__ == "__main__":
    sys.exit(main())

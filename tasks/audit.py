"""Check, from what a run has stored, that no evaluated problem was trained on.

    python -m grpo.tasks.audit runs/NAME [runs/NAME ...]

The audit reads all problems of all stored steps and evaluations, and computes the key of each again
from the problem's own data. So it finds a forged key, a changed list of seen problems, and two
problems that differ only in the order of their factors.

The exit status is 0 if nothing is found, 1 if something is (one line each), and 2 if the run cannot
be read.
"""

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from grpo.data.errors import Parser, UserError, blaming, command_of, escape_control, exit_status
from grpo.data.files import check_links, read_json, read_jsonl, read_jsonl_zst, read_yaml
from grpo.tasks.base import Problem, Task
from grpo.tasks.registry import load_task, require_trusted

_NAME = re.compile(r"(step|eval|promotion|imitation|imitated)-(\d+)\.jsonl\.zst")

# A conversation as (role, text).
Turns = tuple[tuple[str, str], ...]


@dataclass
class StoredProblems:
    """The problems in the rollouts of a run, by keys that are computed again from their data."""

    # The file of each problem that was trained on, by its key and also by its turns; of each that
    # was evaluated; and of each example that a prompt showed with its answer.
    trained: dict[str | Turns, str] = field(default_factory=dict)
    evaluated: dict[tuple[str, Turns], str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)

    # The stored keys of the problems trained on at each step; step 0 is the imitation.
    by_step: dict[int, set[str]] = field(default_factory=dict)
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
    listed, before = _listed(folder)
    found = [
        *stored.wrong_keys,
        *_evaluated_again(stored, before, config.get("start")),
        *_wrong_lists(folder, listed, before, stored.by_step),
    ]
    path = folder / "metrics.jsonl"
    steps = [line["step"] for _, line in read_jsonl(path, is_log=True)] if path.exists() else []
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"{path.name}: lacks steps or has them twice, {len(steps)} lines in all")

    different = set().union(*stored.by_step.values())
    earlier = f" (and {len(before)} before, see {config.get('start')})" if before else ""
    trained = len(stored.by_step.keys() - {0})
    return found, (
        f"{trained} step{'s' * (trained != 1)}, {len(different)} different problems trained "
        f"on{earlier}, {len(stored.evaluated)} evaluated"
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
                stored.by_step.setdefault(step, set()).add(problem.key)
            else:
                stored.evaluated.setdefault((key, problem.turns), path.name)
    return stored


def _evaluated_again(stored: StoredProblems, before: set[str], start: str | None) -> list[str]:
    """Return the evaluated problems that this run trained on or showed with their answer, or that
    the run it began with (`start`) had trained on (`before`).
    """
    found = []
    for (key, turns), name in stored.evaluated.items():
        problem = f"{name}: {_short(turns[-1][1])} ({key})"
        if where := stored.trained.get(key) or stored.trained.get(turns):
            found.append(f"{problem} was trained on, in {where}")
        if where := stored.shown.get(key):
            found.append(f"{problem} was shown with its answer, in {where}")
        if key in before:
            found.append(f"{problem} was trained on before this run, see {start}")
    return found


def _listed(folder: Path) -> tuple[dict[int, set[str]], set[str]]:
    """Return the keys in seen.jsonl: by step (0 is the imitation), and those of earlier runs."""
    listed: dict[int, set[str]] = {}
    before: set[str] = set()
    path = folder / "seen.jsonl"
    for _, line in read_jsonl(path, is_log=True) if path.exists() else ():
        if line["step"] == 0 and not line.get("imitated"):
            before |= set(line["keys"])
        else:
            listed[line["step"]] = set(line["keys"])
    return listed, before


def _wrong_lists(
    folder: Path, listed: dict[int, set[str]], before: set[str], by_step: dict[int, set[str]]
) -> list[str]:
    """Return how seen.jsonl (`listed`) and the checkpoints differ from the stored steps.

    What a killed run wrote after its last checkpoint may be incomplete, and is not compared.
    """
    paths = sorted((folder / "checkpoints").glob("step-*/trainer.json"))
    trainers = {path: read_json(path)["trainer"] for path in paths}
    last = max((trainer["done"] for trainer in trainers.values()), default=0)

    compared = [
        (f"seen.jsonl, step {step}", listed.get(step, set()), by_step.get(step, set()))
        for step in sorted(listed.keys() | by_step.keys())
        if step <= last
    ]
    for path, trainer in trainers.items():
        trained = before.union(*(keys for step, keys in by_step.items() if step <= trainer["done"]))
        compared.append((f"{path.parent.name}/trainer.json", set(trainer["seen"]), trained))

    found = []
    for where, in_list, trained in compared:
        if lost := trained - in_list:
            found.append(
                f"{where}: lacks {len(lost)} problems that were trained on, {min(lost)} the first"
            )
        if extra := in_list - trained:
            found.append(
                f"{where}: lists {len(extra)} problems that no stored step has, {min(extra)} the "
                "first"
            )
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

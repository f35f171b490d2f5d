"""Check, from what a run has stored, that no evaluated problem was trained on.

    python -m tasks.audit runs/NAME [runs/NAME ...]

All problems of all stored steps and evaluations are read again, and the key of each is computed
again from the problem's own data. So a forged key and a changed list of seen problems are found,
and so are two problems that differ only in the order of their factors, and a corpus that has
changed since the run. The exit status is 0 if nothing is found, 1 if something is (one line each),
and 2 if the run cannot be read.
"""

import re
import sys
from collections.abc import Collection
from pathlib import Path

from data.files import check_links, read_config, read_json, read_jsonl, read_jsonl_zst
from data.text import escape_control
from tasks.base import (
    Parser,
    Problem,
    Task,
    UserError,
    blaming,
    exit_status,
    load_task,
    sources_of,
    summary_of,
    trust,
)

PROBLEMS = ("dataset", "corpus", "task")  # kinds of sources that decide what the problems are
_NAME = re.compile(r"(step|eval|promotion|imitation|imitated)-(\d+)\.jsonl\.zst")


def audit(folder: Path, allowed: Collection[str | None] = ()) -> tuple[list[str], str]:
    """Return what is wrong, one line each, and a summary of what was read.

    Raises UserError if the run cannot be read, or if its task or its reward is a program that is
    not `allowed`.
    """
    check_links(folder)
    config = read_config(folder / "config.yaml")
    trust(config["task"], config["task_options"], allowed, folder)
    task = load_task(config["task"], options=config["task_options"])
    found: list[str] = []
    trained: dict[str, str] = {}  # canonical key or prompt -> file
    evaluated: dict[tuple[str, str], str] = {}  # (canonical key, prompt) -> file
    by_step: dict[int, set[str]] = {}  # stored keys of what was trained on
    shown: dict[str, str] = {}  # key of an example in a prompt -> file
    for path, kind, step in _files(folder):
        for line in read_jsonl_zst(path):
            problem = Problem(**line["problem"])
            key = task.key(problem) if hasattr(task, "key") else problem.key
            if key != problem.key:
                found.append(
                    f"{path.name}: {_short(problem.prompt)} is stored as {problem.key}, its own "
                    f"data give {key}"
                )
            for example in line.get("shots", ()):
                shown.setdefault(example, path.name)
            if kind in ("step", "imitation"):
                trained.setdefault(key, path.name)
                trained.setdefault(problem.prompt, path.name)
                by_step.setdefault(step, set()).add(problem.key)
            else:
                evaluated.setdefault((key, problem.prompt), path.name)
    for (key, prompt), name in evaluated.items():
        if where := trained.get(key) or trained.get(prompt):
            found.append(f"{name}: {_short(prompt)} ({key}) was trained on, in {where}")
        if where := shown.get(key):
            found.append(f"{name}: {_short(prompt)} ({key}) was shown with its answer, in {where}")
    listed, before = _listed(folder)
    for (key, prompt), name in evaluated.items():
        if key in before:
            found.append(
                f"{name}: {_short(prompt)} ({key}) was trained on before this run, see "
                f"{config.get('start')}"
            )
    found += _wrong_start(config.get("start"), before)
    found += _wrong_lists(folder, listed, before, by_step)
    found += _other_sources(config, task)
    different = set().union(*by_step.values())
    imitated = len(by_step.pop(0, ()))
    earlier = f" (and {len(before)} before, see {config['start']})" if before else ""
    return (
        found,
        f"{len(by_step)} steps, {len(different)} different problems trained on"
        + (f", {imitated} of them imitated" if imitated else "")
        + f"{earlier}, {len(evaluated)} evaluated",
    )


def _listed(folder: Path) -> tuple[dict[int, set[str]], set[str]]:
    """Return the keys in seen.jsonl: by step (0 is the imitation), and those of earlier runs."""
    listed: dict[int, set[str]] = {}
    before: set[str] = set()
    for _, line in read_jsonl(folder / "seen.jsonl"):
        if line["step"] == 0 and not line.get("imitated"):
            before |= set(line["keys"])
        else:
            listed[line["step"]] = set(line["keys"])
    return listed, before


def _files(folder: Path) -> list[tuple[Path, str, int]]:
    """Return path, kind and step of each file of stored rollouts, in order.

    The kind is "step", "eval", "promotion", "imitation" or "imitated".
    """
    names = [(path, _NAME.fullmatch(path.name)) for path in sorted((folder / "rollouts").glob("*"))]
    files = [(path, name[1], int(name[2])) for path, name in names if name]
    if not files:
        raise UserError(f"{folder}: no rollouts are stored there; give the directory of a run")
    return files


def _wrong_start(start: str | None, before: set[str]) -> list[str]:
    """Return how the problems that were trained on `before` the run differ from the record.

    The record is that of the checkpoint that the run started from. If it no longer exists, nothing
    is compared.
    """
    path = Path(start or "", "trainer.json")
    if not (start and path.is_file()):
        return []
    theirs = set(read_json(path)["trainer"]["seen"])
    if theirs == before:
        return []
    return [
        f"seen.jsonl, step 0: {len(theirs - before)} problems that {start} was trained on are "
        "missing, "
        f"{len(before - theirs)} are not of it"
    ]


def _wrong_lists(
    folder: Path, listed: dict[int, set[str]], before: set[str], by_step: dict[int, set[str]]
) -> list[str]:
    """Return how seen.jsonl, metrics.jsonl and the checkpoints differ from the stored steps.

    `listed` are the keys in seen.jsonl by step, `before` those that an earlier run trained on.
    """
    found = []
    logged = {line["step"] for _, line in read_jsonl(folder / "metrics.jsonl")}
    for step in sorted(listed.keys() | by_step.keys() | logged):
        found += _compare(
            f"seen.jsonl, step {step}", listed.get(step, set()), by_step.get(step, set())
        )
        if step and (step in logged) != (step in by_step):  # imitation comes before the first step
            found.append(
                f"step {step}: is in {'metrics.jsonl' if step in logged else 'rollouts/'} only"
            )
    for path in sorted((folder / "checkpoints").glob("step-*/trainer.json")):
        trainer = read_json(path)["trainer"]
        expected = before.union(
            *(keys for step, keys in by_step.items() if step <= trainer["done"])
        )
        found += _compare(f"{path.parent.name}/trainer.json", set(trainer["seen"]), expected)
    return found


def _other_sources(config: dict, task: Task) -> list[str]:
    """Return how today's texts differ from those of the run.

    With other texts the same seed makes other problems.
    """
    facts = config.get("facts") or {}
    found = [
        f"{change['kind']}: changed after step {change['step']}: {change['change']}"
        for change in facts.get("accepted_changes", ())
        if change["kind"] in PROBLEMS
    ]
    then, now = (facts.get("fingerprints") or {}).get("corpus"), sources_of(task)
    if then and then != summary_of(now):
        found.append(
            f"the corpus has changed since the run: {then} then, {summary_of(now)} now; "
            "the same seed would draw other problems"
        )
    return found


def _compare(where: str, listed: set[str], trained: set[str]) -> list[str]:
    missing, extra = sorted(trained - listed), sorted(listed - trained)
    return (
        [f"{where}: lacks {len(missing)} problems that were trained on, {missing[0]} the first"]
        if missing
        else []
    ) + (
        [f"{where}: lists {len(extra)} problems that no stored step has, {extra[0]} the first"]
        if extra
        else []
    )


def _short(prompt: str) -> str:
    """Return the end of a prompt, where problems differ, in quotes."""
    return repr(prompt if len(prompt) <= 60 else "..." + prompt[-57:])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return exit_status("tasks.audit", lambda: report(arguments))


def report(arguments: list[str] | None) -> int:
    """Print what was found; return 1 if anything was."""
    parser = Parser(
        prog="python -m tasks.audit",
        description="Look for evaluated problems that were trained on.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="runs/NAME")
    parser.add_argument(
        "--task",
        metavar="FILE:CLASS",
        help="where a run's task is a program: name it, to say that it may be executed",
    )
    parser.add_argument(
        "--reward-file",
        metavar="FILE:FUNCTION",
        help="where a run's reward is a program: name it, to say that it may be executed",
    )
    asked, worst = parser.parse_args(arguments), 0
    for folder in asked.runs:
        with blaming(f"{folder}: is not what a run writes"):
            found, summary = audit(folder, (asked.task, asked.reward_file))
        for line in found:
            print(escape_control(f"{folder}: {line}"))
        outcome = f"{len(found)} findings" if found else "nothing found"
        print(escape_control(f"{folder}: {summary}; {outcome}"))
        worst = max(worst, bool(found))
    return worst


if __name__ == "__main__":
    sys.exit(main())

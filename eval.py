"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --task interleave --words 10,25 --problems 200`.

Problems come from the test split, of documents that nothing was trained or chosen on. Those that the run trained on, should there be
any, are dropped and counted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data.files import write_whole
from grpo.config import load_config
from grpo.evaluate import evaluate, summarise
from grpo.load import load_policy
from grpo.policy import Policy
from grpo.rollout.engine import fitting
from grpo.sources import accepted_kinds, check_base
from grpo.store.checkpoint import find_resume
from grpo.text import visible
from tasks.base import (
    Parser,
    Problem,
    Task,
    UserError,
    exit_status,
    load_task,
    problem_stream,
    split_options,
)
from tasks.dataset import read_problems
from tasks.supply import held_out


def main(argv: list[str]) -> int:
    return exit_status("eval.py", lambda: report(argv))


def report(argv: list[str]) -> int:
    arguments = parse(argv)
    task = load_task(arguments.task, options=arguments.options)
    levels = levels_of(arguments.words, task)
    policy, seen, arguments.mark = load(
        arguments.model, arguments.device, accepted_kinds(arguments.accept_changes)
    )
    results = [evaluate_level(policy, task, level, seen, arguments) for level in levels]
    if arguments.json:  # first, for whoever reads the table may leave before its end
        lines = [
            {key: value for key, value in result.items() if key != "groups"} for result in results
        ]
        write_whole(arguments.json, (json.dumps(lines, indent=1) + "\n").encode())
    show(results, task)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python eval.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--model",
        default="builtin",
        help="a run, a checkpoint, builtin, a model directory, or a hub id",
    )
    parser.add_argument(
        "--task", default="interleave", help="a task's name, or path/to/file.py:ClassName"
    )
    parser.add_argument(
        "--words", "--levels", default="", help="levels, e.g. 10,25,50 (default: the task's own)"
    )
    parser.add_argument("--problems", type=int, default=200, help="problems at each level")
    parser.add_argument(
        "--dataset",
        default="",
        metavar="FILE",
        help="take them from this JSONL file (tasks.generate)",
    )
    parser.add_argument("--split", default="test", choices=["train", "validation", "test"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest token each time (temperature 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the problems and the samples")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--worst",
        type=int,
        default=2,
        help="how many of the worst completions to show at each level",
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write the figures there as well"
    )
    parser.add_argument(
        "--accept-changes",
        metavar="KINDS",
        help="base: evaluate an adapter although its base model has changed since the checkpoint",
    )
    arguments, others = parser.parse_known_args(argv)
    arguments.options, others = split_options(arguments.task, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.problems < 1:
        raise UserError(f"--problems {arguments.problems}: give 1 or more")
    if arguments.temperature < 0:
        raise UserError(f"--temperature {arguments.temperature}: give 0 (greedy) or more")
    return arguments


def levels_of(text: str, task: Task) -> list[int]:
    if not text:
        return [getattr(task, "default_level", 1)]
    levels = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if 0 in levels:
        raise UserError(
            f"--words {text}: give positive whole numbers with commas between them, e.g. 10,25,50"
        )
    return levels


def load(
    model: str, device: str, accept: Sequence[str] = ()
) -> tuple[Policy, set[str], dict[str, str]]:
    """Return the policy, the keys of the problems it was trained on (none known for what is not a run of ours), and the mark of
    a control run ({}: a real one). Kinds of sources in `accept` may have changed since the checkpoint."""
    path = Path(model)
    if not ((path / "config.yaml").is_file() or (path / "trainer.json").is_file()):
        return load_policy(model, device=device), set(), {}
    checkpoint, warnings = find_resume(path)
    config = load_config(checkpoint.parent.parent / "config.yaml")
    for warning in [*warnings, *check_base(checkpoint, config.model, accept)]:
        print(f"eval.py: {warning}", file=sys.stderr)
    seen = json.loads((checkpoint / "trainer.json").read_text())["trainer"]["seen"]
    policy = load_policy(
        config.model,
        device=device,
        dtype=config.dtype,
        quantise=config.quantise,
        weights=checkpoint,
    )
    check_base(checkpoint, config.model, accept)  # again: a hub's model may be on disk only now
    return policy, set(seen), config.mark


def evaluate_level(
    policy: Policy, task: Task, level: int, seen: set[str], arguments: argparse.Namespace
) -> dict:
    temperature = 0.0 if arguments.greedy else arguments.temperature
    if arguments.dataset:
        source = [problem for problem in read_problems(arguments.dataset) if problem.level == level]
        where = f"{arguments.dataset}, level {level}"
    else:
        source = problem_stream(task, seed=arguments.seed, split=arguments.split, level=level)
        where = f"the {arguments.split} split, level {level}, --seed {arguments.seed}"
    too_long: list[Problem] = []
    problems, dropped = held_out(fitting(policy, source, too_long), arguments.problems, seen, where)
    groups = evaluate(policy, task, problems, temperature=temperature, seed=arguments.seed)
    worst = sorted(groups, key=lambda group: group.scores[0].value)[: arguments.worst]
    return {
        "model": arguments.model,
        **arguments.mark,
        "task": arguments.task,
        **arguments.options,
        "level": level,
        "split": arguments.split,
        "dataset": arguments.dataset,
        "seed": arguments.seed,
        "temperature": temperature,
        "dropped": dropped,
        "too_long": len(too_long),
        **summarise(groups),
        "groups": worst,
    }


def show(results: list[dict], task: Task):
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    control = f"CONTROL {results[0]['control']}: " if "control" in results[0] else ""
    source = results[0]["dataset"] or f"the {results[0]['split']} split"
    table = Table(
        title=f"{control}{results[0]['model']}: {getattr(task, 'metric', 'score')} on {source}",
        title_justify="left",
    )
    for name in ("level", "n", "sampling", "mean", "95 % interval", "exact", "trained on, dropped"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            str(result["level"]),
            str(result["n"]),
            "greedy" if result["temperature"] == 0 else f"T {result['temperature']:g}",
            f"{result['mean']:.4f}",
            f"{result['ci_low']:.4f} … {result['ci_high']:.4f}",
            f"{result['exact']:.3f}",
            str(result["dropped"]),
        )
    console.print(table)
    for result in results:
        if result["too_long"]:
            console.print(
                f"level {result['level']}: {result['too_long']} problems do not fit the model's context and were passed over"
            )
    for result in results:
        for group in result["groups"]:
            if group.scores[0].exact:
                continue
            console.print(
                f"\nlevel {result['level']}, score {group.scores[0].value:.4f}", style="bold"
            )
            console.print(f"  wanted: {visible(group.problem.target)}", markup=False)
            console.print(f"  wrote:  {visible(group.completions[0].text)}", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

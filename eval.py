"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25
--problems 200`.

Problems come from the test split, of documents that nothing was trained or chosen on. They are
distinct: where fewer exist than were asked for, all of them are evaluated and the output says so.
Those that the run trained on are dropped and counted. A run is evaluated as it was trained: task,
level, wording, system turn, examples, chat template's variables, temperature, top-k, top-p and
completion budget are the run's own unless a flag says otherwise.

--texts evaluates on every text of the folder except those that the run itself trained on.
--foreign adds kinds of text that nothing is trained on (`data/foreign.py`), and reports each kind.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data.files import write_whole
from grpo.config import Config, load_config, names_in
from grpo.evaluate import (
    Sampling,
    budgets,
    evaluate,
    find_problems,
    select,
    summarise,
    truncated_share,
    truncation_warning,
)
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import (
    format_of,
    middle_left_out,
    sent_lines,
    system_text,
    template_arguments,
    wording_text,
)
from grpo.records import Group
from grpo.run.sources import check_base, read_sources
from grpo.run.start import checkpoint_of
from grpo.text import escape_control
from tasks.base import (
    Parser,
    Task,
    UserError,
    check_wording,
    exit_status,
    flags_of_tasks,
    foreign_of,
    load_task,
    sources_of,
    split_options,
    trust,
    unseen_texts,
    worded,
)
from tasks.dataset import read_problems
from tasks.levels import parse_levels
from tasks.supply import HeldOut

PROMPT = ("system", "shots", "chat_template_kwargs", "wording")  # flags that a run has, too
SHOWN = ("groups", "sent")  # of a level's result: for the screen, not for --json
ALL_KINDS = "all"  # the row of all foreign kinds of text together
HELD_OUT = {
    "split": "test",
    "dataset": "",
}  # where foreign problems come from, whatever the flags say of the others


def main(argv: list[str]) -> int:
    """Evaluate by these flags; return the exit status."""
    return exit_status("eval.py", lambda: report(argv))


def report(argv: list[str]) -> int:
    """Evaluate what the command line asks for, show it and write it to --json; return the exit
    status.
    """
    arguments, others = parse(argv)
    checkpoint, config = trained_run(arguments.model)
    task = examples_from = resolve(arguments, others, config)
    if "texts" in arguments.options and arguments.split == "test":
        examples_from = trained_texts(task, arguments, config)
        task = held_out_texts(task, checkpoint, config)
    kinds = {level: foreign_of(task, level) for level in arguments.levels if arguments.foreign}

    if checkpoint is None:
        policy, seen = load_policy(arguments.model, device=arguments.device), set()
    else:
        policy, seen = load_run_policy(
            checkpoint, config, arguments.device, names_in(arguments.accept_changes)
        )
    for note in policy.notes:
        print(f"eval.py: warning: {note}", file=sys.stderr)

    policy.use(
        format_of(
            examples_from,
            system=arguments.system,
            shots=arguments.shots,
            chat_template_kwargs=arguments.chat_template_kwargs,
            seed=arguments.seed,
        )
    )

    results = [evaluate_level(policy, task, level, seen, arguments) for level in arguments.levels]
    for level, tasks in kinds.items():
        results += evaluate_foreign(policy, tasks, level, seen, arguments)
    if arguments.json:  # first, for whoever reads the table may leave before its end
        lines = [
            {key: value for key, value in result.items() if key not in SHOWN} for result in results
        ]
        write_whole(arguments.json, (json.dumps(lines, indent=1) + "\n").encode())
    show(results, task)
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the words that may be flags of the task. None stands for "as the run
    has it".
    """
    parser = Parser(
        prog="python eval.py",
        description=__doc__.splitlines()[0],
        epilog=flags_of_tasks(),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default="builtin",
        help="a run, a checkpoint, builtin, a model directory, a GGUF file, or a hub id",
    )
    _add_problem_flags(parser)
    _add_sampling_flags(parser)
    _add_prompt_flags(parser)
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
    check(arguments)
    return arguments, others


def _add_problem_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is evaluated."""
    add = parser.add_argument
    add(
        "--task",
        help="a task's name, or path/to/file.py:ClassName (default: the run's, else interleave)",
    )
    add(
        "--words",
        "--levels",
        default="",
        help="levels, e.g. 10,25,50 (default: the run's, else the task's own)",
    )
    add("--problems", type=int, default=200, help="most distinct problems at each level")
    add(
        "--samples",
        type=int,
        default=1,
        help="independent completions of each problem, whose mean counts (for tasks of few "
        "problems)",
    )
    add(
        "--dataset",
        default="",
        metavar="FILE",
        help="take them from this JSONL file (tasks.generate)",
    )
    add(
        "--foreign",
        action="store_true",
        help="and as many problems of foreign kinds of text in all: tables, code, lists, numbers, "
        "other alphabets ...",
    )
    add("--split", default="test", choices=["train", "validation", "test"])
    add("--seed", type=int, default=0, help="of the problems, their examples and the samples")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how completions are sampled."""
    add = parser.add_argument
    add("--temperature", type=float, help="default: the run's, else 1")
    add("--greedy", action="store_true", help="take the likeliest token each time (temperature 0)")
    add(
        "--top-k",
        type=int,
        help="sample from the k likeliest tokens (default: the run's, else all)",
    )
    add(
        "--top-p",
        type=float,
        help="sample from the likeliest tokens of this mass (default: the run's, else all)",
    )
    add(
        "--max-new-tokens",
        type=int,
        help="completion budget (default: the run's, else a quarter more than the target takes)",
    )


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what stands around a problem's prompt."""
    add = parser.add_argument
    add(
        "--system",
        help='text of a system turn, or @FILE ("": none; default: the run\'s, else none)',
    )
    add(
        "--shots",
        type=int,
        metavar="K",
        help="solved problems of the training split before each question (default: the run's, else "
        "0)",
    )
    add(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the model's chat template (default: the run's, else {})",
    )
    add(
        "--wording",
        metavar="FILE",
        help="a text that replaces the task's prompt, with its placeholders (\"\": the task's own; "
        "default: the run's)",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise UserError for a value that no evaluation can have; None was not given."""
    at_least = {
        "problems": 1,
        "samples": 1,
        "temperature": 0,
        "top_k": 0,
        "max_new_tokens": 0,
        "shots": 0,
    }
    for name, least in at_least.items():
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: give {least} or more")

    top_p = arguments.top_p
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p}: give a number above 0 and up to 1")

    if arguments.chat_template_kwargs is not None:
        template_arguments(arguments.chat_template_kwargs)
    if arguments.system is not None:
        arguments.system = system_text(arguments.system)


def trained_run(model: str) -> tuple[Path | None, Config]:
    """Return the newest valid checkpoint of the run (or the checkpoint) `model` and the run's
    configuration.

    What is no run of ours has no checkpoint, and the configuration of a run by default.
    """
    checkpoint, warnings = checkpoint_of(model)
    if checkpoint is None:
        return None, Config()
    for warning in warnings:
        print(f"eval.py: {warning}", file=sys.stderr)
    return checkpoint, load_config(checkpoint.parent.parent / "config.yaml")


def resolve(arguments: argparse.Namespace, others: list[str], config: Config) -> Task:
    """Return the task; fill in `arguments` what was left to the run: its task, options, prompt,
    levels, sampling and mark.
    """
    if arguments.task is None:
        trust(config.task, None, Path(arguments.model))
        arguments.task = config.task

    given, others = split_options(arguments.task, others)
    if others:
        raise UserError(
            f"unrecognized arguments: {' '.join(others)}; python eval.py --help lists the flags"
        )
    is_runs_task = arguments.task == config.task
    arguments.options = {**(config.task_options if is_runs_task else {}), **given}
    _resolve_prompt(arguments, config, is_runs_task)
    task = load_task(arguments.task, options=arguments.options, wording=arguments.wording)

    differing = {
        name
        for name in {*arguments.options, *config.task_options}
        if arguments.options.get(name) != config.task_options.get(name)
    }
    is_runs_level = is_runs_task and differing <= {"texts"}  # whose level means the same
    own_level = config.level if is_runs_level else 0
    arguments.levels = levels_of(arguments.words, task, own_level)

    values = {
        name: getattr(config if getattr(arguments, name) is None else arguments, name)
        for name in asdict(Sampling())
    }
    if arguments.greedy:
        values["temperature"] = 0.0
    arguments.sampling = Sampling(**values)
    arguments.mark = config.mark
    return task


def _resolve_prompt(arguments: argparse.Namespace, config: Config, is_runs_task: bool) -> None:
    """Fill in the flags of PROMPT; the run's wording holds for its own task alone, whose
    placeholders it has.
    """
    if arguments.wording:
        file, arguments.wording = arguments.wording, wording_text(arguments.wording)
        check_wording(arguments.task, arguments.wording, file)
    elif arguments.wording is None and not is_runs_task:
        arguments.wording = ""

    for name in PROMPT:
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(config, name))


def held_out_texts(task: Task, checkpoint: Path | None, config: Config) -> Task:
    """Return `task` with all texts held out that neither the run nor one that it began from has
    drawn from.
    """
    known: set[str] = set()
    while checkpoint is not None:
        saved = read_sources(checkpoint) or {}
        known |= set((saved.get("corpus") or {}).values())
        if "corpus" not in saved or any(one["kind"] == "corpus" for one in saved["accepted"]):
            print(
                f"eval.py: {checkpoint}: not all texts that the run was trained on are known; some "
                "may be evaluated on",
                file=sys.stderr,
            )
        checkpoint, config = trained_run(config.model)

    unseen = unseen_texts(task, known)
    if left_out := len(sources_of(task)) - len(sources_of(unseen)):
        print(f"eval.py: {left_out} texts are left out: the model was trained or chosen on them")
    return unseen


def trained_texts(task: Task, arguments: argparse.Namespace, config: Config) -> Task:
    """Return the task whose training split gives the examples of --shots: on the run's own texts,
    where those of --texts are held out.
    """
    own = config.task_options if arguments.task == config.task else {}
    if not arguments.shots or arguments.options["texts"] == own.get("texts"):
        return task
    options = {name: value for name, value in arguments.options.items() if name != "texts"}
    options |= {"texts": own["texts"]} if "texts" in own else {}
    return load_task(arguments.task, options=options, wording=arguments.wording)


def levels_of(text: str, task: Task, default: int) -> list[int]:
    """Return the levels written as "10,25"; without a `text` the `default`, or else (0) the task's
    own.
    """
    if not text:
        return [default or getattr(task, "default_level", 1)]
    return parse_levels(text, "--words")


def load_run_policy(
    checkpoint: Path, config: Config, device: str, accept: Sequence[str] = ()
) -> tuple[Policy, set[str]]:
    """Return the policy of a checkpoint, and the keys of the problems that it was trained on.

    Kinds of sources in `accept` may have changed since the checkpoint.
    """
    for warning in check_base(checkpoint, config.model, accept):
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
    return policy, set(seen)


def problems_of(
    policy: Policy, task: Task, level: int, seen: set[str], arguments: argparse.Namespace
) -> HeldOut:
    """Return the problems of a level. Raises UserError where there is not one."""
    size, sampling = arguments.problems, arguments.sampling
    if arguments.dataset:
        source = [
            worded(task, problem)
            for problem in read_problems(arguments.dataset)
            if problem.level == level
        ]
        found = select(policy, source, size, seen, sampling)
        where = f"{arguments.dataset}, level {level}"
    else:
        found = find_problems(
            policy,
            task,
            level=level,
            split=arguments.split,
            seed=arguments.seed,
            size=size,
            seen=seen,
            sampling=sampling,
        )
        where = f"the {arguments.split} split, level {level}, --seed {arguments.seed}"
    if not found.problems:
        raise UserError(found.error or f"{where}: {found.why_none}")
    return found


def evaluate_level(
    policy: Policy, task: Task, level: int, seen: set[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of a level, and for the screen (SHOWN) the worst completions and the
    first problem's prompt as it was sent.
    """
    found = problems_of(policy, task, level, seen, arguments)
    groups = answers_of(policy, task, found, arguments)
    result = figures_of(policy, task, level, found, groups, arguments)
    return {**result, "groups": sorted(groups, key=lowest)[: arguments.worst]}


def evaluate_foreign(
    policy: Policy,
    tasks: Mapping[str, Task],
    level: int,
    seen: set[str],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return the figures of each foreign kind of text at a level, as `evaluate_level` does, and
    last those of all kinds.

    The problems are shared out evenly among the kinds. Of a kind none of whose problems fits the
    model there is no line.
    """
    size = math.ceil(arguments.problems / len(tasks))
    results, every, asked = [], [], []
    for kind, task in tasks.items():
        found = find_problems(
            policy,
            task,
            level=level,
            split="test",
            seed=arguments.seed,
            size=size,
            seen=seen,
            sampling=arguments.sampling,
        )
        asked.append(found)
        if not found.problems:
            continue

        groups = answers_of(policy, task, found, arguments)
        every += groups
        result = figures_of(policy, task, level, found, groups, arguments)
        worst = sorted(groups, key=lowest)[: arguments.worst]
        results.append({**result, **HELD_OUT, "foreign": kind, "groups": worst})

    if not every:
        raise UserError(
            f"--foreign: no problem of level {level} fits the model; give fewer --words"
        )
    found = HeldOut(
        [group.problem for group in every],
        sum(one.asked for one in asked),
        sum(one.dropped for one in asked),
        sum(one.too_long for one in asked),
    )
    overall = figures_of(policy, task, level, found, every, arguments)
    return [*results, {**overall, **HELD_OUT, "foreign": ALL_KINDS, "groups": []}]


def answers_of(
    policy: Policy, task: Task, found: HeldOut, arguments: argparse.Namespace
) -> list[Group]:
    """Return a group of scored completions for each problem."""
    return evaluate(
        policy,
        task,
        found.problems,
        sampling=arguments.sampling,
        seed=arguments.seed,
        samples=arguments.samples,
    )


def figures_of(
    policy: Policy,
    task: Task,
    level: int,
    found: HeldOut,
    groups: Sequence[Group],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the line of an evaluation, as --json has it, and "sent", the first problem's prompt
    for the screen.
    """
    sent = sent_lines(policy, found.problems[0])
    return {
        "model": arguments.model,
        **arguments.mark,
        "task": arguments.task,
        **arguments.options,
        "level": level,
        "split": arguments.split,
        "dataset": arguments.dataset,
        "seed": arguments.seed,
        **{name: getattr(arguments, name) for name in PROMPT},
        "prompt": "\n".join(sent),
        **asdict(arguments.sampling),
        "budget": max(budgets(policy, task, found.problems, arguments.sampling)),
        "asked": found.asked,
        "samples": arguments.samples,
        "dropped": found.dropped,
        "too_long": found.too_long,
        **summarise(groups),
        "truncated": truncated_share(groups),
        "sent": middle_left_out(sent),
    }


def lowest(group: Group) -> float:
    """Return the value of the group's worst completion."""
    return min(score.value for score in group.scores)


def show(results: list[dict], task: Task):
    """Print the held-out results, those on foreign kinds of text below, and the worst completions
    of all of them.
    """
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    control = f"CONTROL {results[0]['control']}: " if "control" in results[0] else ""
    metric = getattr(task, "metric", "score")
    source = results[0]["dataset"] or held_out_name(results[0])
    own = [result for result in results if "foreign" not in result]
    foreign = [result for result in results if "foreign" in result]

    console.print(table_of(own, f"{control}{results[0]['model']}: {metric} on {source}"))
    if foreign:
        console.print(
            table_of(foreign, f"{control}{results[0]['model']}: {metric} on foreign kinds of text")
        )
    for line in remarks(results):
        console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as the model was sent it", style="bold")
    for line in results[0]["sent"]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    for result in results:
        for group in result["groups"]:
            show_worst(console, name_of(result), group)


def table_of(results: list[dict], title: str) -> Table:
    """Return a table with a row for each result."""
    rows = [cells_of(result) for result in results]
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row, result in zip(rows, results):
        table.add_row(*row.values(), end_section=result.get("foreign") == ALL_KINDS)
    return table


def cells_of(result: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table, by the names of its columns."""
    if "foreign" in result:
        about = {"kind": result["foreign"]}
    else:
        about = {"sampling": sampling_text(result), "budget": str(result["budget"])}

    samples = f" × {result['samples']}" if result["samples"] > 1 else ""
    return {
        "level": str(result["level"]),
        "n": f"{result['n']}{samples}",
        **about,
        "mean": f"{result['mean']:.4f}",
        "95 % interval": f"{result['ci_low']:.4f} … {result['ci_high']:.4f}",
        "exact": f"{result['exact']:.3f}",
        "truncated": f"{result['truncated']:.3f}",
        "trained on": str(result["dropped"]),
    }


def held_out_name(result: dict[str, Any]) -> str:
    """Return which texts were evaluated on, in words."""
    texts = result.get("texts")
    return f"the {result['split']} split" + (f" of {texts}" if texts else "")


def name_of(result: dict[str, Any]) -> str:
    """Return what a result is about: "level 25", "level 25, foreign tables"."""
    kind = f", foreign {result['foreign']}" if "foreign" in result else ""
    return f"level {result['level']}{kind}"


def sampling_text(result: dict[str, Any]) -> str:
    """Return how completions were sampled: "T 0.7, top-p 0.9"."""
    if result["temperature"] == 0:
        return "greedy"
    top_k = f", top-k {result['top_k']}" if result["top_k"] else ""
    top_p = f", top-p {result['top_p']:g}" if result["top_p"] < 1 else ""
    return f"T {result['temperature']:g}{top_k}{top_p}"


def remarks(results: list[dict[str, Any]]) -> list[str]:
    """Return what a reader of the table must know beside its figures."""
    lines = []
    for result in results:
        name = name_of(result)
        if result["n"] < result["asked"]:
            lines.append(f"{result['n']} distinct problems at {name}; {result['asked']} asked for")
        if result["too_long"]:
            lines.append(
                f"{name}: {result['too_long']} problems do not fit the model's context or the "
                "budget and were passed over"
            )
        if warning := truncation_warning(result):
            lines.append(f"warning: {warning}")
    return lines


def show_worst(console: Console, name: str, group: Group) -> None:
    """Print the worst completion of `group` beside what was wanted, unless it is right."""
    score, completion = min(zip(group.scores, group.completions), key=lambda pair: pair[0].value)
    if score.exact:
        return
    console.print(f"\n{name}, score {score.value:.4f}", style="bold")
    console.print(f"  wanted: {escape_control(group.problem.target)}", markup=False)
    console.print(f"  wrote:  {escape_control(completion.text)}", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

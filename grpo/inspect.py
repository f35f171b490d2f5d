"""Why did a completion get its reward? Show what a run has stored, from all steps down to a token.

    python -m grpo.inspect runs/NAME steps                 every step
    python -m grpo.inspect runs/NAME step 12               its groups: class, reward, advantages
    python -m grpo.inspect runs/NAME group 12 3            a group's completions by reward
    python -m grpo.inspect runs/NAME why 12 3 0            its reward and advantage in words
    python -m grpo.inspect runs/NAME tokens 12 3 0         a completion's tokens
    python -m grpo.inspect runs/NAME degenerate            the groups without gradient, and why
    python -m grpo.inspect runs/NAME replay 12             repeat the step's update and compare

Steps are counted from 1, groups and completions from 0, as in the run's files. The exit status is 1
if a replayed step differs, and 2 if there is no such run, step or group, or if a file is damaged.
Several runs side by side are in the report (`python -m grpo.report`); `grpo.load_run` gives every
record to Python and pandas.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from data.errors import Parser, UserError, escape_control, exit_status, quoted
from grpo.records import WHY, Group
from grpo.run.logs import KINDS, MOST_TOKENS, RunData, load_run, tokenizer_of
from grpo.show.group import (
    advantage_range,
    by_reward,
    classes_of,
    done_to,
    group_lines,
    summaries,
    why,
)
from grpo.show.lines import show_table

Record = Mapping[str, Any]

# Columns of the output if it is not a terminal.
PIPE_WIDTH = 160

# The columns of `steps`, from a line of metrics.jsonl: heading, (key of the number, format). A
# narrow screen cuts the last ones off.
STEP_FIGURES = {
    "step": ("step", "d"),
    "level": ("level", "d"),
    "reward": ("reward", ".3f"),
    "std": ("group_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "groups": ("groups/count", "d"),
    "kept": ("groups/kept", "d"),
    "tokens": ("completions/mean_length", ".0f"),
    "distinct": ("distinct_completions", ".1f"),
    "T": ("temperature", ".2f"),
    "entropy": ("entropy", ".3f"),
    "grad norm": ("grad_norm", ".3f"),
    "KL": ("kl", ".4f"),
    "time (s)": ("step_time", ".1f"),
}

# The columns of `step` and `degenerate`, from the summary of a group.
GROUP_FIGURES = {
    "group": ("group", "d"),
    "level": ("level", "d"),
    "T": ("temperature", ".2f"),
    "reward": ("reward", ".3f"),
    "std": ("reward_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "distinct": ("distinct", "d"),
}

# The columns of `tokens`.
TOKEN_FIGURES = {
    "position": ("position", "d"),
    "token": ("token", "d"),
    "log-prob": ("logprob", ".4f"),
    "advantage": ("advantage", "+.3f"),
}

# The columns of text of `step` and `degenerate`. Only groups that were sampled for training have a
# class, and something done with them.
TRAINING: dict[str, Callable[[Record], Any]] = {
    "class": itemgetter("class"),
    "done": done_to,
    "advantages": itemgetter("advantages"),
}
TRAP: dict[str, Callable[[Record], Any]] = {"trap": lambda line: line["trap"] or ""}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.inspect", lambda: show(argv))


def show(argv: Sequence[str] | None) -> int:
    """Show the view that the arguments name; return the exit status."""
    arguments = parse(argv)
    run = load_run(arguments.run)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    return arguments.command(run, arguments, console) or 0


# --- the command line -------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags; `command` is the function of the view."""
    parser = Parser(prog="python -m grpo.inspect", description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a run")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parts = {}
    for name, (view, help, *numbers) in VIEWS.items():
        part = parts[name] = commands.add_parser(name, help=help)
        part.set_defaults(command=view)
        for number in numbers:
            part.add_argument(number, type=int)

    for name in ("step", "group", "why", "tokens"):
        parts[name].add_argument(
            "--kind",
            default="step",
            choices=KINDS,
            help="what they were sampled for: training (the default), an evaluation, a validation "
            "check, the pre-flight, the evaluation after imitation (imitated), or a step that "
            "failed; imitation: the right answers that were imitated",
        )
    for flag, name in (("--task", "CLASS"), ("--reward-file", "FUNCTION"), ("--loss", "FUNCTION")):
        help = "the same as for train.py: allows this program of yours to be executed"
        parts["replay"].add_argument(flag, metavar=f"FILE:{name}", help=help)
    return parser.parse_args(argv)


def require_steps(run: RunData, lines: Sequence[Record]) -> None:
    """Raise UserError if the run has no step, and hence no `lines`."""
    if not lines:
        raise UserError(f"{run.path}: the run has made no step yet")


def group_of(run: RunData, arguments: argparse.Namespace) -> Group:
    """Return the group of a completion. Raises UserError unless there is such a completion."""
    group = run.group(arguments.step, arguments.group, arguments.kind)
    most = len(group.completions) - 1
    if not 0 <= arguments.sample <= most:
        raise UserError(
            f"{run.path}: the group has no completion {arguments.sample}; it has 0 to {most}"
        )
    return group


def show_next(
    run: RunData, command: str, arguments: argparse.Namespace, console: Console, before: str = ""
) -> None:
    """Print the command that shows more, after the text `before`."""
    kind = getattr(arguments, "kind", "step")
    flag = "" if kind == "step" else f" --kind {kind}"
    line = f"{before}next: python -m grpo.inspect {quoted(run.path)} {command}{flag}"
    console.print(line, style="dim", soft_wrap=True)


# --- the views --------------------------------------------------------------------------------


def show_steps(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each step."""
    require_steps(run, run.metrics)
    show_table(console, run.metrics, STEP_FIGURES, {"classes": classes_of})
    show_next(run, f"step {run.metrics[-1]['step']}", arguments, console)


def show_step(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each group of a step."""
    groups = run.groups(arguments.step, arguments.kind)
    lines = [
        {**line, "advantages": advantage_range(group)}
        for line, group in zip(summaries(groups), groups)
    ]
    words = TRAINING | TRAP if arguments.kind in ("step", "failed") else TRAP
    show_table(console, lines, GROUP_FIGURES, words)
    widest = max(lines, key=itemgetter("reward_std"))
    show_next(run, f"group {arguments.step} {widest['group']}", arguments, console)


def show_degenerate(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the groups without gradient."""
    require_steps(run, run.group_index)
    lines = [line for line in run.group_index if line["class"] in WHY]
    if not lines:
        console.print("no such group: every group carried a gradient")
        return
    words = {"why": lambda line: WHY[line["class"]], "done": done_to, **TRAP}
    show_table(console, lines, {"step": ("step", "d"), **GROUP_FIGURES}, words)
    last = f"group {lines[-1]['step']} {lines[-1]['group']}"
    count = f"{len(lines)} of {len(run.group_index)} groups; "
    show_next(run, last, arguments, console, before=count)


def show_group(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the completions of a group next to the target, highest reward first."""
    group = run.group(arguments.step, arguments.group, arguments.kind)
    for line in group_lines(group, run.config.get("reward") or ""):
        console.print(line)
    console.print()
    lowest = by_reward(group)[-1]
    show_next(run, f"why {arguments.step} {arguments.group} {lowest}", arguments, console)


def show_why(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Say in words why a completion earned its reward and advantage, and what it taught."""
    step, number, sample, kind = (
        getattr(arguments, name) for name in ("step", "group", "sample", "kind")
    )
    group_of(run, arguments)
    for name, sentence in why(run.config, run.groups(step, kind), number, sample, kind).items():
        line = Text.assemble((f"{name:<9}  ", "bold"), escape_control(sentence))
        console.print(line, soft_wrap=not console.is_terminal)
    show_next(run, f"tokens {step} {number} {sample}", arguments, console)


def show_tokens(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each token of a completion, with its text if the run has a tokenizer."""
    group = group_of(run, arguments)
    completion = group.completions[arguments.sample]
    advantage = group.advantages[arguments.sample] if group.advantages else None
    tokenizer = tokenizer_of(run.path)
    lines = []
    for position, token in enumerate(completion.tokens):
        text = ""
        if tokenizer is not None and token < MOST_TOKENS:
            text = tokenizer.decode([token], skip_special_tokens=False)
        logprob = None if completion.is_demonstration else completion.logprobs[position]
        own = advantage[position] if isinstance(advantage, list) else advantage
        lines.append(
            {
                "position": position,
                "token": token,
                "text": text,
                "logprob": logprob,
                "advantage": own,
            }
        )
    show_table(console, lines, TOKEN_FIGURES, {"text": itemgetter("text")})


def show_replay(run: RunData, arguments: argparse.Namespace, console: Console) -> int:
    """Repeat a step's update and compare; return 1 if it differs."""
    from grpo.tools.replay import replay  # imports the trainer, which takes seconds

    result = replay(run, arguments.step, (arguments.task, arguments.reward_file, arguments.loss))
    lines = [
        {"figure": name, "stored": old, "again": new, "same": old == new}
        for name, (old, new) in result["figures"].items()
    ]
    *numbers, texts, advantages = lines
    words: dict[str, Callable[[Record], Any]] = {
        "": itemgetter("figure"),
        "same": lambda line: Text("yes") if line["same"] else Text("no", "bold red"),
    }
    figures = {"stored": ("stored", ".17g"), "repeated": ("again", ".17g")}
    show_table(console, numbers, figures, words)
    for line, source in ((texts, "tokens"), (advantages, "rewards")):
        verb = "are the same" if line["same"] else "differ"
        console.print(f"{line['figure']} from the stored {source}: they {verb}")
    start = f"step {result['start']}'s checkpoint" if result["start"] else "the run's first model"
    outcome = "identical to the last bit" if result["same"] else "it differs"
    console.print(f"step {arguments.step}, repeated from {start}: {outcome}")
    return 0 if result["same"] else 1


# The views: function, help, and the numbers that they take.
VIEWS: dict[str, tuple[Any, ...]] = {
    "steps": (show_steps, "a line for each step"),
    "step": (show_step, "the groups of a step", "step"),
    "group": (show_group, "a group's completions, highest reward first", "step", "group"),
    "why": (show_why, "why a completion has its reward and advantage", "step", "group", "sample"),
    "tokens": (show_tokens, "the tokens of a completion", "step", "group", "sample"),
    "degenerate": (show_degenerate, "the groups without gradient"),
    "replay": (show_replay, "repeat a step's update and compare", "step"),
}


if __name__ == "__main__":
    sys.exit(main())

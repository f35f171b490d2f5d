"""Why did a completion get its reward? Show what a run has stored, from all steps down to a token.

    python -m grpo.inspect runs/NAME steps                 every step
    python -m grpo.inspect runs/NAME step 12               its groups: class, reward, advantages
    python -m grpo.inspect runs/NAME group 12 3            a group's completions by reward
    python -m grpo.inspect runs/NAME why 12 3 0            its reward and advantage in words
    python -m grpo.inspect runs/NAME tokens 12 3 0         a completion's tokens
    python -m grpo.inspect runs/NAME degenerate            the groups without gradient, and why
    python -m grpo.inspect runs/NAME replay 12             repeat the step's update and compare
    python -m grpo.inspect runs/NAME compare runs/OTHER    runs side by side
    python -m grpo.inspect runs/NAME export out.csv        every completion (.csv, .jsonl, .parquet)

Steps are counted from 1, groups and completions from 0, as in the run's files. Every command takes
--json; commands over many steps take --from, --to, --level and --last. The exit status is 1 if a
replayed step differs, and 2 if there is no such run, step or group, or if a file is damaged.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from data.errors import Parser, exit_status
from grpo.run.reader import load_run
from grpo.run.rollouts import KINDS
from grpo.tools.inspect_completions import (
    export_rollouts,
    show_group,
    show_replay,
    show_tokens,
)
from grpo.tools.inspect_steps import show_compare, show_degenerate, show_step, show_steps
from grpo.tools.inspect_why import show_why
from grpo.variance import DEGENERATE

# Columns of the output if it is not a terminal.
PIPE_WIDTH = 160


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.inspect", lambda: show(argv))


def show(argv: Sequence[str] | None) -> int:
    """Show the view that the arguments name; return the exit status."""
    arguments = parse(argv)
    run = load_run(arguments.run)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    try:
        return arguments.command(run, arguments, console) or 0
    except BrokenPipeError:  # `| head` has closed the pipe
        sys.stderr.close()
        return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags; `command` is the function of the view."""
    parser = Parser(
        prog="python -m grpo.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    commands = _Commands(parser)
    commands.add("steps", show_steps, "a line for each step", over_steps=True)
    _add_step_commands(commands)
    _add_run_commands(commands)
    return parser.parse_args(argv)


def _add_step_commands(commands: "_Commands") -> None:
    """Add the commands about one step, one group, or one completion."""
    commands.add("step", show_step, "the groups of a step", "step")
    group = commands.add(
        "group", show_group, "the completions of a group, highest reward first", "step", "group"
    )
    group.add_argument("--whole", action="store_true", help="do not shorten runs of right words")

    commands.add(
        "why",
        show_why,
        "why a completion has its reward and advantage",
        "step",
        "group",
        "sample",
    )
    tokens = commands.add(
        "tokens", show_tokens, "the tokens of a completion", "step", "group", "sample"
    )
    tokens.add_argument(
        "--policy",
        action="store_true",
        help="add entropy and parity, from the policy of that step, which is computed again",
    )

    replay = commands.add(
        "replay", show_replay, "repeat a step's update and compare", "step", has_kinds=False
    )
    for part in (tokens, replay):
        part.add_argument(
            "--task",
            metavar="FILE:CLASS",
            help="the run's task, if that is a program of yours: allows it to be executed",
        )
        part.add_argument(
            "--reward-file",
            metavar="FILE:FUNCTION",
            help="the run's reward, if that is a program of yours: allows it to be executed",
        )
        part.add_argument(
            "--loss",
            metavar="FILE:FUNCTION",
            help="the run's loss, if that is a program of yours: allows it to be executed",
        )


def _add_run_commands(commands: "_Commands") -> None:
    """Add the commands about several steps, or several runs."""
    degenerate = commands.add(
        "degenerate", show_degenerate, "the groups without gradient", over_steps=True
    )
    degenerate.add_argument(
        "--class",
        dest="class_name",
        choices=DEGENERATE,
        help="only groups of this class",
    )

    compare = commands.add("compare", show_compare, "runs side by side", over_steps=True)
    compare.add_argument("others", type=Path, nargs="+", metavar="RUN")

    export = commands.add(
        "export", export_rollouts, "write every completion to a file", over_steps=True
    )
    export.add_argument(
        "output",
        type=Path,
        metavar="FILE",
        help=".csv, .jsonl or .parquet (which needs pyarrow)",
    )


class _Commands:
    """Adds commands to a parser, with the flags that they share."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parts = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        self,
        name: str,
        view: Callable[..., int | None],
        help: str,
        *numbers: str,
        over_steps: bool = False,
        has_kinds: bool = True,
    ) -> argparse.ArgumentParser:
        """Add a command that takes `numbers`, and return its parser.

        A command `over_steps` has flags that select steps. Other commands have --kind, if
        `has_kinds`.
        """
        part = self.parts.add_parser(name, help=help, description=help, allow_abbrev=False)
        part.set_defaults(command=view)
        part.add_argument("--json", action="store_true", help="as JSON")
        for number in numbers:
            part.add_argument(number, type=int)
        if over_steps:
            _add_step_filters(part)
        elif has_kinds:
            part.add_argument(
                "--kind",
                default="step",
                choices=KINDS,
                help="what they were sampled for: training (the default), an evaluation, a "
                "validation check, the pre-flight, the evaluation after imitation (imitated), or a "
                "step that failed; imitation: the right answers that were imitated",
            )
        return part


def _positive(text: str) -> int:
    """Return a whole number of 1 or more, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("give a whole number of 1 or more")
    return int(text)


def _add_step_filters(part: argparse.ArgumentParser) -> None:
    """Add the flags that select steps."""
    add = part.add_argument
    most = 10**9
    add("--from", dest="first", type=int, default=0, metavar="STEP", help="from this step on")
    add("--to", dest="last_step", type=int, default=most, metavar="STEP", help="up to this step")
    add("--level", type=int, help="only this level")
    add("--last", type=_positive, metavar="N", help="only the last N of these")

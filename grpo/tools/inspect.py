"""Why did a completion get its reward? Shows what a run has stored, from all steps down to a token.

    python -m grpo.inspect runs/NAME steps                 what each step did
    python -m grpo.inspect runs/NAME step 12               its groups: class, reward, advantages
    python -m grpo.inspect runs/NAME group 12 3            a group's completions by reward
    python -m grpo.inspect runs/NAME tokens 12 3 0         a completion's tokens
    python -m grpo.inspect runs/NAME degenerate            the groups that taught nothing, and why
    python -m grpo.inspect runs/NAME replay 12             repeats the step's update and compares
    python -m grpo.inspect runs/NAME compare runs/OTHER    runs side by side
    python -m grpo.inspect runs/NAME export out.csv        a line a completion (.jsonl, .parquet)

Steps, groups and completions are counted as the run counts them: steps from 1, groups and
completions from 0. Every command takes --json; those over many steps take --from, --to, --level
and --last. Exit status 1: the replayed step differs; 2, with one line: no such run, step, group; a
damaged file.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from grpo.run.reader import load_run
from grpo.tools.inspect_views import (
    export_rollouts,
    show_compare,
    show_degenerate,
    show_group,
    show_replay,
    show_step,
    show_steps,
    show_tokens,
)
from tasks.base import Parser, exit_status

PIPE_WIDTH = 160  # columns if the output is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Show by these flags; return the exit status."""
    return exit_status("grpo.inspect", lambda: show(argv))


def show(argv: Sequence[str] | None) -> int:
    """Show the view that was asked for."""
    arguments = parse(argv)
    run = load_run(arguments.run)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    try:
        return arguments.command(run, arguments, console) or 0
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags; `command` is the view that was asked for."""
    parser = Parser(
        prog="python -m grpo.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    commands = _Commands(parser)

    commands.add("steps", show_steps, "what each step did", over_steps=True)
    commands.add("step", show_step, "the groups of a step", "step")
    group = commands.add(
        "group", show_group, "the completions of a group, highest reward first", "step", "group"
    )
    group.add_argument("--whole", action="store_true", help="show all words, the right ones too")

    tokens = commands.add(
        "tokens", show_tokens, "the tokens of a completion", "step", "group", "sample"
    )
    tokens.add_argument(
        "--policy",
        action="store_true",
        help="entropy and parity too, by the policy of that step, computed again (seconds)",
    )
    replay = commands.add(
        "replay", show_replay, "repeat a step's update and compare", "step", has_kinds=False
    )
    for part in (tokens, replay):
        part.add_argument(
            "--task",
            metavar="FILE:CLASS",
            help="if the run's task is a program: its name, to allow that it is executed",
        )

    degenerate = commands.add(
        "degenerate", show_degenerate, "the groups whose rewards did not differ", over_steps=True
    )
    degenerate.add_argument(
        "--class",
        dest="class_name",
        choices=["identical", "solved", "failed", "tied"],
        help="of this class only",
    )
    compare = commands.add("compare", show_compare, "runs side by side", over_steps=True)
    compare.add_argument("others", type=Path, nargs="+", metavar="RUN")
    export = commands.add(
        "export", export_rollouts, "every completion, one on a line", over_steps=True
    )
    export.add_argument(
        "output",
        type=Path,
        metavar="FILE",
        help=".csv, .jsonl or .parquet (the latter needs pyarrow)",
    )
    return parser.parse_args(argv)


class _Commands:
    """The commands of a parser, and the flags that they share."""

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

        A command `over_steps` can select steps; the others can select the kind of a step, if
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
                choices=["step", "eval", "promotion", "preflight", "failed"],
                help="what was sampled: for training, an evaluation, a validation check, the "
                "pre-flight, or a step that failed",
            )
        return part


def _add_step_filters(part: argparse.ArgumentParser) -> None:
    add = part.add_argument
    add("--from", dest="first", type=int, default=0, metavar="STEP", help="from this step on")
    add(
        "--to",
        dest="last_step",
        type=int,
        default=10**9,
        metavar="STEP",
        help="up to this step",
    )
    add("--level", type=int, help="of this level only")
    add("--last", type=int, default=0, metavar="N", help="the last N of them only")

"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25`.

Problems come from the test split, whose documents are used neither to train nor to choose
anything. They are distinct: if fewer exist than were asked for, all of them are evaluated and the
output says so. Problems that the run was trained on are dropped and counted.

A run is evaluated as it was trained: task, level, wording, system turn, examples, variables of the
chat template, temperature, top-p and completion budget are the run's own unless a flag overrides
them. --foreign adds kinds of text that no run is trained on (`data/foreign`), and reports each.
"""

import argparse
import sys

from data.errors import Parser, UserError, exit_status
from data.files import kind_of
from grpo.config import MAX_NUMBER, MAX_SHOTS, Config
from grpo.model.prompts import system_text, template_arguments
from grpo.tools.train import let_threads_sleep
from tasks.registry import flags_of_tasks, implied_task, split_options

# The smallest and the largest value of each number.
LIMITS = {
    "problems": (1, 1_000_000),
    "samples": (1, 10_000),
    "temperature": (0, 1_000),
    "max_new_tokens": (0, MAX_NUMBER),
    "shots": (0, MAX_SHOTS),
}


def program() -> None:
    """Run `eval.py`; an installed package calls it `grpo-eval`."""
    let_threads_sleep()
    sys.exit(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Evaluate with these flags; return the exit status."""
    return exit_status("eval.py", lambda: start(argv))


def start(argv: list[str]) -> int:
    """Read the flags, and evaluate. Torch is loaded after that, because it takes seconds."""
    flags, others = parse(argv)
    from grpo.tools.evaluate import report

    return report(flags, others)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the words that may be flags of the task.

    A flag that is None takes the value of the run. Raises UserError for a value out of range, and
    for an unknown flag if the task is known before a run is read.
    """
    parser = make_parser()
    flags, others = parser.parse_known_args(argv)
    flags.models = list(dict.fromkeys(flags.models or ["builtin"]))
    _check(flags)

    spec = implied_task(others) if flags.task is None else flags.task
    if spec is not None or not any(map(kind_of, flags.models)):
        _, unknown = split_options(spec or Config.task, others)
        if unknown:
            near = parser.nearest(unknown[0].split("=")[0])
            hint = f"did you mean {near}?" if near else "python eval.py --help lists the flags"
            raise UserError(f"{unknown[0]}: no such flag; {hint}")
    return flags, others


def make_parser() -> Parser:
    """Return the parser: what is evaluated, how completions are sampled, how a prompt is put."""
    assert __doc__ is not None
    parser = Parser(
        prog="python eval.py",
        description=__doc__.splitlines()[0],
        epilog=f"Most flags are the run's own unless given.\n{flags_of_tasks()}",
        allow_abbrev=False,
    )

    def add(*names: str, help: str, **options: object) -> None:
        parser.add_argument(*names, help=help, **options)  # type: ignore[arg-type]

    add(
        "--model",
        action="append",
        dest="models",
        help="a run, a checkpoint, builtin (the default), a model directory, a GGUF file, or a hub "
        "id; may be repeated: several models are compared on the same problems",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--endpoint",
        metavar="URL",
        help="ask this OpenAI-compatible server for the answers of --model; its key is taken from "
        "OPENAI_API_KEY",
    )
    add("--json", default="", metavar="FILE", help="also write figures and answers there")

    add("--task", help="a task's name, or path/to/file.py:ClassName (default: interleave)")
    add("--words", "--levels", default="", help="levels, e.g. 10,25,50 (default: the task's own)")
    add("--problems", type=int, default=200, help="most distinct problems at each level")
    add(
        "--samples",
        type=int,
        help="independent completions of each problem; their mean counts (default: 1, or a group "
        "if the reward compares its completions)",
    )
    add("--dataset", default="", metavar="FILE", help="problems of a JSONL file (tasks.generate)")
    add("--foreign", action="store_true", help="also evaluate foreign kinds of text: tables ...")
    add("--split", default="test", choices=["train", "validation", "test"], help="of the problems")
    add("--seed", type=int, default=0, help="of the problems, their examples and the samples")

    add("--temperature", type=float, help="of sampling (default: 1)")
    add("--greedy", action="store_true", help="take the likeliest token each time (temperature 0)")
    add("--top-p", type=float, help="sample from the likeliest tokens of this mass (default: all)")
    add("--max-new-tokens", type=int, help="budget (default: a quarter more than the target takes)")

    add("--system", help='text of a system turn, or @FILE ("", the default: none)')
    add("--shots", type=int, metavar="K", help="solved problems before each question (default: 0)")
    add("--chat-template-kwargs", metavar="JSON", help="variables of the model's chat template")
    add("--wording", metavar="FILE", help='a text that replaces the task\'s prompt ("": its own)')
    return parser


def _check(flags: argparse.Namespace) -> None:
    """Raise UserError for a wrong value; read the text of --system."""
    for name, (least, most) in LIMITS.items():
        value = getattr(flags, name)
        if value is None or least <= value <= most:
            continue
        fix = f"give {least} or more" if not value > most else f"give {most:,} or less"
        raise UserError(f"--{name.replace('_', '-')} {value}: {fix}")

    if flags.greedy and flags.temperature:
        raise UserError(f"--greedy: is --temperature 0, not {flags.temperature:g}; leave one out")
    if flags.top_p is not None and not 0 < flags.top_p <= 1:
        raise UserError(f"--top-p {flags.top_p}: give a number above 0 and up to 1")

    if flags.chat_template_kwargs is not None:
        template_arguments(flags.chat_template_kwargs)
    if flags.system is not None:
        flags.system = system_text(flags.system)

"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25`.

Problems come from the test split, whose documents are used neither to train nor to choose
anything. They are distinct, and those that the run was trained on are dropped and counted. A run is
evaluated as it was trained, with its task, prompt and sampling, unless a flag overrides them.
"""

import argparse
from collections.abc import Sequence

from grpo import __version__
from grpo.data.errors import Parser, UserError, command_of, exit_status, importing
from grpo.tasks.registry import flags_of_tasks
from grpo.tools.train import let_threads_sleep

# The smallest and the largest value of each number.
LIMITS = {
    "problems": (1, 1_000_000),
    "samples": (1, 10_000),
    "temperature": (0, 1_000),
    "max_new_tokens": (0, 1_000_000),
    "shots": (0, 64),
    "timeout": (1, 86_400),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate with these flags; return the exit status."""
    let_threads_sleep()
    return exit_status("eval.py", lambda: start(argv))


def start(argv: Sequence[str] | None) -> int:
    """Read the flags, and evaluate. Torch is loaded after that, because it takes seconds."""
    flags, others = parse(argv)
    with importing():
        from grpo.tools.evaluate import report

    return report(flags, others)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the words that may be flags of the task.

    A flag that is None takes the value of the run. Raises UserError for a value out of range.
    """
    flags, others = make_parser().parse_known_args(argv)
    flags.models = list(dict.fromkeys(flags.models or ["builtin"]))
    for name, (least, most) in LIMITS.items():
        value = getattr(flags, name)
        if value is not None and not least <= value <= most:
            fix = f"give {most:,} or less" if value > most else f"give {least} or more"
            raise UserError(f"--{name.replace('_', '-')} {value}: {fix}")
    if flags.top_p is not None and not 0 < flags.top_p <= 1:
        raise UserError(f"--top-p {flags.top_p}: give a number above 0 and up to 1")
    if flags.strip_reasoning and not flags.endpoint:
        raise UserError("--strip-reasoning: is for answers of a server; give --endpoint as well")
    return flags, others


def make_parser() -> Parser:
    """Return the parser: what is evaluated, how completions are sampled, how a prompt is put."""
    assert __doc__ is not None
    parser = Parser(
        prog=command_of("eval"),
        description=__doc__.splitlines()[0],
        epilog=f"Most flags are the run's own unless given.\n{flags_of_tasks()}",
    )

    add = parser.add_argument
    add("--version", action="version", version=__version__, help="that of grpo")
    models = (
        "a run, a checkpoint, builtin (the default), a model directory, a GGUF file, or a hub id; "
        "may be repeated: several models are compared on the same problems"
    )
    add("--model", action="append", dest="models", help=models)
    add("--device", default="auto", help="auto, cpu or cuda")
    server = (
        "ask this OpenAI-compatible server for the answers of --model; its key is taken from "
        "OPENAI_API_KEY"
    )
    add("--endpoint", metavar="URL", help=server)
    timeout = "seconds that the server may take for an answer (default: 600)"
    add("--timeout", type=float, default=600.0, metavar="S", help=timeout)
    strip = "leave out the <think> ... </think> of the server's answers"
    add("--strip-reasoning", action="store_true", help=strip)
    add("--json", default="", metavar="FILE", help="also write figures and answers there")

    add("--task", help="a task's name, or path/to/file.py:ClassName (default: interleave)")
    add("--words", "--levels", default="", help="levels, e.g. 10,25,50 (default: the task's own)")
    add("--problems", type=int, default=200, help="most distinct problems at each level")
    samples = (
        "independent completions of each problem; their mean counts (default: 1, or a group if the "
        "reward compares its completions)"
    )
    add("--samples", type=int, help=samples)
    add("--dataset", default="", metavar="FILE", help="problems of a JSONL file")
    add("--foreign", action="store_true", help="also evaluate foreign kinds of text: tables ...")
    add("--split", default="test", choices=["train", "validation", "test"], help="of the problems")
    add("--seed", type=int, default=0, help="of the problems, their examples and the samples")

    either = parser.add_mutually_exclusive_group()
    either.add_argument("--temperature", type=float, help="of sampling (default: 1)")
    greedy = "take the likeliest token each time (temperature 0)"
    either.add_argument(
        "--greedy", action="store_const", const=0.0, dest="temperature", help=greedy
    )
    add("--top-p", type=float, help="sample from the likeliest tokens of this mass (default: all)")
    add("--max-new-tokens", type=int, help="budget (default: a quarter more than the target takes)")

    add("--system", help='text of a system turn, or @FILE ("", the default: none)')
    add("--shots", type=int, metavar="K", help="solved problems before each question (default: 0)")
    add("--chat-template-kwargs", metavar="JSON", help="variables of the model's chat template")
    add("--wording", metavar="FILE", help='a text that replaces the task\'s prompt ("": its own)')
    return parser

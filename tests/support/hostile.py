"""Hostile command lines of `train.py` and `eval.py`, each with its only acceptable outcome.

A refused command line ends with status 2 and one line on standard error. A harmless one may also
succeed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REFUSED, HARMLESS, ACCEPTED = "refused", "harmless", "accepted"
ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b1m\u202e"


@dataclass(frozen=True)
class Case:
    """A command line of a program, and its outcome: REFUSED or HARMLESS."""

    name: str
    program: str
    argv: list[str]
    outcome: str = REFUSED


@dataclass(frozen=True)
class Input:
    """An input of `train.py`: its flags, and `prepare`, which makes the files that they name."""

    name: str
    flags: tuple[str, ...]  # relative to the folder that `prepare` gets
    prepare: Callable[[Path], None]
    outcome: str = REFUSED


NUMBERS = ["nan", "inf", "-inf", "1e999", "", " ", "x", "1,5", "0x10", "--", "٣x", "1_0x"]
FLOAT_FLAGS = {
    "--learning-rate": ["-1", "0", "1e9"],
    "--temperature": ["-1", "-0.1", "1e9"],
    "--beta": ["-1"],
    "--promote-at": ["-1", "2"],
}
INT_FLAGS = {
    "--words": ["0", "-1", "10000000", "99999999999999999999"],
    "--steps": ["-1", "99999999999999999999"],
    "--prompts": ["0", "-1", "99999999999999999999"],
    "--group-size": ["0", "1", "-1", "99999999999999999999"],
    "--lora-rank": ["-1", "99999999999999999999"],
    "--eval-problems": ["-1", "99999999999999999999"],
    "--eval-every": ["-1"],
    "--save-every": ["-1"],
    "--seed": ["-1x", "99999999999999999999999999"],
    "--max-new-tokens": ["0", "-1", "99999999999999999999"],
    "--patience": ["-1"],
    "--shots": ["-1", "100000"],
}
CHOICE_FLAGS = [
    "--task",
    "--reward",
    "--credit",
    "--loss",
    "--on-degenerate",
    "--device",
    "--dtype",
    "--preflight",
    "--warm-start",
    "--schedule",
    "--problems",
    "--quantise",
    "--control",
    "--track",
]
BAD_CHOICES = ["", "bogus", ESCAPE, "../x", "None", "auto:1", "cuda:999", "cpu:7", "meta"]
TEXT_FLAGS = {
    "--name": ["../out", "/abs", "", ".", "..", "a/b", "a\nb", ESCAPE, "a" * 300, "-x", "nul\0l"],
    "--model": ["", "nowhere", "/dev/null", "no such dir", "a/b/c/d", ESCAPE, "nul\0l", "x.gguf"],
    "--dataset": ["", "nowhere.jsonl", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--texts": ["", "nowhere", "/dev/null", ESCAPE, "nul\0l"],
    "--wording": ["nowhere.txt", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--resume": ["", "nowhere", "/dev/null", "runs", ESCAPE, "nul\0l"],
    "--config": [
        "",
        "nowhere.yaml",
        "{",
        "{a: 1}",
        "[1]",
        "{steps: x}",
        "{steps: [1]}",
        "{steps: {a: 1}}",
        "{top_p: nan}",
        "{top_p: .inf}",
        "{top_p: 2}",
        "{clip: [0.2]}",
        "{clip: x}",
        "{grad_clip: -1}",
        "{betas: x}",
        "{name: 1}",
        "{seed: 1.5}",
        "{words: true}",
        "{resume: x}",
        "{model: [a]}",
        "{task_options: 3}",
        "!!python/object:os.system x",
        ESCAPE,
        "nul\0l",
    ],
    "--curriculum": ["", ",", "0", "-1", "a", "5,3", "3,3", "1,,2", "1e3", "99999999999999999999"],
    "--system": ["\ud800", "nul\0l" * 2],
    "--chat-template-kwargs": ["x", "[1]", "{", "3", '{"a": NaN}'],
    "--task-options": ["x"],
    "--no-such-flag": ["1"],
    "--lr": ["x"],
}

# Those of the values above that a flag may accept.
FINE = {
    ("--learning-rate", "0"),
    ("--learning-rate", "1e9"),
    ("--temperature", "1e9"),
    ("--seed", "99999999999999999999999999"),
    ("--system", "nul\0l" * 2),
    ("--device", "cpu:7"),
}


def train_flags() -> Iterator[Case]:
    """Yield each flag of `train.py` with values that it should refuse."""
    for flags, common in ((FLOAT_FLAGS, NUMBERS), (INT_FLAGS, [*NUMBERS, "1.5", "1e3"])):
        for flag, own in flags.items():
            for value in (*common, *own):
                yield _train(flag, value)
    for flag in CHOICE_FLAGS:
        for value in BAD_CHOICES:
            yield _train(flag, value)
    for flag, values in TEXT_FLAGS.items():
        for value in values:
            yield _train(flag, value)
    yield Case("train: a flag without its value", "train", ["--words"])
    yield Case("train: a stray word", "train", ["words"])


def _train(flag: str, value: str) -> Case:
    outcome = HARMLESS if (flag, value) in FINE else REFUSED
    return Case(f"train {flag} {value[:20]!r}", "train", [*SMALL, flag, value], outcome)


SMALL = (
    "--model tiny --lora-rank 0 --words 2 --prompts 2 --group-size 2 --steps 1 --eval-problems 2 "
    "--preflight off --no-ramp --device cpu --max-new-tokens 4 --warm-start off"
).split()

EVAL_SMALL = "--model tiny --words 2 --problems 2 --device cpu".split()


def eval_flags() -> Iterator[Case]:
    """Yield flags of `eval.py` with values that they should refuse."""
    bad = {
        "--words": ["0", "-1", "x", "2,x", "nan", "99999999999999999999", "5,,6"],
        "--level": ["", "0", "-1", "x"],
        "--problems": ["", "0", "-1", "x", "nan", "1.5", "99999999999999999999"],
        "--temperature": ["", "-1", "nan", "inf", "x"],
        "--task": ["", "bogus", ESCAPE, "x.py", "nowhere.py:T"],
        "--reward": ["", "bogus", ESCAPE],
        "--split": ["", "bogus", "dev"],
        "--model": ["", "nowhere", "/dev/null", ESCAPE, "nul\0l", "runs"],
        "--dataset": ["nowhere", "/dev/null", ".", ESCAPE],
        "--texts": ["nowhere", "/dev/null", ESCAPE],
        "--json": [".", "/dev/full/x", "/proc/x", "nul\0l"],
        "--device": ["", "bogus", "auto:1", "cuda:999", "meta"],
        "--dtype": ["", "bogus", "int8"],
        "--system": ["\ud800"],
        "--shots": ["-1", "x", "100000"],
        "--wording": ["nowhere", "/dev/null"],
        "--seed": ["x", "1.5"],
        "--bogus": ["1"],
        "--batch": ["0", "-1", "x"],
    }
    for flag, values in bad.items():
        for value in values:
            yield Case(f"eval {flag} {value[:20]!r}", "eval", [*EVAL_SMALL, flag, value])

"""Hostile command lines, models, datasets and texts, each with its only acceptable outcome.

What is REFUSED ends with status 2 and one line on standard error; what is HARMLESS may also run.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.base import Problem
from tasks.interleave import Interleave

REFUSED, HARMLESS, ACCEPTED = "refused", "harmless", "accepted"
ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b1m\u202e"
HUGE = "99999999999999999999"


@dataclass(frozen=True)
class Case:
    """A command line of "train" or "eval", and `prepare`, which makes the files that it names."""

    name: str
    program: str
    flags: tuple[str, ...]
    outcome: str = REFUSED
    prepare: Callable[[Path], object] = lambda home: None


NUMBERS = ["nan", "inf", "-inf", "1e999", "", " ", "x", "1,5", "0x10", "--", "٣x", "1_0x"]
BAD_CHOICES = ["", "bogus", ESCAPE, "../x", "None", "auto:1", "cuda:999", "meta"]
TRAIN = {
    **{flag: [*NUMBERS, "-1"] for flag in ("--learning-rate", "--temperature", "--beta")},
    **{
        flag: [*NUMBERS, "1.5", "1e3", "-1", HUGE]
        for flag in "--words --steps --prompts --group-size --eval-problems --shots".split()
    },
    "--max-new-tokens": ["0", "-1", HUGE],
    "--eval-every": ["-1", "x"],
    "--seed": ["-1x", "1.5"],
    **{
        flag: BAD_CHOICES
        for flag in "--task --reward --loss --device --dtype --preflight --problems --track".split()
    },
    "--name": ["../out", "/abs", "", ".", "..", "a/b", "a\nb", ESCAPE, "a" * 300, "-x", "nul\0l"],
    "--model": ["", "nowhere", "/dev/null", "no such dir", "a/b/c/d", ESCAPE, "nul\0l", "x.gguf"],
    "--dataset": ["", "nowhere.jsonl", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--texts": ["", "nowhere", "/dev/null", ESCAPE, "nul\0l"],
    "--wording": ["nowhere.txt", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--resume": ["", "nowhere", "/dev/null", "runs", ESCAPE, "nul\0l"],
    "--config": [
        *("", "nowhere.yaml", "{", "{a: 1}", "[1]", "{steps: x}", "{steps: {a: 1}}"),
        *("{top_p: nan}", "{top_p: .inf}", "{clip: x}", "{name: 1}", "{seed: 1.5}"),
        *("{words: true}", "{resume: x}", "{model: [a]}", "{task_options: 3}"),
        *("!!python/object:os.system x", ESCAPE, "nul\0l"),
    ],
    "--curriculum": ["", ",", "0", "-1", "a", "5,3", "3,3", "1,,2", "1e3", HUGE],
    "--system": ["\ud800"],
    "--no-such-flag": ["1"],
}
EVAL = {
    "--words": ["0", "-1", "x", "2,x", "nan", HUGE, "5,,6"],
    "--problems": ["", "0", "-1", "x", "nan", "1.5", HUGE],
    "--temperature": ["", "-1", "nan", "inf", "x"],
    "--task": ["", "bogus", ESCAPE, "x.py", "nowhere.py:T"],
    "--split": ["", "bogus", "dev"],
    "--model": ["", "nowhere", "/dev/null", ESCAPE, "nul\0l", "runs"],
    "--dataset": ["nowhere", "/dev/null", ".", ESCAPE],
    "--json": [".", "/dev/full/x", "/proc/x", "nul\0l"],
    "--device": BAD_CHOICES,
    "--wording": ["nowhere", "/dev/null"],
    "--seed": ["x", "1.5"],
}


def command_lines() -> Iterator[Case]:
    """Yield each flag with values that it must refuse."""
    for program, table in (("train", TRAIN), ("eval", EVAL)):
        for flag, values in table.items():
            for value in values:
                yield Case(f"{program} {flag} {value[:20]!r}", program, (flag, value))
        yield Case(f"{program}: a flag without its value", program, ("--words",))
        yield Case(f"{program}: a stray word", program, ("words",))


# --- models -----------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    *({"num_attention_heads": 3}, {"num_attention_heads": 0}, {"num_key_value_heads": 3}),
    *({"hidden_size": 0}, {"hidden_size": -1}, {"hidden_size": 7}, {"head_dim": 3}),
    *({"num_hidden_layers": 0}, {"num_hidden_layers": 10**6}, {"vocab_size": 10**12}),
    *({"rms_norm_eps": None}, {"model_type": "bert"}, {"model_type": ESCAPE}),
    {"eos_token_id": "x"},
    {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
]
TEMPLATES = [
    *("{{ raise_exception('no') }}", "{% for %}", "{{ messages[7].content }}", "no messages", ""),
    *("{{ messages.__class__.__mro__ }}", ESCAPE + "{{ messages[0].content }}"),
]
DAMAGED: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: path.write_text("[1]"),
    "HTML": lambda path: path.write_text("<!doctype html>"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "gigabytes": lambda path: os.truncate(path, 5 << 30),
}


def models(model: Path) -> Iterator[Case]:
    """Yield changes of the files in the directory `model`, which can be loaded."""

    def case(name: str, change: Callable[[Path], object], outcome: str = REFUSED) -> Case:
        def prepare(home: Path) -> None:
            shutil.copytree(model, home / "model")
            change(home / "model")

        return Case(f"model: {name}", "train", ("--model", "model"), outcome, prepare)

    yield case("whole", lambda folder: None, ACCEPTED)
    for values in CONFIGS:
        yield case(
            f"config.json {values}"[:80], lambda folder, values=values: _edit(folder, values)
        )
    for number, template in enumerate(TEMPLATES):
        yield case(
            f"chat template {number}",
            lambda folder, text=template: (folder / "chat_template.jinja").write_text(text),
            HARMLESS,
        )
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for what, change in DAMAGED.items():
            yield case(f"{name} {what}", lambda folder, c=change, n=name: c(folder / n))


def _edit(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- datasets and texts -----------------------------------------------------------------------

PROBLEM: dict[str, Any] = {
    "task": "interleave",
    "level": 2,
    "prompt": "A: a b\nB: c d",
    "target": "a c b d",
    "key": "",
    "data": {"a": ["a", "b"], "b": ["c", "d"]},
}
PROBLEM["key"] = Interleave().key(Problem(**PROBLEM))


def datasets() -> Iterator[Case]:
    """Yield files for --dataset."""

    def case(name: str, lines: list[Any], outcome: str = REFUSED) -> Case:
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        flags = ("--dataset", "problems.jsonl")
        prepare = lambda home: (home / "problems.jsonl").write_text(text)  # noqa: E731
        return Case(f"dataset: {name}", "train", flags, outcome, prepare)

    yield case("whole", [PROBLEM], ACCEPTED)
    for key in PROBLEM:
        yield case(f"without {key}", [{k: v for k, v in PROBLEM.items() if k != key}])
        for value in (None, 1.5, "", ESCAPE, [], {}, -1, 10**30, "\ud800", [[]], {"a": 1}, True):
            is_fine = key in ("task", "prompt", "target") and value in ("", ESCAPE)
            outcome = HARMLESS if is_fine else REFUSED
            yield case(f"{key} = {value!r}"[:60], [{**PROBLEM, key: value}], outcome)
    for value in (None, "x", [], [1], [["a"]], {"a": 1}, ["\ud800"], ["a b", ""]):
        yield case(f"data.a = {value!r}", [{**PROBLEM, "data": {**PROBLEM["data"], "a": value}}])
    yield case("no JSON", ["a,b,c\n"])
    yield case("deep", ["[" * 200_000 + "\n"])
    yield case("a long number", ['{"level": ' + "9" * 10_000 + "}\n"])
    yield case("null bytes", ["\0\0\0\n"])


TEXTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe" * 1000,
    "escapes": (ESCAPE + " ").encode() * 1000,
    "one long word": b"a" * 1_000_000,
}


def texts() -> Iterator[Case]:
    """Yield folders for --texts."""

    def case(name: str, make: Callable[[Path], object], outcome: str) -> Case:
        def prepare(home: Path) -> None:
            (home / "texts").mkdir()
            make(home / "texts" / "one.txt")

        return Case(f"texts: {name}", "train", ("--texts", "texts"), outcome, prepare)

    for name, content in TEXTS.items():
        yield case(name, lambda path, content=content: path.write_bytes(content), HARMLESS)
    yield case("gigabytes", lambda path: (path.touch(), os.truncate(path, 3 << 30)), REFUSED)
    yield case("a pipe", os.mkfifo, REFUSED)

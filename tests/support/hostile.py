"""Hostile command lines, models, datasets, texts and run directories, each with its only acceptable
outcome: what is REFUSED ends with status 2 and one line on standard error; what is HARMLESS may
also run.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from grpo.tasks.base import Problem
from grpo.tasks.interleave import Interleave

REFUSED, HARMLESS, ACCEPTED = "refused", "harmless", "accepted"
ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b1m\u202e"
HUGE = "99999999999999999999"


@dataclass(frozen=True)
class Case:
    """A command line of a program, and `prepare`, which makes or damages the files that it reads
    in the folder of the test.
    """

    name: str
    program: str
    flags: tuple[str, ...] = ()
    outcome: str = REFUSED
    prepare: Callable[[Path], object] = lambda home: None


NUMBERS = ["nan", "inf", "-inf", "1e999", "", " ", "x", "1,5", "0x10", "--", "٣x", "1_0x"]
BAD_CHOICES = ["", "bogus", ESCAPE, "../x", "None", "auto:1", "cuda:999", "meta"]
TRAIN = {
    **{flag: [*NUMBERS, "-1"] for flag in ("--learning-rate", "--temperature", "--beta")},
    **{
        flag: [*NUMBERS, "1.5", "1e3", "-1", HUGE]
        for flag in "--words --steps --prompts --group-size --shots".split()
    },
    "--max-new-tokens": ["0", "-1", HUGE],
    "--eval-every": ["-1", "x"],
    "--seed": ["-1x", "1.5"],
    **{
        flag: BAD_CHOICES
        for flag in "--task --reward --loss --device --dtype --preflight --problems".split()
    },
    "--name": ["../out", "/abs", "", ".", "..", "a/b", "a\nb", ESCAPE, "a" * 300, "-x", "nul\0l"],
    "--model": ["", "nowhere", "/dev/null", "no such dir", "a/b/c/d", ESCAPE, "nul\0l", "x.gguf"],
    "--dataset": ["nowhere.jsonl", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--texts": ["nowhere", "/dev/null", ESCAPE, "nul\0l"],
    "--wording": ["nowhere.txt", "/dev/null", ".", ESCAPE, "nul\0l"],
    "--resume": ["", "nowhere", "/dev/null", "runs", ESCAPE, "nul\0l"],
    "--config": [
        *("", "nowhere.yaml", "{", "{a: 1}", "[1]", "{steps: x}", "{steps: {a: 1}}"),
        *("{top_p: nan}", "{top_p: .inf}", "{clip: x}", "{name: 1}", "{seed: 1.5}"),
        *("{words: true}", "{resume: x}", "{model: [a]}", "{task_options: 3}"),
        *("!!python/object:os.system x", ESCAPE, "nul\0l"),
    ],
    "--curriculum": [",", "0", "-1", "a", "5,3", "3,3", "1,,2", "1e3", HUGE],
    "--track": BAD_CHOICES[1:],
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
    "--json": [".", "/dev/full/x", "/proc/x"],
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


# --- models, datasets and texts -----------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    *({"num_attention_heads": 3}, {"num_attention_heads": 0}, {"num_key_value_heads": 3}),
    *({"hidden_size": 0}, {"hidden_size": 7}, {"num_hidden_layers": 0}, {"vocab_size": 10**12}),
    *({"rms_norm_eps": None}, {"model_type": "bert"}, {"model_type": ESCAPE}),
    {"eos_token_id": "x"},
    {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
]
TEMPLATES = ["{% for %}", "{{ messages[7].content }}", "{{ messages.__class__.__mro__ }}", ESCAPE]
REPLACED: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: path.write_text("[1]"),
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
        yield case(f"config.json {values}"[:80], lambda folder, v=values: _edit(folder, v))
    for text in TEMPLATES:
        change = lambda folder, t=text: (folder / "chat_template.jinja").write_text(t)  # noqa: E731
        yield case(f"chat template {text!r}", change, HARMLESS)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for what, replace in REPLACED.items():
            yield case(f"{name} {what}", lambda folder, r=replace, n=name: r(folder / n))


def _edit(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


PROBLEM: dict[str, Any] = {
    "task": "interleave",
    "level": 2,
    "prompt": "A: a b\nB: c d",
    "target": "a c b d",
    "key": "",
    "data": {"a": ["a", "b"], "b": ["c", "d"]},
}
PROBLEM["key"] = Interleave().key(Problem(**PROBLEM))
NO_LINES = ["a,b,c\n", "[" * 200_000 + "\n", '{"level": ' + "9" * 10_000 + "}\n", "\0\0\0\n"]


def datasets() -> Iterator[Case]:
    """Yield files for --dataset."""

    def case(name: str, text: str, outcome: str = REFUSED) -> Case:
        prepare = lambda home: (home / "problems.jsonl").write_text(text)  # noqa: E731
        return Case(name[:60], "train", ("--dataset", "problems.jsonl"), outcome, prepare)

    yield case("dataset: whole", json.dumps(PROBLEM), ACCEPTED)
    for text in NO_LINES:
        yield case(f"dataset: {text[:9]!r}", text)
    for key in PROBLEM:
        rest = {name: value for name, value in PROBLEM.items() if name != key}
        yield case(f"dataset without {key}", json.dumps(rest))
        for value in (None, 1.5, "", ESCAPE, [], -1, 10**30, "\ud800", True):
            is_fine = key in ("task", "prompt", "target", "key") and value in ("", ESCAPE)
            text = json.dumps({**PROBLEM, key: value})
            yield case(f"dataset: {key} = {value!r}", text, HARMLESS if is_fine else REFUSED)


TEXTS: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" * 1000),
    "escapes": lambda path: path.write_text((ESCAPE + " ") * 1000),
    "one long word": lambda path: path.write_text("a" * 1_000_000),
    "gigabytes": lambda path: (path.touch(), os.truncate(path, 3 << 30)),
    "a pipe": os.mkfifo,
}


def texts() -> Iterator[Case]:
    """Yield folders for --texts."""
    for name, make in TEXTS.items():

        def prepare(home: Path, make=make) -> None:
            (home / "texts").mkdir()
            make(home / "texts" / "one.txt")

        outcome = REFUSED if name in ("gigabytes", "a pipe") else HARMLESS
        yield Case(f"texts: {name}", "train", ("--texts", "texts"), outcome, prepare)


# --- run directories ----------------------------------------------------------------------------

# The programs that read each file of a run, by their names in `test_hostile.py`.
READERS = {
    "config.yaml": "resume continue eval steps report audit export",
    "metrics.jsonl": "resume steps report",
    "eval.jsonl": "resume report",
    "groups.jsonl": "resume degenerate report",
    "seen.jsonl": "resume continue eval audit",
    "curriculum.jsonl": "resume report",
    "samples.log": "resume",
    "rollouts/step-000002.jsonl.zst": "step group tokens replay report",
    "rollouts/eval-000000.jsonl.zst": "kind audit report",
    "checkpoints/step-000002/manifest.json": "resume continue eval export",
    "checkpoints/step-000002/trainer.json": "resume continue eval",
    "checkpoints/step-000002/tokenizer.json": "resume eval report tokens",
    "checkpoints/step-000002/model.safetensors": "resume continue export replay",
    "checkpoints/step-000002/optimizer.safetensors": "resume",
}
CONTENTS = {
    "empty": b"",
    "zeros": bytes(4096),
    "not UTF-8": b"\xff\xfe\x80abc\n",
    "a list": b"[1, 2]\n",
    "an empty object": b"{}\n",
    "a string": json.dumps(ESCAPE).encode() + b"\n",
    "deep": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "a lone surrogate": b'{"step": 1, "purpose": "\\ud800"}\n',
    "NaN": b'{"step": NaN}\n',
    "a step alone": b'{"step": 1}\n',
}
LINKS = {"a link to a file outside": "outside/precious.txt", "a link to a device": "/dev/zero"}


def damages() -> Iterator[Case]:
    """Yield ways to damage the run "whole" below the folder of the test."""
    for file, programs in READERS.items():
        for program in programs.split():
            yield _damage(program, file, "gigabytes", _bomb)
            for what, content in CONTENTS.items():
                yield _damage(program, file, what, lambda path, c=content: _seal(path, c))
            for what in ("missing", "a folder", "a pipe", "a link to itself"):
                yield _damage(program, file, what, REPLACED[what])
            for what, target in LINKS.items():
                yield _damage(program, file, what, lambda path, t=target: _link(path, t))


def _damage(program: str, file: str, what: str, apply: Callable[[Path], object]) -> Case:
    def prepare(home: Path) -> None:
        path = home / "runs" / "whole" / file
        path.touch()
        apply(path)

    return Case(f"{program}: {file}: {what}", program, outcome=HARMLESS, prepare=prepare)


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(Path(target).absolute())


def _seal(path: Path, content: bytes) -> None:
    """Write a file, compressed if its name says so, and correct the checkpoint's manifest."""
    if path.suffix == ".zst":
        content = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    path.write_bytes(content)
    manifest = path.with_name("manifest.json")
    if manifest.exists() and path != manifest:
        saved = json.loads(manifest.read_text())
        saved["files"][path.name] = hashlib.sha256(content).hexdigest()
        manifest.write_text(json.dumps(saved))


def _bomb(path: Path) -> None:
    if path.suffix == ".zst":
        frame = zstandard.ZstdCompressor(level=3).compressobj()
        parts = [frame.compress(bytes(1 << 20)) for _ in range(600)]
        path.write_bytes(b"".join(parts) + frame.flush())
    else:  # a sparse file
        os.truncate(path, 3 << 30)

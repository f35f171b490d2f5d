"""Hostile models, datasets and tasks, which a user may give by mistake or get from a stranger.

The file is long because it is a list: one entry for each input.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile import ACCEPTED, ESCAPE, HARMLESS, REFUSED

from tasks.base import Problem
from tasks.interleave import Interleave

OPENING = "from tasks.base import Problem, Score, key_of\n"
MAKE = 'def make(self, level, split, rng): return Problem("t", level, "a b", "a b", key_of("a"))'
SCORE = "def score(self, problem, completions): return [Score(0.5) for _ in completions]"


@dataclass(frozen=True)
class Input:
    """An input of `train.py`: its flags, and `prepare`, which makes the files that they name."""

    name: str
    flags: tuple[str, ...]  # relative to the folder that `prepare` gets
    prepare: Callable[[Path], None]
    outcome: str = REFUSED


def inputs(model: Path) -> Iterator[Input]:
    """Yield all inputs; `model` is a directory that can be loaded."""
    yield from _models(model)
    yield from _datasets()
    yield from _tasks()
    yield from _texts()
    yield from _rows()


# --- rows and rewards ---------------------------------------------------------------------------

ROW = {"prompt": "a b", "answer": "b", "split": "train"}
ROWS = [ROW, {"prompt": "c d", "answer": "d", "split": "validation"}]
REWARD = "def reward(completion, answer): return float(completion == answer)"

# Files of rows, each with a mistake.
BAD_ROWS: dict[str, object] = {
    "nothing": b"",
    "not UTF-8": b"\xff\xfe{}",
    "a list": b"[1]\n",
    "cut": b'{"prompt": "a',
    "deep": b"[" * 100_000,
    "no prompt": [{"answer": "b"}],
    "an empty prompt": [{**ROW, "prompt": ""}],
    "a number for a prompt": [{**ROW, "prompt": 3}],
    "a lone surrogate": [{**ROW, "prompt": "\ud800"}],
    "a lone surrogate in another column": [{**ROW, "hint": "\udfff"}],
    "no turn": [{**ROW, "prompt": []}],
    "a turn of nobody": [{**ROW, "prompt": [{"role": ESCAPE, "content": "a"}]}],
    "a turn without text": [{**ROW, "prompt": [{"role": "user", "content": 3}]}],
    "the last word is the model's": [{**ROW, "prompt": [{"role": "assistant", "content": "a"}]}],
    "a split of its own": [{**ROW, "split": ESCAPE}],
    "a level of its own": [{**ROW, "level": "hard"}],
    "a level that is true": [{**ROW, "level": True}],
    "no training split": [{**ROW, "split": "test"}],
    "no answer": [{"prompt": "a b", "split": "train"}],
}

# Files with a reward function, each with a mistake.
BAD_REWARDS = {
    "no function": "x = 1",
    "no Python": "def reward(:",
    "raises": "def reward(completion): raise ValueError('\\x1b[31m')",
    "exits": "def reward(completion): raise SystemExit(0)",
    "raises while loading": "raise RuntimeError('no')",
    "exits while loading": "raise SystemExit(0)",
    "a text": "def reward(completion): return 'good'",
    "nothing": "def reward(completion): pass",
    "no number": "def reward(completion): return float('nan')",
    "an empty mapping": "def reward(completion): return {}",
    "too high": "def reward(completion): return 2.0",
    "too few": "def reward(completions): return []",
    "a component of escapes": "def reward(completion): return {'\\x1b[31m': 'x'}",
    "wants what is not there": "def reward(completion, solution): return 1.0",
    "wants nothing": "def reward(): return 1.0",
    "never returns": "import time\ndef reward(completion): time.sleep(3600)",
    "a class": "class reward: pass",
}

BAD_ROW_FLAGS = (
    ("--columns", "prompt"),
    ("--columns", "prompt=nothing"),
    ("--columns", f"prompt={ESCAPE}"),
    ("--reward-range", "1,0"),
    ("--reward-range", "nan,1"),
    ("--reward-range", "x"),
    ("--reward-weights", "nothing=1"),
    ("--reward-weights", "reward=inf"),
    ("--reward-timeout", "-1"),
    ("--reward-workers", "0"),
    ("--reward-workers", "x"),
    ("--reward-workers", "processes:0"),
    ("--data", "/dev/zero"),
    ("--data", "nowhere.parquet"),
    ("--data", "rows.jsonl/x"),
    ("--reward-file", "own.py"),
    ("--reward-file", f"{ESCAPE}.py:f"),
    ("--task", "interleave"),
)


def _rows() -> Iterator[Input]:
    def case(name: str, data: object, reward: str = REWARD, *flags: str, outcome=REFUSED) -> Input:
        def prepare(home: Path) -> None:
            lines = data if isinstance(data, bytes) else _lines(data)
            (home / "rows.jsonl").write_bytes(lines)
            (home / "own.py").write_text(reward + "\n")

        named = ("--words", "1", "--data", "rows.jsonl", "--reward-file", "own.py:reward")
        return Input(f"rows: {name}", (*named, *flags), prepare, outcome)

    yield case("whole", ROWS, outcome=ACCEPTED)
    for name, data in BAD_ROWS.items():
        yield case(name, data)
    for name, reward in BAD_REWARDS.items():
        flags = ("--reward-timeout", "0.2") if name == "never returns" else ()
        yield case(f"reward: {name}", ROWS, reward, *flags)
    for flags in BAD_ROW_FLAGS:
        yield case(f"{flags[0]} {flags[1]!r}", ROWS, REWARD, *flags)


def _lines(rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()  # type: ignore[attr-defined]


# --- models -----------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"num_attention_heads": 0},
    {"hidden_size": 0},
    {"hidden_size": -1},
    {"hidden_size": 7},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**6},
    {"vocab_size": 1},
    {"vocab_size": 10**12},
    {"intermediate_size": 0},
    {"head_dim": 3},
    {"rope_theta": "x"},
    {"rms_norm_eps": None},
    {"model_type": "bert"},
    {"model_type": "t5"},
    {"model_type": "nonsense"},
    {"model_type": ESCAPE},
    {"architectures": ["Nonsense"]},
    {"eos_token_id": 10**9},
    {"eos_token_id": "x"},
    {"torch_dtype": "nonsense"},
    {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"},
]
FINE_CONFIGS = (
    {"architectures": ["Nonsense"]},
    {"eos_token_id": 10**9},
    {"rope_theta": "x"},
    {"torch_dtype": "nonsense"},
)
TEMPLATES = [
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{% for %}",
    "{{ messages[7].content }}",
    "{{ messages.__class__.__mro__ }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "no messages at all",
    "",
    ESCAPE + "{{ messages[0].content }}",
]


def _models(model: Path) -> Iterator[Input]:
    def case(name: str, change: Callable[[Path], None], outcome: str = REFUSED) -> Input:
        def prepare(home: Path) -> None:
            shutil.copytree(model, home / "model")
            change(home / "model")

        return Input(f"model: {name}", ("--model", "model"), prepare, outcome)

    yield case("whole", lambda model: None, ACCEPTED)
    for values in CONFIGS:
        outcome = HARMLESS if values in FINE_CONFIGS else REFUSED
        yield case(f"config.json {values}"[:80], _config(values), outcome)
    for number, template in enumerate(TEMPLATES):
        yield case(f"chat template {number}", _template(template), HARMLESS)

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        for what, change in _FILES.items():
            is_fine = (name, what) == ("tokenizer_config.json", "missing")
            yield case(f"{name} {what}", _file(name, change), HARMLESS if is_fine else REFUSED)
    yield case("weights by pickle alone", _pickle)
    yield case("tokenizer without words", _tokenizer(lambda vocab: {}))
    yield case(
        "tokenizer beyond the model",
        _tokenizer(lambda vocab: {word: number + 10**6 for word, number in vocab.items()}),
    )


_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: path.write_text("[1]"),
    "HTML": lambda path: path.write_text("<!doctype html>"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "gigabytes": lambda path: os.truncate(path, 5 << 30),
}


def _file(name: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda model: change(model / name) and None


def _config(values: dict[str, Any]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _template(text: str) -> Callable[[Path], None]:
    return lambda model: (model / "chat_template.jinja").write_text(text) and None


def _tokenizer(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        path = model / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"]["vocab"] = change(content["model"]["vocab"])
        path.write_text(json.dumps(content))

    return apply


def _pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


# --- datasets ---------------------------------------------------------------------------------

PROBLEM: dict[str, Any] = {
    "task": "interleave",
    "level": 2,
    "prompt": "A: a b\nB: c d",
    "target": "a c b d",
    "key": "",
    "data": {"a": ["a", "b"], "b": ["c", "d"]},
}
PROBLEM["key"] = Interleave().key(Problem(**PROBLEM))


def _datasets() -> Iterator[Input]:
    def case(name: str, lines: list[Any], outcome: str = REFUSED) -> Input:
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        return Input(
            f"dataset: {name}",
            ("--dataset", "problems.jsonl"),
            lambda home: (home / "problems.jsonl").write_text(text) and None,
            outcome,
        )

    yield case("whole", [PROBLEM], ACCEPTED)
    for key in PROBLEM:
        yield case(f"without {key}", [{k: v for k, v in PROBLEM.items() if k != key}])
        for value in (None, 1.5, "", ESCAPE, [], {}, -1, 10**30, "\ud800", [[]], {"a": 1}, True):
            is_fine = key in ("task", "prompt", "target") and value in ("", ESCAPE)
            outcome = HARMLESS if is_fine else REFUSED
            yield case(f"{key} = {value!r}"[:60], [{**PROBLEM, key: value}], outcome)
    for value in (None, "x", 1, [], [1], ["a"], [["a"]], {"a": 1}, ["\ud800"], ["a b", ""], "a b"):
        yield case(f"data.a = {value!r}", [{**PROBLEM, "data": {**PROBLEM["data"], "a": value}}])
    yield case("another task's", [{**PROBLEM, "task": "arithmetic"}], HARMLESS)
    yield case("a further key", [{**PROBLEM, "more": 1}])
    yield case("no JSON", ["a,b,c\n"])
    yield case("a list", [[1]])
    yield case("deep", ["[" * 200_000 + "\n"])
    yield case("a long number", ['{"level": ' + "9" * 10_000 + "}\n"])
    yield case("null bytes", ["\0\0\0\n"])
    yield case("blank lines", ["\n\n\n"])


# --- tasks ------------------------------------------------------------------------------------

# The body of a class T: one line each.
NAME = "name = 't'"
WHOLE = (NAME, MAKE, SCORE)
TASKS = {
    "needs arguments": (*WHOLE, "def __init__(self, a): pass"),
    "init raises": (*WHOLE, "def __init__(self): 1 / 0"),
    "no name": (MAKE, SCORE),
    "name is a number": ("name = 3", MAKE, SCORE),
    "name is empty": ("name = ''", MAKE, SCORE),
    "name with escapes": (f"name = {ESCAPE!r}", MAKE, SCORE),
    "no make": (NAME, SCORE),
    "make is no function": (NAME, "make = 3", SCORE),
    "no score": (NAME, MAKE),
    "make takes too few": (NAME, "def make(self): pass", SCORE),
    "rewards is a number": (*WHOLE, "rewards = 3"),
    "options is a list": (*WHOLE, "options = [1]"),
    "levels raises": (*WHOLE, "def levels(self, level): 1 / 0"),
    "levels of words": (*WHOLE, "def levels(self, level): return 'x'"),
    "draft raises": (*WHOLE, "def draft(self, problem): 1 / 0"),
    "draft of none": (*WHOLE, "def draft(self, problem): return lambda text: None"),
    "budget of words": (*WHOLE, "def max_new_tokens(self, level): return 'x'"),
    "range of one": (*WHOLE, "reward_range = (1, 1)"),
    "default level of words": (*WHOLE, "default_level = 'x'"),
}
FILES = {
    "no Python": "def (",
    "null bytes": "\0",
    "a missing module": "import no_such_module",
    "raises": "raise RuntimeError('no')",
    "raises escapes": f"raise RuntimeError({ESCAPE!r})",
    "exits": "import sys; sys.exit(0)",
    "exits with words": "raise SystemExit('goodbye')",
    "recursion": "def f(): f()\nf()",
    "no class": "x = 1",
    "no type": "T = 1",
}
MADE = ["None", "3", "'x'", "{}", "1 / 0", "[]"] + [
    f"Problem({', '.join(values)})"
    for values in (
        ("'t'", "level", "None", "'a'", "'k'"),
        ("'t'", "level", "'a'", "3", "'k'"),
        ("'t'", "level", "'a'", "'a'", "None"),
        ("'t'", "level", "''", "''", "'k'"),
        ("'t'", "level", "'\\ud800'", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'\\ud800'", "'k'"),
        ("'t'", "'x'", "'a'", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'a'", "'k'", "3"),
        ("'t'", "level", "'a'", "'a'", "'k'", "{'x': object()}"),
        ("'t'", "level", "'a ' * 10 ** 6", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'a ' * 10 ** 6", "'k'"),
    )
]
SCORED = [
    "None",
    "3",
    "[]",
    "[Score(0.5)]",
    "[0.5 for _ in completions]",
    "['x' for _ in completions]",
    "1 / 0",
    "[Score(float('nan')) for _ in completions]",
    "[Score(7) for _ in completions]",
    "[Score('x') for _ in completions]",
    "[Score(None) for _ in completions]",
    "[Score(0.5, parts=3) for _ in completions]",
    "[Score(0.5, parts={'x': object()}) for _ in completions]",
    "[Score(0.5, parts={'x': float('nan')}) for _ in completions]",
    "[Score(0.5, value='x') for _ in completions]",
    "(_ for _ in ()).throw(KeyError('k'))",
    "__import__('sys').exit(0)",
]
FINE_TASKS = {
    "name with escapes",
    "Problem('t', level, '', '', 'k')",
    "[Score(0.5, parts={'x': float('nan')}) for _ in completions]",
}


def _tasks() -> Iterator[Input]:
    def case(name: str, source: str, outcome: str = REFUSED) -> Input:
        flags = ("--preflight", "only") if name.startswith("levels") else ()
        return Input(
            f"task: {name}",
            ("--task", "own.py:T", *flags),
            lambda home: (home / "own.py").write_text(OPENING + source) and None,
            outcome,
        )

    def of_class(name: str, *body: str) -> Input:
        source = "class T:\n" + "".join(f"    {line}\n" for line in body)
        return case(name, source, HARMLESS if name in FINE_TASKS else REFUSED)

    yield case("whole", "class T:\n" + "".join(f"    {line}\n" for line in WHOLE), ACCEPTED)
    for name, source in FILES.items():
        yield case(name, source)
    for name, body in TASKS.items():
        yield of_class(name, *body)
    for made in MADE:
        yield of_class(made, NAME, SCORE, f"def make(self, level, split, rng): return {made}")
    for scored in SCORED:
        yield of_class(
            scored, NAME, MAKE, f"def score(self, problem, completions): return {scored}"
        )


# --- texts ------------------------------------------------------------------------------------


def _texts() -> Iterator[Input]:
    contents: dict[str, bytes] = {
        "empty": b"",
        "one word": b"word",
        "not UTF-8": b"\xff\xfe" * 1000,
        "null bytes": bytes(10_000),
        "escapes": (ESCAPE + " ").encode() * 1000,
        "one long word": b"a" * 1_000_000,
        "white space": b" \n" * 100_000,
    }
    for name, content in contents.items():

        def prepare(home: Path, content: bytes = content) -> None:
            (home / "texts").mkdir()
            (home / "texts" / "one.txt").write_bytes(content)

        yield Input(f"texts: {name}", ("--texts", "texts"), prepare, HARMLESS)

    def gigabytes(home: Path) -> None:
        (home / "texts").mkdir()
        with open(home / "texts" / "one.txt", "wb") as file:
            file.truncate(3 << 30)

    def pipe(home: Path) -> None:
        (home / "texts").mkdir()
        os.mkfifo(home / "texts" / "one.txt")

    yield Input("texts: gigabytes", ("--texts", "texts"), gigabytes)
    yield Input("texts: a pipe", ("--texts", "texts"), pipe)
    yield Input("texts: no files", ("--texts", "texts"), lambda home: (home / "texts").mkdir())

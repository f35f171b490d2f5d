"""Hostile data: datasets of problems, rows with reward functions, and folders of texts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile import ACCEPTED, ESCAPE, HARMLESS, REFUSED, Input

from tasks.base import Problem
from tasks.interleave import Interleave

PROBLEM: dict[str, Any] = {
    "task": "interleave",
    "level": 2,
    "prompt": "A: a b\nB: c d",
    "target": "a c b d",
    "key": "",
    "data": {"a": ["a", "b"], "b": ["c", "d"]},
}
PROBLEM["key"] = Interleave().key(Problem(**PROBLEM))


def datasets() -> Iterator[Input]:
    """Yield files for --dataset."""

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
    ("--reward-workers", "processes:4"),
    ("--data", "/dev/zero"),
    ("--data", "nowhere.parquet"),
    ("--data", "rows.jsonl/x"),
    ("--reward-file", "own.py"),
    ("--reward-file", f"{ESCAPE}.py:f"),
    ("--task", "interleave"),
)


def rows() -> Iterator[Input]:
    """Yield files of rows and of reward functions, and flags that go with them."""

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


def texts() -> Iterator[Input]:
    """Yield folders for --texts."""
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

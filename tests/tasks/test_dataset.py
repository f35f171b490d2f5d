import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from tasks.base import Problem, key_of
from tasks.generate import main
from tasks.registry import load_task
from tasks.supply import (
    distinct_problems,
    problem_at,
    problem_stream,
    read_problems,
    split_of,
    write_problems,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
problems = st.builds(
    Problem,
    task=st.text(),
    level=st.integers(),
    prompt=st.text(),
    target=st.text(),
    key=st.text(min_size=1),
    data=st.dictionaries(st.text(), json_values, max_size=3),
)
GOOD = {"task": "t", "level": 1, "prompt": "p", "target": "a", "key": "k", "data": {}}

DIGITS = '''
from tasks.base import Problem, Score, key_of
from data.errors import UserError

class Digits:
    """Write a number of `level` digits: 10 ** level different problems, 500 digits at most."""
    name, rewards, default_level = "digits", (), 2

    def make(self, level, split, rng):
        if level > 500:
            raise UserError(f"no number has {level} digits")
        number = f"{rng.randrange(10 ** level):0{level}}"
        return Problem("digits", level, f"Write {number}", number, key_of(split, number))

    def score(self, problem, completions):
        return [Score(text == problem.target) for text in completions]
'''


@pytest.fixture
def task(tmp_path):
    (tmp_path / "digits.py").write_text(DIGITS)
    return f"{tmp_path / 'digits.py'}:Digits"


@pytest.fixture
def generate(task, tmp_path):
    return lambda *more: main(["--task", task, "--output-dir", str(tmp_path / "out"), *more])


# ---- problems on disk


@settings(max_examples=60, deadline=None)
@given(st.lists(problems, min_size=1, max_size=4))
def test_what_is_written_is_read(tmp_path_factory, problems):
    path = tmp_path_factory.getbasetemp() / "round-trip.jsonl"
    write_problems(path, problems)
    assert read_problems(path) == problems


def test_a_file_has_a_line_a_problem_in_plain_utf8(tmp_path):
    write_problems(
        tmp_path / "a.jsonl",
        [Problem("t", 1, "the ‘owl’\u2028", "é", "k", {"n": 1}), Problem(**GOOD)],
    )
    assert (tmp_path / "a.jsonl").read_bytes().decode() == (
        '{"task": "t", "level": 1, "prompt": "the ‘owl’\u2028", "target": "é", "key": "k", "data": '
        '{"n": 1}}\n'
        '{"task": "t", "level": 1, "prompt": "p", "target": "a", "key": "k", "data": {}}\n'
    )


@pytest.mark.parametrize(
    "line, fault",
    [
        ("{", "is not JSON"),
        ("[]", "is a list; each line must be a JSON object"),
        *[
            (
                json.dumps({k: v for k, v in GOOD.items() if k != name}),
                f"lacks field '{name}'; a problem has task, level,",
            )
            for name in GOOD
        ],
        (
            json.dumps(GOOD | {"reward": 1}),
            "unknown field 'reward'; a problem has task, level, prompt, target, key, data",
        ),
        *[(json.dumps(GOOD | {name: None}), f"{name} is None; it must be a") for name in GOOD],
        (json.dumps(GOOD | {"level": "1"}), "level is '1'; it must be a whole number"),
        (json.dumps(GOOD | {"level": 1.0}), "level is 1.0; it must be a whole number"),
        (json.dumps(GOOD | {"level": True}), "level is True; it must be a whole number"),
        (json.dumps(GOOD | {"data": []}), "data is []; it must be a mapping"),
    ],
)
def test_a_damaged_line_is_named_by_number(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n")
    with pytest.raises(UserError) as error:
        read_problems(path)
    assert str(error.value).startswith(f"{path}, line 3: {fault}")


def test_a_problem_of_another_task_of_the_project_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    problem = problem_at(load_task("arithmetic"), seed=0, split="train", level=2, index=0)
    write_problems(path, [problem])
    assert read_problems(path, load_task("arithmetic")) == [problem]
    with pytest.raises(UserError, match="line 1: is a problem of task arithmetic, not of inter"):
        read_problems(path, load_task("interleave"))

    own = dataclasses.replace(problem, task="my own")  # who knows what that is
    write_problems(path, [own])
    assert read_problems(path, load_task("interleave")) == [own]


def test_a_file_without_problems_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="a.jsonl: holds no problem"):
        read_problems(tmp_path / "a.jsonl")


# ---- tasks.generate


def test_generate_writes_a_file_for_each_level(generate, tmp_path):
    assert generate("--levels", "2, 3", "--split", "test", "--size", "20", "--seed", "7") == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["digits-test-2.jsonl", "digits-test-3.jsonl"]
    for level, path in zip((2, 3), files):
        found = read_problems(path)
        assert len(found) == len({problem.key for problem in found}) == 20
        assert {(problem.task, problem.level) for problem in found} == {("digits", level)}
        assert found[0].key == key_of("test", found[0].target)
        assert split_of(path) == "test"
    assert split_of(Path("my-test.jsonl")) == "" == split_of(Path("a-dev-3.jsonl"))


def test_a_level_that_cannot_be_supplied_leaves_the_files_before_it(generate, tmp_path, capsys):
    assert generate("--levels", "2,501,3", "--size", "1") == 2
    assert capsys.readouterr().err == "tasks.generate: no number has 501 digits\n"
    assert generate("--levels", "3,1", "--size", "11") == 2
    assert capsys.readouterr().err == (
        "tasks.generate: level 1 of task digits, train: only 10 different problems found, and 11 "
        "are asked for; ask for 10 or less\n"
    )
    assert len(read_problems(tmp_path / "out" / "digits-train-3.jsonl")) == 11
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_all_problems_that_exist_are_found_once_in_stream_order():
    space = {}
    exec(DIGITS, space)
    digits = space["Digits"]()
    for seed in range(20):
        found = distinct_problems(digits, seed=seed, split="train", level=1, size=10)
        stream = problem_stream(digits, seed=seed, split="train", level=1)
        order = list(dict.fromkeys(next(stream).target for _ in range(200)))
        assert [problem.target for problem in found] == order and sorted(order) == list(
            "0123456789"
        )


@pytest.mark.parametrize(
    "flags, fault",
    [
        (
            ["--levels", "10,x"],
            "--levels 10,x: give whole numbers above 0 with commas between them, e.g. 10,25,50",
        ),
        (["--levels", "0"], "--levels 0: give whole numbers above 0"),
        (["--levels", ""], "--levels : give whole numbers above 0"),
        (["--size", "0"], "--size 0: must be at least 1"),
        (["--task", "juggle"], "--task juggle: no such task"),
    ],
)
def test_a_wrong_flag_is_named(generate, tmp_path, capsys, flags, fault):
    assert generate(*flags) == 2
    assert capsys.readouterr().err.startswith(f"tasks.generate: {fault}")
    assert not (tmp_path / "out").exists()

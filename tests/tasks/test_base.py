import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo.data.corpus import documents_of, load_corpus
from grpo.data.errors import UserError
from grpo.tasks.base import (
    SPLITS,
    Problem,
    TaskError,
    asked,
    check_problem,
    family_size,
    key_of,
    problems_of,
    scores_of,
    sources_of,
    worded,
)
from grpo.tasks.registry import (
    check_wording,
    load_task,
    programs_in,
    require_trusted,
    split_options,
)
from grpo.tasks.supply import problem_at, problem_stream

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "every_second.py"
INTERLEAVE = load_task("interleave")
SIMILARITY = load_task("interleave", "similarity")


@dataclass
class Dice:
    """A task whose problems are nothing but the generator that `problem_at` hands over."""

    name: str = "dice"

    def make(self, level, split, rng):
        return Problem(self.name, level, "Throw.", "", key_of(rng.getrandbits(64)))


def test_a_problem_of_another_level_is_refused():
    task = Dice()
    make = task.make
    task.make = lambda level, split, rng: make(level + 1, split, rng)
    with pytest.raises(UserError, match="make\\(2, 'train', rng\\) returned a problem of level 3"):
        problem_at(task, seed=0, split="train", level=2, index=0)


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.sampled_from(SPLITS), st.integers(1, 30), st.integers(0, 10**6))
def test_a_problem_is_a_pure_function(seed, split, level, index):
    def problem(task):
        return problem_at(task, seed=seed, split=split, level=level, index=index)

    one = problem(INTERLEAVE)
    random.random()
    assert problem(INTERLEAVE) == one == problem(SIMILARITY)  # nor does the pay matter


def test_each_argument_and_the_name_make_another_problem():
    # seed 1 at level 11 and seed 11 at level 1 among them; of 2 * 6,084 draws of 64 bits two agree
    # with p < 1e-11
    places = list(product(range(13), SPLITS, range(1, 13), range(13)))
    keys = {
        problem_at(Dice(name), seed=seed, split=split, level=level, index=index).key
        for name in ("dice", "die")
        for seed, split, level, index in places
    }
    assert len(keys) == 2 * len(places)


def test_the_stream_is_the_sequence_of_problems():
    stream = problem_stream(INTERLEAVE, seed=1, split="train", level=4)
    assert [next(stream) for _ in range(2)] == [
        problem_at(INTERLEAVE, seed=1, split="train", level=4, index=index) for index in (0, 1)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_windows_come_from_two_documents_of_the_split_and_stand_in_no_other(split):
    corpus = load_corpus()
    texts = {
        each: [f" {' '.join(document.words)} " for document in documents_of(each, corpus)]
        for each in SPLITS
    }
    for index in range(60):
        problem = problem_at(INTERLEAVE, seed=0, split=split, level=12, index=index)
        windows = [f" {' '.join(problem.data[side])} " for side in "ab"]
        homes = [
            {(each, i) for each in SPLITS for i, text in enumerate(texts[each]) if window in text}
            for window in windows
        ]
        assert [len(home) for home in homes] == [1, 1] and homes[0] != homes[1]
        assert {each for home in homes for each, _ in home} == {split}


def test_keys_tell_where_a_part_ends():
    assert key_of("a b", "c") != key_of("a", "b c")
    assert INTERLEAVE.problem(["a", "b"], ["c"]).key != INTERLEAVE.problem(["a"], ["b", "c"]).key
    assert INTERLEAVE.problem(["a"], ["b"]).key != INTERLEAVE.problem(["b"], ["a"]).key


def test_a_users_own_task():
    task = load_task(f"{EXAMPLE}:EverySecond")
    problem = problem_at(task, seed=0, split="train", level=5, index=0)
    words = problem.prompt.removeprefix(
        "Write the first word of A, then every second word.\nA: "
    ).split()
    assert problem.target.split() == words[::2] and len(words) == 5
    # all right; one word too many: 3 of 4; the first two right: 2 of 3; nothing
    scores = task.score(
        problem, [problem.target, problem.target + " owl", " ".join(words[:3:2]), ""]
    )
    assert [score.reward for score in scores] == [1, 3 / 4, 2 / 3, 0]
    assert [score.exact for score in scores] == [True, False, False, False]
    assert [score.value for score in scores] == [
        score.reward for score in scores
    ]  # the task makes no difference


def test_the_documentation_shows_that_task():
    page = EXAMPLE.parent.parent.parent / "docs" / "data-and-tasks.md"
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```" in page.read_text(
        encoding="utf-8"
    )


def test_a_users_file_may_hold_a_dataclass_with_postponed_annotations(tmp_path):
    file = tmp_path / "random.py"  # and may be called like a module of the standard library
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Own:\n    name: str = 'own'\n    make = score = print\n"
    )
    assert load_task(f"{file}:Own").name == "own"
    import random as standard

    assert standard is random


NO_SUCH_TASK = (
    "no such task; give one of arithmetic, data, gsm8k, interleave, or path/to/file.py:ClassName"
)


@pytest.mark.parametrize(
    "spec, line",
    [
        ("juggling", NO_SUCH_TASK),
        ("", NO_SUCH_TASK),
        (str(EXAMPLE), NO_SUCH_TASK),
        ("nowhere.py:Task", "no file nowhere.py"),
        (f"{EXAMPLE}:Other", f"{EXAMPLE} defines no class Other"),
        (f"{EXAMPLE}:WORDS", f"{EXAMPLE} defines no class WORDS"),  # there, but no class
        (f"{EXAMPLE}:", f"{EXAMPLE} defines no class "),
    ],
)
def test_what_is_no_task(spec, line):
    assert refused(load_task, spec) == f"--task {spec}: {line}"


@pytest.mark.parametrize(
    "spec, known",
    [
        ("interleave", ", ".join(INTERLEAVE.rewards)),
        (f"{EXAMPLE}:EverySecond", "none: the task has one reward"),
    ],
)
def test_what_is_no_reward(spec, known):
    wanted = f"--reward money: task {spec} has no such reward; it has {known}"
    assert refused(load_task, spec, "money") == wanted


def test_the_programs_of_a_run_are_executed_only_if_they_are_named():
    own, reward = "own.py:Own", {"reward-file": "own.py:reward"}
    require_trusted({"task": "data"}, (), "runs/a")
    settings = {"task": own, "task_options": reward, "loss": "python:loss"}
    assert programs_in(settings) == {"task": own, "reward-file": "own.py:reward"}
    require_trusted(settings, ("./own.py:Own", "own.py:reward"), "runs/a")
    for spec, allowed, line in (
        (own, (), "its task is a program that would be executed, own.py:Own; if you trust it, "),
        ("data", (own,), "its reward is a program that would be executed, own.py:reward; if you "),
    ):
        with pytest.raises(UserError, match=f"^runs/a: {line}"):
            require_trusted({"task": spec, "task_options": reward}, allowed, "runs/a")


@pytest.mark.parametrize(
    "words, options, rest",
    [
        (["--family", "product", "--steps", "3"], {"family": "product"}, ["--steps", "3"]),
        (["--family=product", "--x"], {"family": "product"}, ["--x"]),
        (["family", "product"], {}, ["family", "product"]),
        ([], {}, []),
    ],
)
def test_a_tasks_own_flags(words, options, rest):
    assert split_options("arithmetic", words) == (options, rest)


def test_a_users_program_leaves_the_working_directory(tmp_path, monkeypatch):
    """The files of a run were scattered over two folders, and its verdict was an error."""
    monkeypatch.chdir(tmp_path)
    Path("leave.py").write_text(
        "import os, tempfile\nos.chdir('/')\n"
        "def leave(completion):\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        os.chdir(folder)\n"
        "    return 0.5\n"
    )
    Path("rows.jsonl").write_text('{"prompt": "Where?"}')
    task = load_task("data", options={"data": "rows.jsonl", "reward-file": "leave.py:leave"})
    assert Path.cwd() == tmp_path
    problem = next(one for split in SPLITS for one in task.problems(split))
    assert scores_of(task, problem, ["here"])[0].reward == 0.5 and Path.cwd() == tmp_path


def test_a_working_directory_need_not_be_readable(monkeypatch):
    def closed(*_):
        raise PermissionError

    monkeypatch.setattr("grpo.tasks.base.os.open", closed)
    assert asked(SimpleNamespace(name="own", find=lambda: 1), "find") == 1


def test_a_users_task_may_have_flags(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    name, make, score = 'own', print, print\n"
        "    options = {'colour': 'any'}\n\n"
        "    def __init__(self, colour='red'):\n"
        "        self.colour = colour\n"
    )
    spec = f"{file}:Own"
    assert split_options(spec, ["--colour", "blue"]) == ({"colour": "blue"}, [])
    assert load_task(spec, options={"colour": "blue"}).colour == "blue"
    assert load_task(spec).colour == "red"


WORDINGS = {
    "interleave": "Mix {{these}}:\n{b}\n{a}\n{a}",
    "arithmetic": "Compute {expression}, please.",
}


PLAIN = {name: load_task(name) for name in WORDINGS}
WORDED = {name: load_task(name, wording=wording) for name, wording in WORDINGS.items()}


@pytest.mark.parametrize("name", WORDINGS)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS), index=st.integers(0, 10**4))
def test_a_wording_changes_the_prompt_alone(name, seed, split, index):
    plain, own = PLAIN[name], WORDED[name]
    one, other = (
        problem_at(task, seed=seed, split=split, level=3, index=index) for task in (plain, own)
    )
    assert worded(own, one) == other and worded(plain, one) == one
    assert replace(other, prompt=one.prompt) == one and own.key(other) == one.key

    if name == "interleave":
        a, b = (" ".join(one.data[side]) for side in "ab")
        assert other.prompt == f"Mix {{these}}:\n{b}\n{a}\n{a}"
    else:
        assert other.prompt == f"Compute {one.data['expression']}, please."


def test_braces_in_the_texts_are_no_placeholders():
    task = load_task("interleave", wording="{b} / {a}")
    problem = worded(task, task.problem(["{b}", "}"], ["{a.__class__}", "{"]))
    assert problem.prompt == "{a.__class__} { / {b} }"


@pytest.mark.parametrize(
    ("wording", "fault"),
    [
        ("A: {a}", "its placeholders are ['a']; task interleave has the placeholders {a}, {b}"),
        ("{a} {b} {c}", "are ['a', 'b', 'c']"),
        ("{a} {b} {}", "are ['', 'a', 'b']"),
        ("{a} {b} {a.__class__}", "'a.__class__'"),
        ("{a:>99999999999} {b}", "'a:>99999999999'"),
        ("{a!r} {b}", "'a!r'"),
        ("{a} {b} {x\ny}", r"'x\ny'"),
        ("{a} {b} {", "a brace that is text is written twice"),
        ("{a} {b} }", "a brace that is text is written twice"),
    ],
)
def test_a_wording_that_does_not_suit_the_task_is_one_line(wording, fault):
    line = refused(check_wording, "interleave", wording)
    assert line.startswith("--wording: ") and fault in line


def test_a_task_without_placeholders_has_no_other_wording():
    spec = f"{EXAMPLE}:EverySecond"
    with pytest.raises(UserError, match="^--wording: .*:EverySecond has the placeholders none"):
        load_task(spec, wording="{words}")


# ---- what a task may have besides


def task(**members):
    return SimpleNamespace(name="own", **members)


def raises(*_):
    raise ValueError("lost")


def steps(own):
    return asked(own, "default_steps", 2, default=100)


NUMPYS = Problem("own", 1, "a", "b", "k", {"x": np.int64(1)})


@pytest.mark.parametrize(
    "ask, members, line",
    [
        (lambda t: problems_of(t, ""), {"problems": lambda split: [3]}, "that: is int, and must"),
        (lambda t: problems_of(t, ""), {"problems": raises}, "problems() raised ValueError: lost"),
        (lambda t: problems_of(t, ""), {"problems": lambda split: [NUMPYS]}, "not what JSON can"),
        (steps, {"default_steps": raises}, "default_steps() raised ValueError: lost"),
        (steps, {"default_steps": 3}, "default_steps() raised TypeError"),
    ],
)
def test_a_wrong_member_is_named_in_one_line(ask, members, line):
    said = refused(ask, task(**members))
    assert said.startswith("task own: ") and line in said


def test_a_task_without_them_is_a_task():
    assert problems_of(task(), "train") == [] and sources_of(task()) == {}
    assert family_size(task(), 1) is None
    assert steps(task()) == 100 and steps(task(default_steps=lambda _: np.int64(3))) == 3


@pytest.mark.parametrize(
    "messages", [3, "ab", [3], [{"role": "user"}], [{"role": 1, "content": ""}]]
)
def test_the_turns_of_a_conversation_are_checked(messages):
    problem = Problem("own", 1, "p", "", "k", {"messages": messages})
    with pytest.raises(TaskError, match="row 3: its data, or the turns of its messages, are not"):
        check_problem(problem, "row 3")

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import documents_of, load_corpus
from tasks.base import UserError, load_task, problem_at, problem_stream, unseen

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reverse.py"
INTERLEAVE = load_task("interleave")


@given(st.integers(0, 10**9), st.sampled_from(["train", "validation", "test"]), st.integers(0, 10**6))
def test_a_problem_is_a_pure_function(seed, split, index):
    make = lambda: problem_at(INTERLEAVE, seed=seed, split=split, level=5, index=index)  # noqa: E731
    random.seed(index)
    one = make()
    random.random()
    assert make() == one


def test_neighbouring_seeds_have_nothing_in_common():
    # about 75 * 1,000 windows squared: two of 2 * 300 problems agree with a probability below 1e-4
    keys = [{problem_at(INTERLEAVE, seed=seed, split="train", level=5, index=i).key for i in range(300)} for seed in (7, 8)]
    assert len(keys[0]) == 300 and not keys[0] & keys[1]


def test_the_stream_is_the_sequence_of_problems():
    stream = problem_stream(INTERLEAVE, seed=1, split="train", level=4, start=3)
    assert [next(stream).key for _ in range(2)] == [
        problem_at(INTERLEAVE, seed=1, split="train", level=4, index=i).key for i in (3, 4)]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_windows_come_from_two_documents_of_the_split(split):
    texts = [f" {' '.join(document.words)} " for document in documents_of(split, load_corpus())]
    for index in range(30):
        problem = problem_at(INTERLEAVE, seed=0, split=split, level=12, index=index)
        homes = [{i for i, text in enumerate(texts) if f" {' '.join(problem.data[side])} " in text} for side in "ab"]
        assert homes[0] and homes[1] and homes[0] != homes[1]


def test_unseen():
    problems = [problem_at(INTERLEAVE, seed=0, split="test", level=3, index=i) for i in range(4)]
    assert unseen(problems, {problems[1].key}) == ([problems[0], problems[2], problems[3]], 1)


def test_a_users_own_task():
    task = load_task(f"{EXAMPLE}:Reverse")
    problem = problem_at(task, seed=0, split="train", level=3, index=0)
    right = problem.target
    scores = task.score(problem, [right, right + " owl", ""])
    assert [score.exact for score in scores] == [True, False, False]
    assert [score.reward for score in scores] == [1.0, 0.75, 0.0]
    assert scores[0].value == 1.0  # the reward itself, where the task makes no difference


def test_the_readme_shows_that_task():
    readme = (EXAMPLE.parent.parent.parent / "README.md").read_text()
    assert EXAMPLE.read_text().strip() in readme


@pytest.mark.parametrize("spec, line", [
    ("juggling", "--task juggling: no such task; give one of interleave, or path/to/file.py:ClassName"),
    ("nowhere.py:Task", "--task nowhere.py:Task: no file nowhere.py"),
    (f"{EXAMPLE}:Other", f"--task {EXAMPLE}:Other: {EXAMPLE} defines no class Other"),
])
def test_what_is_no_task(spec, line):
    with pytest.raises(UserError) as error:
        load_task(spec)
    assert str(error.value) == line


def test_what_is_no_reward():
    with pytest.raises(UserError, match="--reward money: task interleave has no such reward; it has "):
        load_task("interleave", "money")
    with pytest.raises(UserError, match="it has none: the task has one reward"):
        load_task(f"{EXAMPLE}:Reverse", "money")

import json
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo.data.errors import UserError
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.base import Problem, key_of, split_of_key
from grpo.tasks.registry import load_task
from grpo.tasks.rows import Rows
from grpo.tasks.supply import (
    Supply,
    epoch_order,
    examples_of,
    first_distinct,
    patience,
    problem_at,
    problem_stream,
    read_problems,
    training_set,
    write_problems,
)

TASK = Arithmetic("product")
seeds, indices = st.integers(0, 10**6), st.integers(0, 10**5)


@given(seeds, indices)
def test_fresh_is_the_stream(seed, index):
    assert Supply(TASK, seed=seed).at(index, 22) == problem_at(
        TASK, seed=seed, split="train", level=22, index=index
    )


@given(seeds, st.integers(1, 30), st.integers(0, 50))
def test_an_epoch_holds_each_problem_once(seed, size, epoch):
    """A resumed run draws the same problems as an uninterrupted one."""
    keys = list(map(str, range(size)))
    straight, resumed = (Supply(TASK, seed=seed, dataset=problems(*keys)) for _ in range(2))
    indices = range(epoch * size, (epoch + 1) * size)
    drawn = [straight.at(index, 1).key for index in indices]
    assert sorted(drawn) == sorted(keys)
    assert size < 10 or drawn != keys  # shuffled: one order of ten is that of the set in 3 million
    assert [resumed.at(index, 1).key for index in indices[size // 2 :]] == drawn[size // 2 :]


def test_an_epoch_is_shuffled_once_although_levels_alternate():
    epoch_order.cache_clear()
    problems = [problem_at(TASK, seed=0, split="train", level=22, index=i) for i in range(9)]
    dataset = problems[:5] + [replace(problem, level=30) for problem in problems[5:]]
    supply = Supply(TASK, seed=0, dataset=dataset)
    for index in range(4):
        supply.at(index, 22), supply.at(index, 30)
    assert epoch_order.cache_info().misses == 2


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(seed, epoch, 30)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400  # of 30! orders


def test_a_mixed_dataset_is_shuffled_each_epoch_and_has_its_own_levels():
    problems = [Problem("any", i, "p", "x", str(i)) for i in range(12)]
    supply = Supply(TASK, seed=0, dataset=problems, mixed=True)
    epochs = [[supply.at(i, 99) for i in range(12 * epoch, 12 * epoch + 12)] for epoch in range(3)]
    assert all(Counter(p.key for p in epoch) == Counter(map(str, range(12))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != problems


def test_a_level_of_a_dataset_has_the_problems_of_that_level():
    problems = [Problem("any", 10 + i % 3, "p", "x", str(i)) for i in range(12)]
    supply = Supply(TASK, seed=0, dataset=problems)
    for level in (10, 11, 12):
        epoch = [supply.at(i, level).key for i in range(4)]
        assert sorted(epoch) == sorted(str(i) for i in range(12) if 10 + i % 3 == level)


def problems(*keys):
    return [Problem("any", 1, "p", "x", str(key)) for key in keys]


def keys_of(found):
    return [problem.key for problem in found.problems]


def test_seen_problems_are_passed_over_and_counted():
    stream = problems(*range(20))
    found = first_distinct(stream, 5, {"1", "3", "9"})
    assert keys_of(found) == ["0", "2", "4", "5", "6"]
    assert (found.dropped, found.asked, found.error) == (2, 5, "")
    assert first_distinct(iter(stream), 5).problems == stream[:5]
    endless = (problem for n in count() for problem in problems(n))
    assert first_distinct(endless, 5, set("0123")).dropped == 4


def test_a_problem_is_held_out_once_however_often_it_is_drawn():
    found = first_distinct(problems(7, 7, 1, 7, 2, 1, 3, 9, 9), 3, {"1"})
    assert keys_of(found) == ["7", "2", "3"] and found.dropped == 1


@pytest.mark.parametrize("seen", [set(), {"0"}, {"0", "1", "2"}])
def test_the_search_in_an_endless_stream_ends_after_fruitless_draws(seen):
    drawn = []

    def stream():
        for n in count():
            drawn.append(n)
            yield from problems(n % 3)

    found = first_distinct(stream(), 200, seen, fruitless=50)
    assert len(found.problems) + found.dropped == 3 and found.dropped == len(seen)
    assert len(drawn) <= 53


def test_the_search_is_as_long_as_there_can_be_problems():
    assert patience(200) == 2000
    assert patience(200, family=36) == 360
    assert patience(200, family=10**6) == 2000
    assert patience(1) == patience(200, family=1) == 100  # too few draws would miss some by chance


def test_a_supply_that_fails_keeps_what_was_found():
    def stream():
        yield from problems(1, 2)
        raise UserError("the split has no more")

    found = first_distinct(stream(), 5, {"1"})
    assert keys_of(found) == ["2"] and found.error == "the split has no more"
    assert first_distinct(stream(), 5, {"1", "2"}).why_none == "the split has no more"


@pytest.mark.parametrize("seed", range(5))
def test_all_held_out_products_of_single_digits_are_found(seed):
    """36 products of single digits: whatever the seed, the same ones are held out."""
    every = {"validation": set(), "test": set()}
    for x in range(2, 10):
        for y in range(x, 10):
            key = key_of("arithmetic", f"{x} * {y}")
            every.get(split_of_key(key), set()).add(key)

    for split, expected in every.items():
        stream = problem_stream(TASK, seed=seed, split=split, level=11)
        found = first_distinct(stream, 200, fruitless=patience(200, family=36))
        assert set(keys_of(found)) == expected and 0 < len(found.problems) == len(expected)


@given(seeds, indices, st.sampled_from(["train", "validation", "test"]), st.integers(1, 5))
def test_examples_are_a_pure_function_of_seed_and_key(seed, index, split, size):
    problem = problem_at(TASK, seed=7, split=split, level=22, index=index)
    other = problem_at(TASK, seed=7, split=split, level=22, index=index + 1)
    found = examples_of(TASK, 22, problem.key, seed=seed, count=size)
    examples_of(TASK, 22, other.key, seed=seed, count=size)
    assert found == examples_of(TASK, 22, problem.key, seed=seed, count=size)

    keys = [example.key for example in found]
    assert len(set(keys)) == size and problem.key not in keys
    assert {split_of_key(key) for key in keys} == {"train"}
    assert {example.level for example in found} == {22}


def test_a_problem_is_never_its_own_example():
    """Of a family of 36 some 28 are of the training split: with 10 examples the problem itself
    would come by chance.
    """
    for index in range(40):
        problem = problem_at(TASK, seed=7, split="train", level=11, index=index)
        keys = [example.key for example in examples_of(TASK, 11, problem.key, seed=0, count=10)]
        assert problem.key not in keys and len(set(keys)) == 10


def test_too_few_examples_are_one_line():
    problem = problem_at(TASK, seed=7, split="test", level=11, index=0)
    there = {problem_at(TASK, seed=0, split="train", level=11, index=i).key for i in range(500)}
    assert refused(examples_of, TASK, 11, problem.key, seed=0, count=50) == (
        f"--shots 50: level 11 of task arithmetic, train: only {len(there)} different problems "
        f"found, and 50 are asked for; ask for {len(there)} or less"
    )
    with pytest.raises(UserError, match="^--shots 2: --level 7: products need digits"):
        examples_of(TASK, 7, "k", seed=0, count=2)


def test_problems_without_an_answer_make_no_examples():
    data = [{"prompt": text, "split": "train"} for text in "abc"]
    task = Rows(data, reward_functions=[lambda completion: 1.0])
    with pytest.raises(UserError, match="^--shots 2: .*row [23] has no target to show"):
        examples_of(task, 1, task.problems("train")[0].key, seed=0, count=2)


# ---- problems in a file

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
made_problems = st.builds(
    Problem,
    task=st.text(),
    level=st.integers(1),
    prompt=st.text(),
    target=st.text(),
    key=st.text(min_size=1),
    data=st.dictionaries(st.text(), json_values, max_size=3),
)
GOOD = {"task": "t", "level": 1, "prompt": "p", "target": "a", "key": "k", "data": {}}


@settings(max_examples=60)
@given(st.lists(made_problems, min_size=1, max_size=4))
def test_what_is_written_is_read(tmp_path_factory, problems):
    path = tmp_path_factory.getbasetemp() / "round-trip.jsonl"
    write_problems(path, problems)
    assert read_problems(path) == problems


@pytest.mark.parametrize(
    "line, fault",
    [
        ("{", "is not JSON"),
        (
            json.dumps({k: v for k, v in GOOD.items() if k != "level"}),
            "is no problem; a problem has task, level,",
        ),
        (json.dumps(GOOD | {"reward": 1}), "is no problem; a problem has task, level,"),
        *[
            (json.dumps(GOOD | {name: None}), f"{name} is None; it must be of type")
            for name in GOOD
        ],
        (json.dumps(GOOD | {"level": "1"}), "level is '1'; it must be of type int"),
        (json.dumps(GOOD | {"level": 1.0}), "level is 1.0; it must be of type int"),
        (json.dumps(GOOD | {"level": True}), "level is True; it must be of type int"),
        (json.dumps(GOOD | {"level": 0}), "level is 0; it must be 1 or more"),
        (json.dumps(GOOD | {"data": []}), "data is []; it must be of type Mapping"),
    ],
)
def test_a_damaged_line_is_named_by_number(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n")
    assert refused(read_problems, path).startswith(f"{path}, line 3: {fault}")


def test_a_file_without_problems_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="a.jsonl: holds no problem"):
        read_problems(tmp_path / "a.jsonl")


def test_a_problem_of_another_task_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD))
    said = refused(read_problems, path, load_task("interleave"))
    assert said.startswith(f"{path}, line 1: its task is 't'; give problems of task interleave")


def test_a_fixed_set_is_trained_on_in_the_wording_that_was_given():
    made = Problem("t", 1, "Say no", "no", "k", {"word": "no"})
    task = SimpleNamespace(
        name="t",
        placeholders={"word": lambda data: data["word"]},
        problems=lambda split: [made] * (split == "train"),
    )
    supply = Supply(task, seed=0, dataset=training_set(None, task))
    for word in ("Write", "Say it:"):  # as where the pre-flight tries several
        task.wording = f"{word} {{word}}"
        found = supply.at(0, 1), *supply.sample(1, 0)
        assert found == (replace(made, prompt=f"{word} no"),) * 2


@pytest.mark.parametrize(
    "name, fault",
    [
        ("a-test-3", "^--dataset out/a-test-3.jsonl: its problems are of the test split, which"),
        ("my-test", "^out/my-test.jsonl: cannot be read"),
    ],
)
def test_the_split_of_a_data_set_is_in_its_name(name, fault):
    with pytest.raises(UserError, match=fault):
        training_set(f"out/{name}.jsonl", load_task("interleave"))


def test_a_problem_whose_key_or_data_is_not_its_own_is_refused(tmp_path):
    task = load_task("interleave")
    made = problem_at(task, seed=0, split="train", level=2, index=0)
    for changed, words in [
        (replace(made, key="0" * 16), "and its data has " + made.key),
        (replace(made, data={}), "its data is not that of task interleave: key()"),
    ]:
        write_problems(tmp_path / "set.jsonl", [made, changed])
        line = refused(read_problems, tmp_path / "set.jsonl", task)
        assert "line 2" in line and words in line

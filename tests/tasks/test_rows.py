"""A user's own data: rows, columns, splits; reward functions: calls, errors, time limits."""

import asyncio
import gzip
import json
import os
import random
import sys
import time
import unicodedata
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy
import pytest
import small_rewards
import torch
import zstandard
from refusals import refused
from small_rewards import problem, scores

from grpo.data.errors import UserError
from grpo.data.rows import read_rows
from grpo.records import row_of
from grpo.tasks.base import (
    ABSTAINED,
    SPLITS,
    Score,
    component_means,
    problems_of,
    range_of,
    scores_of,
    scores_of_groups,
)
from grpo.tasks.registry import explain, load_task, source_text
from grpo.tasks.rows import Rows, as_flags
from grpo.tasks.supply import problem_at, training_set

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(200)]


def right(completion, answer):
    return float(completion == answer)


def rows(data=ROWS, reward=right, **options):
    return Rows(data, reward_functions=[reward], **options)


def test_each_row_is_a_problem_of_one_split():
    task = rows()
    found = {split: task.problems(split) for split in SPLITS}
    prompts = [one.prompt for part in found.values() for one in part]
    assert sorted(prompts) == sorted(row["prompt"] for row in ROWS)
    assert len(found["train"]) > 130 and all(len(found[split]) > 8 for split in SPLITS)
    assert problems_of(task, "train") == found["train"]

    drawn = {problem_at(task, seed=0, split="test", level=1, index=i).key for i in range(300)}
    assert drawn == {one.key for one in found["test"]}
    assert task.family_size(1) == 200
    assert task.notes == []


def test_the_row_decides_the_split_if_it_names_one():
    data = [row | {"split": SPLITS[n % 3], "level": n % 2 + 1} for n, row in enumerate(ROWS)]
    task = rows(data)
    assert [len(task.problems(split)) for split in SPLITS] == [67, 67, 66]
    assert {one.level for one in task.problems("train")} == {1, 2}
    assert problem_at(task, seed=0, split="test", level=2, index=0).level == 2


def test_the_reward_gets_the_columns_of_the_row():
    got = []

    def reward(prompt, completion, answer, **row):
        got.append((prompt, completion, answer, row))
        return 0.5

    data = [{"question": "Q?", "solution": "A!", "hint": [1, None], "split": "train"}]
    task = rows(data, reward, columns="prompt=question,answer=solution")
    (problem,) = task.problems("train")
    (score,) = scores_of(task, problem, ["text"])
    assert got == [("Q?", "text", "A!", {"hint": [1, None]})]
    assert score.reward == 0.5 and not score.exact


def test_a_conversation_keeps_its_turns():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]
    task = rows([{"messages": turns, "answer": "x", "split": "train"}])
    (problem,) = task.problems("train")
    assert problem.prompt == "And now?"
    assert problem.turns == tuple((turn["role"], turn["content"]) for turn in turns)
    assert task.key(problem) == problem.key

    (single,) = rows([{"prompt": [turns[1]], "answer": "x", "split": "train"}]).problems("train")
    (plain,) = rows([{"prompt": "Hi", "answer": "x", "split": "train"}]).problems("train")
    assert single.turns == plain.turns == (("user", "Hi"),) and single.key == plain.key


@pytest.mark.parametrize(
    ("data", "columns", "size", "note"),
    [
        ([*ROWS, {"prompt": "what is  5 + 1?", "answer": ""}], "", 200,
            "--data: 1 of 201 rows repeat the prompt of another"),
        ([row | {"solution": "x"} for row in ROWS], "answer=solution", 200,
            "--columns answer=solution: it replaces the column answer of the rows, which is not "
            "used; to keep that too, name it: --columns old_answer=answer"),
        (({"prompt": str(n), "answer": ""} for n in count()), "", 50,
            "--data: the first 50 rows are used, because generator does not say how many there "
            "are; for more give a list"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_said(monkeypatch, data, columns, size, note):
    for module in ("grpo.data.rows", "grpo.tasks.rows"):
        monkeypatch.setattr(f"{module}.MOST", 50)
    task = rows(data, columns=columns)
    assert sum(len(task.problems(split)) for split in SPLITS) == size
    assert task.notes == [note]


def test_slow_rows_say_how_many_are_read(monkeypatch, capsys):
    monkeypatch.setattr("grpo.data.rows.PAUSE", 0)
    read_rows(iter(ROWS[:2]))
    assert capsys.readouterr().err == "".join(
        f"data (list_iterator): {n} rows read\n" for n in (1, 2)
    )


@pytest.mark.parametrize(("given", "target"), [("A", "A"), (24, ""), (None, "")])
def test_a_target_is_a_right_answer_if_it_is_a_text(given, target):
    task = rows([ROWS[0] | {"target": given, "split": "train"}], lambda completion, target: 1)
    (problem,) = task.problems("train")
    assert (problem.target, problem.data["row"]["target"]) == (target, given)
    assert row_of(problem) == {"answer": "1"} | ({} if target else {"target": given})
    assert task.description == (
        "data (list): 1 rows (1 train, 0 validation, 0 test) of prompt, answer, target, split"
    )


def test_a_column_that_is_no_level_or_split_goes_to_the_reward_under_another_name():
    data = [row | {"level": "Level 3", "split": "dev"} for row in ROWS]
    task = rows(data, lambda completion, **row: 0, columns="my_level=level,my_split=split")
    assert len(task.problems("train")) > 130 and task.family_size(1) == 200
    columns = {"answer": "1", "my_level": "Level 3", "my_split": "dev"}
    assert columns in [one.data["row"] for split in SPLITS for one in task.problems(split)]


def test_a_missing_level_is_level_1_and_a_whole_fraction_is_a_level():
    """A data frame in which a level is missing holds 2.0 for 2."""
    task = rows([row | {"level": level} for row, level in zip(ROWS, [None, 2.0], strict=False)])
    assert sorted(one.level for split in SPLITS for one in task.problems(split)) == [1, 2]


def test_a_list_of_objects_in_a_file_is_read(tmp_path):
    for name, indent in (("rows.json", 1), ("rows.jsonl", None)):
        path = tmp_path / name
        path.write_text("\ufeff\n" + json.dumps(ROWS, indent=indent), "utf-8")
        assert [row for _, row in read_rows(path)] == ROWS
        for spelled in (path, f"{tmp_path}//{name}"):  # a resumed run has the rows of the same name
            assert read_rows(spelled)[1][0] == f"{path}, row 2"
    for name, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        compressed = Path(f"{path}{name}")
        compressed.write_bytes(compress(b"".join(json.dumps(r).encode() + b"\n" for r in ROWS)))
        assert [row for _, row in read_rows(compressed)] == ROWS
    path.write_text('[{"prompt": "a"}, 3]')
    assert "rows.jsonl, row 2: is int; each row must map" in refused(read_rows, path)
    path.write_text('{\n "prompt": "a"\n}\n')
    assert "); each line must be a JSON object" in refused(read_rows, path)


@pytest.mark.parametrize("again", [lambda text: unicodedata.normalize("NFD", text), str.upper])
def test_a_prompt_in_another_unicode_form_or_case_is_the_same_prompt(again):
    accents = [{"prompt": f"Où est l'élève {n} Μαΐου ?", "answer": str(n)} for n in range(100)]
    task = rows(accents + [row | {"prompt": again(row["prompt"])} for row in accents])
    prompts = [one.prompt for split in SPLITS for one in task.problems(split)]
    assert sorted(prompts) == sorted(row["prompt"] for row in accents)


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("message", "data", "options"),
    [
        ("row 1: has no prompt", [{"question": "?"}], {}),
        ("row 1: is int", [3], {}),
        ("holds no row", [], {}),
        ("row 1 has no column 'q'", ROWS, {"columns": {"prompt": "q"}}),
        ("give name=value", ROWS, {"columns": "prompt"}),
        ("each name once", ROWS, {"columns": "prompt=prompt,prompt=answer"}),
        ("row 1: column 'x' is nested too deeply", [ROWS[0] | {"x": ENDLESS}], {}),
        ("row 1: has no prompt; it needs a column prompt (a text) or messages (a list of turns "
            '{"role", "content"}); --columns prompt=NAME names another column of prompts, answer',
            [{"prompts": "?", "answer": ""}], {}),
        ("row 1: has no prompt; it needs", [{"prompt": {"role": "user"}}], {}),
        ("row 1: has no prompt; it needs", [{"messages": "Hi"}], {}),
        ("row 1: messages is a conversation stored as text; give a list of turns",
            [{"messages": '[{"role": "user"}]'}], {}),
        ("row 1: prompt is a conversation stored as text",
            [{"prompt": "[{'content': 'Hi', 'role': 'user'}]", "answer": ""}], {}),
        ("row 1: column 'completion' has the name of what reward functions get",
            [ROWS[0] | {"completion": "GOLD"}], {}),
        ("row 1: split is 'dev'; give one of train, validation, test, or rename the column to "
            "split by a hash of the prompt: --columns my_split=NAME",
            [ROWS[0] | {"split": "dev"}], {}),
        ("the last turn must be the user's", [{"messages": [
            {"role": "assistant", "content": "?"}], "answer": ""}], {}),
        ("a turn is", [{"messages": [{"role": "tool", "content": "?"}], "answer": ""}], {}),
        ("tool_calls are not supported", [{"messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
            {"role": "user", "content": "?"}], "answer": ""}], {}),
        ("row 1: level is 'Level 3'; give a whole number from 1, or rename the column if "
            "it is no difficulty: --columns my_level=NAME", [ROWS[0] | {"level": "Level 3"}], {}),
        ("level is True", [ROWS[0] | {"hard": True}], {"columns": "level=hard"}),
        ("level is 1.5", [ROWS[0] | {"level": 1.5}], {}),
        ("level is 0; give", [ROWS[0] | {"level": 0}], {}),
        ("wants 'answer'", [{"prompt": "?", "solution": "A"}], {}),
        ("row 201 has only prompt, completion; add it", [*ROWS, {"prompt": "?"}], {}),
        ("lone surrogate", [{"prompt": "\ud800", "answer": ""}], {}),
        ("lowest and the highest", ROWS, {"reward_range": (1, 1)}),
        ("lowest and the highest", ROWS, {"reward_range": "1"}),
        ("give a number of seconds", ROWS, {"reward_timeout": "0"}),
        ("give a file, a dataset (one split of it), or a list", 3, {}),
        ("one split of it", {"train": ROWS, "test": ROWS}, {}),
        ("row 1: column 'picture' holds bytes; give texts",
            [{"prompt": "?", "answer": "", "picture": [b"x"]}], {}),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(message, data, options):
    assert message in refused(rows, data, **options)


def test_a_file_of_rows_and_a_reward_file_make_the_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("own.py").write_text("def reward(completion, answer):\n    return completion == answer\n")
    task = load_task("data", options={"data": "rows.jsonl", "reward-file": "own.py:reward"})
    problem = task.make(1, "train", random.Random(0))
    assert problem.data["where"].startswith("rows.jsonl, line ")
    scores = scores_of(task, problem, [problem.data["row"]["answer"], "no"])
    assert [score.reward for score in scores] == [1, 0]
    assert [score.exact for score in scores] == [True, False]

    load = {"data": "rows.jsonl", "reward-file": "own.py:reward"}
    for change, message in (
        ({"data": "none.jsonl"}, "none.jsonl: cannot be read"),
        ({"data": "own.csv"}, "no such file"),
        ({"reward-file": "own.py:other"}, "defines no function other"),
        ({"reward-file": "none.py:f"}, "no file none.py"),
        ({"reward-file": "own"}, "give path/to/file.py:function"),
    ):
        assert message in refused(load_task, "data", options=load | change)
    assert "--data FILE" in refused(load_task, "data")
    assert "--reward-file" in refused(load_task, "data", options={"data": "rows.jsonl"})


def test_numbers_that_json_does_not_have_are_alike_in_every_source(tmp_path):
    missing, endless = tmp_path / "missing.jsonl", tmp_path / "endless.jsonl"
    missing.write_text('{"prompt": "a", "x": [NaN]}')
    for source in (missing, [{"prompt": "a", "x": [float("nan")]}]):
        assert [row for _, row in read_rows(source)] == [{"prompt": "a", "x": [None]}]
    endless.write_text('{"prompt": "a", "x": Infinity}')
    for source in (endless, [{"prompt": "a", "x": float("inf")}]):
        assert "column 'x' holds inf" in refused(read_rows, source)


def test_parquet_and_data_frames(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "n": [1, 2], "x": [0.5, float("nan")]})
    expected = [{"prompt": "a", "n": 1, "x": 0.5}, {"prompt": "b", "n": 2, "x": None}]
    assert [row for _, row in read_rows(frame)] == expected

    path = tmp_path / "rows.parquet"
    frame.to_parquet(path)
    assert [row for _, row in read_rows(path)] == expected
    assert read_rows(path)[1][0] == f"{path}, row 2"
    path.write_bytes(b"no parquet")
    assert "is not a Parquet file" in refused(read_rows, path)


def test_a_dataset_of_the_hub_may_have_a_version_in_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "datasets is not installed" in refused(read_rows, "org/name-v2.5-x")
    assert "no such file" in refused(read_rows, "org/name.csv")


def test_rows_to_evaluate_need_none_to_train_on():
    task = rows([{"prompt": "?", "answer": "", "split": "test"}])
    assert len(task.problems("test")) == 1 and not task.problems("train")
    said = "task data: none of its problems is of the train split; give some that are"
    assert said in refused(training_set, None, task)


def test_dates_become_texts():
    when = datetime(2026, 11, 24, 13, 30)
    row = {"prompt": "?", "at": [when, when.date(), when.time(), numpy.datetime64(when, "ns")]}
    ((_, columns),) = read_rows([row])
    whole = "2026-11-24T13:30:00"
    assert columns["at"] == [whole, "2026-11-24", "13:30:00", whole]

    class Missing(datetime):
        """As pandas' NaT: a date that differs from itself."""

        __hash__ = datetime.__hash__

        def __eq__(self, other):
            return False

    ((_, columns),) = read_rows([{"prompt": "?", "at": Missing(2026, 11, 24)}])
    assert columns["at"] is None


def test_a_missing_value_of_a_data_frame_is_none():
    pandas = pytest.importorskip("pandas")
    times = [pandas.Timestamp("2026-11-24"), pandas.NaT]
    counts = pandas.array([1, None], dtype="Int64")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "at": times, "n": counts, "l": [[1], None]})
    assert [row for _, row in read_rows(frame)] == [
        {"prompt": "a", "at": "2026-11-24T00:00:00", "n": 1, "l": [1]},
        {"prompt": "b", "at": None, "n": None, "l": None},
    ]
    listed = [{"prompt": "b", "at": pandas.NaT, "all": times}]
    ((_, row),) = read_rows(listed)
    assert row == {"prompt": "b", "at": None, "all": ["2026-11-24T00:00:00", None]}


def test_another_order_or_row_is_another_source():
    first = rows().sources()
    assert first == rows().sources()
    assert first != rows([*ROWS[1:], ROWS[0]]).sources()


# ---- reward functions


def length(completion):
    return len(completion) / 10


def test_a_function_of_the_group_gets_lists():
    def group(prompts, completions, answer, **row):
        assert prompts == ["prompt p"] * 2 and answer == ["42"] * 2 and row == {}
        return [len(text) for text in completions]

    assert [score.reward for score in scores(group, ["a", "bcd"])] == [1, 3]


def test_a_function_of_the_group_gets_conversations_as_trl_gives_them():
    turns = [{"role": "user", "content": "Hi"}]

    def group(prompts, completions, **row):
        assert prompts == [turns] * 2
        prompts[0][0]["content"] = "changed"
        return [float(completion[0]["content"] == row["answer"][0]) for completion in completions]

    task = rows([{"prompt": turns, "answer": "a", "split": "train"}], group)
    (asked,) = task.problems("train")
    assert [score.reward for score in task.score(asked, ["a", "b"])] == [1, 0]
    assert asked.turns == (("user", "Hi"),)


# The later ones are done first.
def slow(completion):
    time.sleep(0.2 + 0.05 / (1 + float(completion)))
    return float(completion)


async def slow_async(completion):
    await asyncio.sleep(0.2 + 0.05 / (1 + float(completion)))
    return float(completion)


@pytest.mark.parametrize("judge", [slow, slow_async])
def test_slow_functions_wait_side_by_side_and_keep_their_order(judge):
    start = time.monotonic()
    found = scores(judge, [str(n) for n in range(16)])
    assert time.monotonic() - start < 1.6  # one after the other: 3.2 s
    assert [score.reward for score in found] == list(range(16))


def test_a_function_that_changes_its_row_changes_no_other_call():
    def one(completion, tests):
        tests["seen"].append(completion)
        return len(tests["seen"])

    def group(completions, tests):
        return [one(text, of_one) for text, of_one in zip(completions, tests, strict=True)]

    row = problem(tests={"seen": []})
    for function in (one, group):
        rewards = small_rewards.rows([function], reward_range=(0, 9))
        assert [score.reward for score in rewards.score_groups([(row, ["a"] * 4)])[0]] == [1] * 4
    assert row.data["row"]["tests"] == {"seen": []}


def test_a_function_that_hangs_is_named_with_its_row():
    def hang(completion):
        time.sleep(60)

    async def hang_async(completion):
        await asyncio.sleep(60)

    for function in (hang, hang_async):
        name = function.__name__
        start = time.monotonic()
        said = f"reward {name}, row p, completion 1: took more than 0.2 s"
        assert said in refused(scores, function, reward_timeout=0.2)
        assert time.monotonic() - start < 5


@pytest.mark.filterwarnings("ignore:This process")  # that forks has threads
@pytest.mark.parametrize("status, reward", [(0, 1.0), (3, 0.0)])
def test_a_child_that_a_function_forks_may_exit(status, reward):
    def fork(completion):
        if not (child := os.fork()):
            sys.exit(status)
        return float(os.waitpid(child, 0)[1] == 0)

    (score,) = scores(fork, ["a"], reward_timeout=5)
    assert score.reward == reward


def raises(completion):
    raise KeyError("oh\nno")


async def raises_async(completion):
    raise ValueError("no")


def raises_timeout(completion):
    raise TimeoutError("by itself")


def exits(completion):
    raise SystemExit(3)


def interrupts(completion):
    raise KeyboardInterrupt


def parses(completion):
    return json.loads("{")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward raises, row p, completion 1 raised KeyError: 'oh"),
        (raises_async, "raised ValueError: no"),
        (raises_timeout, "raised TimeoutError: by itself"),
        (exits, "raised SystemExit: 3"),
        (interrupts, "row p, completion 1 raised KeyboardInterrupt ("),
        (parses, "test_rows.py, line "),
        (lambda completion: None, "reward <lambda>, row p: returned None for every completion so"),
        (lambda completion: float("nan"), "returned nan"),
        (lambda completion: "1", "returned '1'"),
        (lambda completion: {}, "returned no component"),
        (lambda completion: {"a": None}, "returned {'a': None}"),
        (lambda completion: {"a\n": 0.5}, "returned {'a\\n': 0.5}"),
        (lambda completion: 10**400, "completion 1: returned 1000"),
        (lambda completion: numpy.zeros(2), "completion 1: returned array([0., 0.])"),
        (lambda completion: torch.zeros(2), "completion 1: returned tensor([0., 0.])"),
        (lambda completions: [1.0], "returned [1.0]; it must return a list"),
        (lambda completions: 1.0, "must return a list"),
        (lambda completions: "ab", "must return a list"),
        ("length", "give a function"),
        (max, "reward max: no signature found for builtin"),
        (
            [lambda completion: {"a": 1}, lambda completion: {"a": 2}],
            "two functions have a component 'a'; let one return it by another name",
        ),
    ],
)
def test_what_is_wrong_is_one_line(function, message):
    assert message in refused(scores, function)


def partly(completion):
    return None if completion[:1] == "?" else len(completion) / 2


@pytest.mark.parametrize(
    ("functions", "completions", "rewards", "abstained"),
    [
        (partly, ["ab", "?", "", "a"], [1, 0.5, 0, 0.5], [False, True, False, False]),
        (lambda completions: list(map(partly, completions)), ["ab", "?"], [1, 1], [False, True]),
        ([partly, lambda completion: 0.5], ["ab", "?"], [1.5, 0.5], [False, False]),
    ],
)
def test_a_reward_that_abstains_leaves_the_baseline(functions, completions, rewards, abstained):
    found = scores(functions, completions)
    assert [score.reward for score in found] == rewards
    assert [score.abstained for score in found] == abstained
    judged = [reward for reward, is_out in zip(rewards, abstained, strict=True) if not is_out]
    assert fmean(judged) == fmean(rewards)


def test_an_answer_that_no_reward_judged_is_never_right():
    task = rows(reward=partly)
    for texts, exact in [(["ab", "?"], [True, False]), (["?", "?"], [False, False])]:
        assert [score.exact for score in scores_of(task, problem(), texts)] == exact
    assert not replace(Score(1.0, {"reason": ABSTAINED}), exact=True).exact


def test_a_component_that_abstains_is_not_in_its_mean():
    found = scores([partly, length], ["abcde", "?xxxx"])
    assert component_means([found]) == {"reward/partly": [2.5], "reward/length": [0.5]}
    (alone,) = rows(reward=partly).score_groups([(problem(), ["ab", "?"])])
    assert component_means([alone]) == {} and alone[1].parts == {"reason": ABSTAINED}
    assert explain("data", problem(), "?", alone[1]) == f"1.000 = {ABSTAINED}"


@pytest.mark.parametrize("given", [None, "unknown"])
def test_a_range_may_be_unknown(given):
    task = small_rewards.rows([lambda completion: 3.0 * len(completion)], reward_range=given)
    (found,) = scores_of_groups(task, [(problem(), ["", "a", "aaa"])])
    assert [(score.reward, score.value, score.exact) for score in found] == [
        (0.0, 0.5, False), (3.0, 0.875, False), (9.0, 0.95, False)
    ]  # fmt: skip
    assert range_of(task) is None and as_flags(reward_range=given) == {"reward-range": "unknown"}


def test_components_are_added_and_kept():
    def parts(completion, answer):
        return {"right": completion == answer, "short": 0.1}

    (score,) = scores(parts, ["42"], reward_range=(0, 1.1))
    assert score.reward == pytest.approx(1.1) and score.exact
    assert score.parts == {"reward/right": 1.0, "reward/short": 0.1}

    (score,) = scores([parts, length], ["42"])
    assert score.reward == pytest.approx(1.3)
    assert list(score.parts) == ["reward/right", "reward/short", "reward/length"]
    (score,) = scores(length, ["42"])
    assert score.parts == {} and score.reward == 0.2
    one, two = scores(lambda completion: dict.fromkeys(completion, 0.5), ["a", "ab"])
    assert one.parts == {"reward/a": 0.5} and two.parts == {"reward/a": 0.5, "reward/b": 0.5}


def test_a_failure_abandons_the_other_calls_and_the_next_ones_run(monkeypatch):
    monkeypatch.setattr("grpo.tasks.rows.WORKERS", 1)
    ran = []

    def judge(completion):
        ran.append(completion)
        time.sleep({"hangs": 1.0}.get(completion, 0.0))
        return 1.0

    rewards = small_rewards.rows([judge], reward_timeout=0.2)
    with pytest.raises(UserError, match="completion 1: took more than 0.2 s"):
        rewards.score_groups([(problem(), ["hangs", "waits"])])
    assert [score.reward for score in rewards.score_groups([(problem(), ["next"])])[0]] == [1.0]
    time.sleep(1.0)
    assert ran == ["hangs", "next"]


def test_the_time_limit_counts_from_the_start_of_a_call(monkeypatch):
    monkeypatch.setattr("grpo.tasks.rows.WORKERS", 1)

    def slow(completion):
        time.sleep(0.1)
        return 1.0

    assert len(scores(slow, ["x"] * 12, reward_timeout=0.6)) == 12  # 1.2 s in all


def test_the_highest_reward_is_right_although_rounded():
    assert scores(lambda completion: 1 + 1e-8, reward_range=(0, 1))[0].exact
    in_float32 = numpy.float32(0.9)  # 0.899999976
    assert scores(lambda completion: in_float32, reward_range=(0, 0.9))[0].exact
    assert not scores(lambda completion: 0.8999, reward_range=(0, 0.9))[0].exact


def check(function, row):
    Rows([{"prompt": "?"} | row], None, [function])


def test_parameters_are_checked_before_training():
    check(length, {"answer": ""})
    with pytest.raises(UserError, match="has no parameter completion"):
        check(lambda text: 1.0, {"text": ""})
    for reward, has in (
        (lambda completion, solution: 1.0, "prompt, completion"),
        (lambda completions, solution, **row: [1.0], "prompts, completions"),
    ):
        with pytest.raises(UserError, match=f"wants 'solution', .* has only {has}, answer;"):
            check(reward, {"answer": ""})
        check(reward, {"solution": ""})


def test_evaluations_score_groups_if_a_reward_compares():
    together = [right, lambda completions: [0.5] * len(completions)]
    assert not rows().compares and Rows(ROWS, reward_functions=together).compares


def weighted(weight):
    def reward(completion):
        return weight * len(completion)

    return reward


class Judge:
    def __call__(self, completion):
        return 1.0


def test_the_source_of_a_function_follows_its_code():
    assert source_text(length) == source_text(length) != source_text(right)
    assert source_text(weighted(2)) != source_text(weighted)
    assert source_text(Judge()) == source_text(Judge())
    one, two = (partial(right, answer=answer) for answer in "ab")
    assert source_text(one) != source_text(two) and "def right" in source_text(two)
    made: dict = {}
    exec("def one(x): return x\ndef two(x): return x", made)
    assert source_text(made["one"]) != source_text(made["two"])  # without a source

"""The task of a user's own data: rows, columns, splits, duplicates."""

import json
import random
import unicodedata
from datetime import datetime
from pathlib import Path

import pytest

from data.errors import UserError
from data.rows import read_rows
from grpo.config import Config
from grpo.trainer import training_set
from tasks.base import SPLITS, problems_of
from tasks.registry import load_task
from tasks.rows import Rows
from tasks.scoring import scores_of
from tasks.supply import problem_at

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(200)]


def right(completion, answer):
    return float(completion == answer)


def rows(data=ROWS, reward=right, **options):
    return Rows(data, reward_functions=[reward], **options)


def refused(message, make):
    with pytest.raises(UserError) as caught:
        make()
    line = str(caught.value)
    assert message in line and "\n" not in line
    return line


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


def test_a_reward_of_the_whole_group_may_compare():
    def group(completions):
        return [0.5] * len(completions)

    assert not rows().compares
    task = Rows(ROWS, reward_functions=[right, group])
    assert task.compares
    assert [note.partition(":")[0] for note in task.notes] == ["reward group"]


def test_the_row_decides_the_split_if_it_names_one():
    data = [row | {"split": SPLITS[n % 3], "level": n % 2 + 1} for n, row in enumerate(ROWS)]
    task = rows(data)
    assert [len(task.problems(split)) for split in SPLITS] == [67, 67, 66]
    assert {one.level for one in task.problems("train")} == {1, 2}
    assert task.levels(1) == [1] and task.levels(5) == [1, 2]
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

    (plain,) = rows([{"prompt": [turns[1]], "answer": "x", "split": "train"}]).problems("train")
    assert plain.turns == (("user", "Hi"),) and "messages" not in plain.data


def test_equal_prompts_are_one_problem_and_are_counted():
    data = [*ROWS, {"prompt": "what is  5 + 1?", "answer": "other"}]
    task = rows(data)
    assert sum(len(task.problems(split)) for split in SPLITS) == 200
    assert task.notes == ["--data: 1 of 201 rows repeat the prompt of another"]


def test_a_column_that_is_no_level_or_split_goes_to_the_reward_under_another_name():
    data = [row | {"level": "Level 3", "split": "dev"} for row in ROWS]
    task = rows(data, lambda completion, **row: 0, columns="my_level=level,my_split=split")
    assert len(task.problems("train")) > 130 and task.levels(9) == [1]
    columns = {"answer": "1", "my_level": "Level 3", "my_split": "dev"}
    assert columns in [one.data["row"] for split in SPLITS for one in task.problems(split)]


def test_a_missing_level_is_level_1_and_a_whole_fraction_is_a_level():
    """A data frame in which a level is missing holds 2.0 for 2."""
    task = rows([row | {"level": level} for row, level in zip(ROWS, [None, 2.0], strict=False)])
    assert sorted(one.level for split in SPLITS for one in task.problems(split)) == [1, 2]


TURN = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", ["prompt", "messages"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps([TURN]),
        str([TURN, {"role": "assistant", "content": "it's"}]),
        json.dumps([{"content": "a\nb", "role": "user"}], indent=1) + "\n",
        str([{"from": "human", "value": "Hi"}]),
    ],
)
def test_a_conversation_written_as_a_text_is_refused(name, text):
    refused(
        f"row 2: {name} is a conversation written as a text; make it a list of turns",
        lambda: rows([{name: [TURN], "answer": ""}, {name: text, "answer": ""}]),
    )


def test_a_column_that_nothing_reads_is_named_once():
    data = [row | {"completion": "GOLD", "source": "web"} for row in ROWS]
    (note,) = rows(data, lambda completion, **row: 0).notes
    assert note == (
        "--data: no reward reads column completion; completion is what was sampled, so give "
        "--columns NAME=completion"
    )
    (note,) = rows(data, lambda completion, source: 0, columns="gold=completion").notes
    assert note == "--data: no reward reads columns answer, gold"

    def one(completion, source, answer):
        return 0

    assert rows(data, one).notes[0].startswith("--data: no reward reads column completion;")
    for group in (lambda completions, **row: [0], lambda completions, completion: [0]):
        task = Rows(data, reward_functions=[one, group])  # what one does not read, the other does
        assert not [note for note in task.notes if note.startswith("--data")]
    prompts = [row | {"prompts": ""} for row in ROWS]
    note = rows(prompts, lambda completions, **row: [0]).notes[0]
    assert note.startswith("--data: no reward reads column prompts; prompts is what was sampled")


def test_a_column_that_another_replaces_is_named():
    data = [{"question": row["prompt"], "solution": "5", "answer": "no"} for row in ROWS]
    task = rows(data, columns="prompt=question,answer=solution")
    assert task.notes == [
        "--data: column answer is not read; --columns answer=solution replaces it"
    ]
    assert not rows(data, columns="prompt=question,answer=answer", reward=reads_all).notes
    exchanged = "prompt=question,answer=solution,solution=answer"
    assert not rows(data, columns=exchanged, reward=reads_all).notes


def reads_all(completion, **row):
    return 0.0


def test_a_list_of_objects_in_a_file_is_read(tmp_path):
    for name, indent in (("rows.json", 1), ("rows.jsonl", None)):
        path = tmp_path / name
        path.write_text("\ufeff\n" + json.dumps(ROWS, indent=indent), "utf-8")
        assert [row for _, row in read_rows(path)] == ROWS
        assert read_rows(path)[1][0] == f"{path}, row 2"
    path.write_text('[{"prompt": "a"}, 3]')
    refused("rows.jsonl, row 2: is int; each row must map", lambda: read_rows(path))
    path.write_text('{\n "prompt": "a"\n}\n')
    refused("); each line must be a JSON object", lambda: read_rows(path))


def test_a_prompt_in_another_unicode_form_is_the_same_prompt():
    accents = [{"prompt": f"Où est l'élève {n} ?", "answer": str(n)} for n in range(100)]
    again = [row | {"prompt": unicodedata.normalize("NFD", row["prompt"])} for row in accents]
    task = rows(accents + again)
    prompts = [one.prompt for split in SPLITS for one in task.problems(split)]
    assert sorted(prompts) == sorted(row["prompt"] for row in accents)


@pytest.mark.parametrize(
    ("message", "data", "options"),
    [
        ("row 1: has no prompt", [{"question": "?"}], {}),
        ("row 1: is int", [3], {}),
        ("holds no row", [], {}),
        ("row 1 has no column 'q'", ROWS, {"columns": {"prompt": "q"}}),
        ("give name=value", ROWS, {"columns": "prompt"}),
        ("row 1: has no prompt; it needs a column prompt (a text) or messages (a list of turns "
            '{"role", "content"}); --columns prompt=NAME names another column of prompts, answer',
            [{"prompts": "?", "answer": ""}], {}),
        ("row 1: messages is 'Hi'; it needs", [{"messages": "Hi", "answer": ""}], {}),
        ("row 1: prompt is {'role': 'user'}; it needs", [{"prompt": {"role": "user"}}], {}),
        ("row 1: split is 'dev'; give one of train, validation, test, or rename the column to "
            "split by a hash of the prompt: --columns my_split=split",
            [ROWS[0] | {"split": "dev"}], {}),
        ("the last turn must be the user's", [{"messages": [
            {"role": "assistant", "content": "?"}], "answer": ""}], {}),
        ("a turn is", [{"messages": [{"role": "tool", "content": "?"}], "answer": ""}], {}),
        ("row 1: a turn has tool_calls, which are not shown", [{"messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}], {}),
        ("row 1: level is 'Level 3'; give a whole number from 1, or rename the column if "
            "it is no difficulty: --columns my_level=level", [ROWS[0] | {"level": "Level 3"}], {}),
        ("my_level=hard", [ROWS[0] | {"hard": True}], {"columns": "level=hard"}),
        ("level is 1.5", [ROWS[0] | {"level": 1.5}], {}),
        ("level is 0; give", [ROWS[0] | {"level": 0}], {}),
        ("wants 'answer'", [{"prompt": "?", "solution": "A"}], {}),
        ("row 201 has nothing but a prompt; add it", [*ROWS, {"prompt": "?"}], {}),
        ("lone surrogate", [{"prompt": "\ud800", "answer": ""}], {}),
        ("the first must be below", ROWS, {"reward_range": (1, 1)}),
        ("lowest and the highest", ROWS, {"reward_range": "1"}),
        ("finite number above 0", ROWS, {"reward_timeout": "0"}),
        ("finite number", ROWS, {"reward_weights": "right=nan"}),
        ("give a file, a dataset, or a list", 3, {}),
        ("is a mapping of 'train', 'test'; give a list of rows, e.g. data['train']",
            {"train": ROWS, "test": ROWS}, {}),
        ("row 1: column 'picture' holds bytes; give texts",
            [{"prompt": "?", "answer": "", "picture": [b"x"]}], {}),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(message, data, options):
    refused(message, lambda: rows(data, **options))


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
        refused(message, lambda change=change: load_task("data", options=load | change))
    refused("--data FILE", lambda: load_task("data"))
    refused("--reward-file", lambda: load_task("data", options={"data": "rows.jsonl"}))


def test_numbers_that_json_does_not_have_are_alike_in_every_source(tmp_path):
    missing, endless = tmp_path / "missing.jsonl", tmp_path / "endless.jsonl"
    missing.write_text('{"prompt": "a", "x": [NaN]}')
    for source in (missing, [{"prompt": "a", "x": [float("nan")]}]):
        assert [row for _, row in read_rows(source)] == [{"prompt": "a", "x": [None]}]
    endless.write_text('{"prompt": "a", "x": Infinity}')
    for source in (endless, [{"prompt": "a", "x": float("inf")}]):
        refused("column 'x' holds inf", lambda source=source: read_rows(source))


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
    refused("is not a Parquet file", lambda: read_rows(path))


def test_rows_to_evaluate_need_none_to_train_on():
    task = rows([{"prompt": "?", "answer": "", "split": "test"}])
    assert len(task.problems("test")) == 1 and not task.problems("train")
    refused(
        "task data: none of its problems is of the train split; give some that are",
        lambda: training_set(Config(), task),
    )


def test_dates_become_texts():
    when = datetime(2026, 11, 24, 13, 30)
    row = {"prompt": "?", "at": [when, when.date(), when.time()]}
    ((_, columns),) = read_rows([row])
    assert columns["at"] == ["2026-11-24T13:30:00", "2026-11-24", "13:30:00"]

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

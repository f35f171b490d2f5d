import gzip
import json
import os

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from grpo.data.errors import UserError
from grpo.data.files import (
    kind_of,
    load_yaml,
    raw_json,
    read_jsonl,
    read_jsonl_zst,
    write_jsonl_zst,
    write_whole,
)


def test_lines_are_numbered_from_one_blank_ones_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    # U+2028 ends no line of JSONL.
    path.write_bytes('\ufeff{"x": 1}\r\n\n  \n{"x": "\u2028"}'.encode())
    assert list(read_jsonl(path)) == [
        (f"{path}, line 1", {"x": 1}),
        (f"{path}, line 4", {"x": "\u2028"}),
    ]


@pytest.mark.parametrize(
    "line, fault",
    [
        (b'{"x": ', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),  # deeper than the parser goes
        (b'{"x": "\xff"}', "is not UTF-8 text (byte 0xff)"),
        (b"[1]", "is [1]; each line must be a JSON object"),
        (b"true", "is True;"),
        (b"null", "is None;"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n' + line + b'\n{"x": 3}\n')
    said = refused(lambda: list(read_jsonl(path)))
    assert said.startswith(f"{path}, line 2: {fault}")


def test_any_text_may_be_asked_for_what_it_names(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert kind_of(tmp_path) == "folder" and kind_of(tmp_path / "file") == "file"
    assert kind_of("/dev/null") == "other"
    for text in (
        "absent",
        "loop",
        "file/x",
        "a" * 300,
        "x/" * 3000,
        "a\0b",
        "\ud800",
        '[{"a": 1}]',
    ):
        assert kind_of(tmp_path / text) == ""


def test_writing_makes_folders_replaces_and_leaves_nothing_aside(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    write_whole(path, b"one")
    with open(path, "rb") as reader:
        write_whole(path, b"two")
        assert reader.read() == b"one"  # renamed, not overwritten
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["a.txt"]


def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_whole(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="a.txt: cannot be written: No space left on device"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


# With what JSON has no numbers for, and what UTF-8 has no characters for.
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
TEXTS = st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud800\u2028\x85"))
VALUES = st.recursive(
    PLAIN | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_every_value_that_json_can_write_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "values.jsonl.zst"
    write_jsonl_zst(path, [{"value": raw_json(value)}, {}])
    # Compared as text, because NaN is not equal to itself, and -0.0 is equal to 0.0.
    assert repr(read_jsonl_zst(path)) == repr([{"value": json.loads(json.dumps(value))}, {}])


def test_the_last_line_of_a_log_may_be_incomplete(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": ')
    assert [line for _, line in read_jsonl(path, is_log=True)] == [{"x": 1}]
    with pytest.raises(UserError, match="line 2: is not JSON"):
        list(read_jsonl(path))


def test_yaml_is_strict():
    assert load_yaml("{a: [1, 2], b: {c: }}") == {"a": [1, 2], "b": {"c": None}}
    assert load_yaml("") is None
    with pytest.raises(yaml.YAMLError, match="aliases"):  # a few lines can expand to gigabytes
        load_yaml("{a: &x [1, 2], b: *x}")
    with pytest.raises(yaml.YAMLError, match="a stands twice"):
        load_yaml("{b: {a: 1, a: 2}}")


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"x", lambda c: c + c[:9]])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_of_lines_that_is_not_whole_is_refused(tmp_path, monkeypatch, change, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    write_jsonl_zst(path, [{"x": 1}])
    if suffix == ".gz":
        path.write_bytes(gzip.compress(b'{"x": 1}\n'))
    assert read_jsonl_zst(path) == [{"x": 1}]
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    with pytest.raises(UserError, match=f"a.jsonl{suffix}: not a whole {suffix} file of at most"):
        read_jsonl_zst(path)

    path.write_bytes(whole)
    monkeypatch.setattr("grpo.data.files.MAX_EXPANDED", 5)
    with pytest.raises(UserError, match="expands to more"):
        read_jsonl_zst(path)

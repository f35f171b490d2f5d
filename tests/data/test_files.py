import os

import pytest

from data.errors import UserError
from data.files import read_json, read_jsonl, read_text, write_whole


def test_lines_are_numbered_from_one_blank_ones_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        '\ufeff{"x": 1}\r\n\n  \n{"x": "\u2028"}'.encode()
    )  # U+2028 ends no line of JSONL
    assert list(read_jsonl(path)) == [
        (f"{path}, line 1", {"x": 1}),
        (f"{path}, line 4", {"x": "\u2028"}),
    ]


@pytest.mark.parametrize(
    "line, fault",
    [
        (b'{"x": ', "is not JSON"),
        (b'{"x": 1} {"x": 2}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),  # deeper than the parser goes
        (b'{"x": "\xff"}', "is not UTF-8 text (byte 0xff)"),
        (b"[1]", "is a list; each line must be a JSON object"),
        (b'"x"', "is a string;"),
        (b"7", "is an integer;"),
        (b"7.5", "is a fraction;"),
        (b"true", "is a boolean;"),
        (b"null", "is null;"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n' + line + b'\n{"x": 3}\n')
    with pytest.raises(UserError) as error:
        list(read_jsonl(path))
    assert str(error.value).startswith(f"{path}, line 2: {fault}")
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="absent: cannot be read: No such file"):
        read_text(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    with pytest.raises(UserError, match=r"a: is not UTF-8 text \(byte 0xe9\)"):
        read_text(tmp_path / "a")


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

"""How programs end: one line and a status, also where nothing can be printed any more."""

import sys
from types import SimpleNamespace

import pytest

from grpo.data.errors import LONGEST, Lasting, UserError, exit_status, needs


class Broken:
    """A stream whose writes fail."""

    def __init__(self, error):
        self.error, self.tries = error, 0

    def write(self, text=""):
        self.tries += 1
        raise self.error

    flush = write


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 2, "p: standard output: No space left on device"),
    ],
)
def test_a_program_ends_without_its_output_unless_it_is_to_last(
    monkeypatch, capsys, error, status, line
):
    stream = Broken(error)
    monkeypatch.setattr(sys, "stdout", stream)
    assert exit_status("p", lambda: print("a line") or 0) == status and stream.tries == 1
    assert capsys.readouterr().err.strip() == line

    monkeypatch.setattr(sys, "stdout", Lasting(stream))
    assert exit_status("p", lambda: print("a line") or 0) == 0 and stream.tries > 1


def raising(error):
    raise error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("--x 1: two\nlines\x1b[31m"), 2, r"p: --x 1: two\nlines\x1b[31m"),
        (FloatingPointError("the loss is nan"), 1, "p: stopped: the loss is nan"),
        (KeyboardInterrupt(), 130, "p: interrupted"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "p: a.txt: No such file"),
        (MemoryError(), 2, "p: this machine's memory is not enough"),
        (
            RuntimeError("CUDA out of memory"),
            2,
            "p: this machine's memory is not enough (CUDA out of memory)",
        ),
    ],
)
def test_the_status_and_the_line_of_an_error(capsys, error, status, line):
    assert exit_status("p", lambda: raising(error)) == status
    assert capsys.readouterr().err == line + "\n"


def test_python_without_docstrings_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    assert exit_status("p", lambda: 0) == 2
    assert "unset PYTHONOPTIMIZE" in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    for error in (RuntimeError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error)):
            exit_status("p", lambda error=error: raising(error))


def test_a_long_line_loses_its_middle():
    assert len(str(UserError("x" * 9999))) == LONGEST + 3


def test_a_missing_package_is_installed_as_grpo_was(monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo-train"])
    said = r"; pip install 'grpo-interleave\[bits\]'$"
    with pytest.raises(UserError, match=said), needs("x", "bits"):
        raise ImportError

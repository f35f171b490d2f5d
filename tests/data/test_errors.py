"""How programs end: one line and a status, also where nothing can be printed any more."""

import sys

import pytest

from data.errors import LONGEST, UserError, exit_status


class Broken:
    """A stream whose writes fail."""

    def __init__(self, error):
        self.error, self.tries = error, 0

    def write(self, text):
        self.tries += 1
        raise self.error

    flush = write


def prints():
    for _ in range(3):
        print("a line")
    return 0


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 2, "p: standard output: No space left on device"),
        (ValueError("closed file"), 2, "p: standard output: closed file"),
    ],
)
def test_a_program_ends_or_goes_on_without_its_output(monkeypatch, capsys, error, status, line):
    stream = Broken(error)
    monkeypatch.setattr(sys, "stdout", stream)
    assert exit_status("p", prints) == status and stream.tries == 1
    assert capsys.readouterr().err.strip() == line and sys.stdout is stream

    lost = []
    assert exit_status("p", prints, lost) == 0 and stream.tries == 2
    reason = error.strerror if isinstance(error, OSError) else error
    assert lost == [f"standard output is lost ({reason}); training continues without it"]


def test_without_standard_error_a_program_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Broken(BrokenPipeError(32, "Broken pipe")))
    assert exit_status("p", lambda: print("x", file=sys.stderr) or 0) == 0


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


def test_other_errors_keep_their_traceback():
    for error in (RuntimeError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error)):
            exit_status("p", lambda error=error: raising(error))


def test_a_long_line_loses_its_middle():
    assert len(str(UserError("x" * 9999))) == LONGEST + 3

"""The exception for errors that the user can correct, and how a program ends on one."""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

from data.text import escape_control, shortened

# What torch says if the memory of the host or of a GPU is not enough.
_MEMORY = re.compile("allocate memory|out of memory")

# The longest line for the user, in characters.
LONGEST = 1_000


class UserError(ValueError):
    """One line for the user: what is wrong, where, and what would be right.

    A value of the user's may have line breaks or any length, so the text is escaped, and loses its
    middle if it is longer than LONGEST.
    """

    def __str__(self) -> str:
        return shortened(super().__str__(), LONGEST)


class Parser(argparse.ArgumentParser):
    """A command line parser that raises UserError for what it cannot parse."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the parser's message."""
        raise UserError(f"{message}; {self.prog} --help lists the flags")

    def nearest(self, word: str) -> str:
        """Return the flags that an unknown `word` may mean, e.g. "--learning-rate or --lora-rank"
        for "--lr"; "" if none is like it.

        They are those that it abbreviates by their initials, or else the one spelled most alike.
        """
        known = [option for action in self._actions for option in action.option_strings]
        letters = word.lstrip("-")
        initials = {
            option: "".join(part[:1] for part in option.lstrip("-").split("-")) for option in known
        }
        abbreviated = [option for option in sorted(known) if initials[option] == letters]
        return " or ".join(abbreviated or difflib.get_close_matches(word, known, 1, cutoff=0.7))


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise UserError, which begins with `what`, for any exception of the block.

    For a block that reads what others have written: `what` names the file and says what it should
    be. The message of the exception follows in brackets, in one line.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what} ({type(error).__name__}: {shortened(reason, 300)})") from error


@contextmanager
def needs(package: str, extra: str, where: str = "") -> Iterator[None]:
    """Import `package` within this context.

    If it or one of its own requirements is missing, UserError names that and the `extra` that
    installs it; `where` is the flag that needs it.
    """
    try:
        yield
    except ImportError as error:
        missing = f"{package} is not installed"
        if error.name and error.name.partition(".")[0] != package:
            missing = f"{package} cannot be imported, because {error.name} is not installed"
        raise UserError(
            f"{where and where + ': '}{missing}; pip install -c constraints.txt -e '.[{extra}]'"
        ) from error


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Within this context Ctrl-C ends the program without a traceback.

    It is for the imports of a program: Python would raise KeyboardInterrupt in one of them.
    """
    is_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_python:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_python:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_status(
    program: str, action: Callable[[], int], lost_streams: list[str] | None = None
) -> int:
    """Return the exit status of a `program`: that of `action`, unless it fails.

    An error of the user or the disk, or a lack of memory, is printed as one line, and the status is
    2. Numbers that are not finite are printed in the same way, with status 1. After Ctrl-C the
    status is 130.

    Printing never fails: a stream discards everything after the first write that does, because the
    reader of a pipe has left, a disk is full, or a terminal is closed. With `lost_streams`, which
    then gets a line, the program goes on. Without, it ends once standard output is lost: silently
    with status 141 after a pipe, as `cat` does in `cat FILE | head`, else with a line and status 2.
    It goes on if only standard error is lost, or if the output was closed on purpose (`>&-`).
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _Lasting(sys.stdout, 1, "standard output", lost_streams)
    sys.stderr = _Lasting(sys.stderr, 2, "standard error", lost_streams)
    try:
        try:
            return _status_of(program, action)
        finally:
            # Now, because a failure at the end of the interpreter cannot be handled.
            sys.stdout.flush()
    except _OutputLost as lost:
        if isinstance(lost.code, int):
            return lost.code
        print(f"{program}: {lost.code}", file=sys.stderr)
        return 2
    finally:
        sys.stdout, sys.stderr = before


def _status_of(program: str, action: Callable[[], int]) -> int:
    status = 2
    try:
        if sys.platform == "win32":
            raise UserError("Windows is not supported; use its Linux subsystem (WSL)")
        return action()
    except UserError as error:
        line = str(error)
    except FloatingPointError as error:
        line, status = f"stopped: {error}", 1
    except KeyboardInterrupt:
        line, status = "interrupted", 128 + signal.SIGINT
    except (MemoryError, RuntimeError) as error:
        # Torch reports a lack of memory by a RuntimeError.
        if not isinstance(error, MemoryError) and not _MEMORY.search(str(error)):
            raise
        said = shortened(" ".join(str(error).split()), 200)
        line = f"this machine's memory is not enough{f' ({said})' if said else ''}"
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        line = f"{where}{error.strerror or error}"
    print(f"{program}: {escape_control(line)}", file=sys.stderr)
    return status


class _OutputLost(SystemExit):
    """Ends a program whose standard output is lost. `except Exception` does not catch it."""


class _Lasting:
    """A text stream that discards everything once a write has failed, see `exit_status`.

    A stream that is None was closed when the program started.
    """

    def __init__(
        self, stream: TextIO | None, descriptor: int, name: str, lost_streams: list[str] | None
    ):
        self.name, self.lost_streams = name, lost_streams
        self.is_lost = stream is None
        if stream is None:
            # The next file that is opened would get the descriptor otherwise. It stays open as long
            # as the program lives.
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            os.dup2(stream.fileno(), descriptor)
            self._note("closed")
        if descriptor == 1 and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the encoding lacks is written as "?"
        self.stream = stream

    def write(self, text: str) -> int:
        """Write to the stream, or discard the text if it is lost; return the length of the text."""
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it is lost."""
        self._attempt(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _attempt(self, action: Callable, *arguments: Any) -> None:
        if self.is_lost:
            return
        try:
            action(*arguments)
        except BlockingIOError:
            pass  # a terminal that cannot keep up: this text is lost, but later ones may not be
        except (OSError, ValueError) as error:  # ValueError: a closed file
            self.is_lost = True
            # The interpreter would try to write what is still buffered when it exits.
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.stream.fileno())

            reason = getattr(error, "strerror", None) or str(error)
            self._note(reason)
            if self.lost_streams is None and self.name == "standard output":
                is_pipe = isinstance(error, BrokenPipeError)
                code = 128 + signal.SIGPIPE if is_pipe else f"{self.name}: {reason}"
                raise _OutputLost(code) from error

    def _note(self, reason: str) -> None:
        if self.lost_streams is not None:
            self.lost_streams.append(
                f"{self.name} is lost ({reason}); training continues without it"
            )

"""Standard output and error that can be lost: the reader of a pipe leaves, a disk is full, a
terminal is closed.

Within `lasting`, whoever prints does not notice. The first write that fails turns the stream into
silence, and `lost` is told once, in words: `train.py` notes it and goes on; every other program
ends there (`end_quietly`).
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

SIGPIPE_STATUS = 128 + 13  # what a shell reports of a program that SIGPIPE ended


class OutputLost(SystemExit):
    """Ends a program whose standard output is gone; no `except Exception` holds it up."""


class Lasting:
    """A text stream that falls silent, once, when it can no longer be written; `lost` is told its
    name and the error.
    """

    def __init__(self, stream: TextIO, name: str, lost: Callable[[str, Exception], None]):
        self.stream, self.name, self.lost = stream, name, lost
        self.is_lost = False

    def write(self, text: str) -> int:
        """Write to the stream, or nowhere once it is lost; return how many characters."""
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it is lost."""
        self._attempt(self.stream.flush)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        with suppress(ValueError):  # a closed file
            return self.stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _attempt(self, action: Callable, *arguments: Any) -> None:
        if self.is_lost:
            return
        try:
            action(*arguments)
        except UnicodeError:
            raise
        except BlockingIOError:
            pass  # a terminal that cannot keep up: this text is dropped, the next may get through
        except (OSError, ValueError) as error:  # ValueError: a closed file
            self.is_lost = True
            self._point_to_nothing()
            self.lost(self.name, error)

    def _point_to_nothing(self) -> None:
        """Let the descriptor lead to /dev/null, or the interpreter would try to write what is
        buffered when it ends.
        """
        with suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)


@contextmanager
def lasting(lost: Callable[[str, Exception], None]) -> Iterator[None]:
    """Within this context standard output and error are `Lasting`. One that the program was
    started without (`>&-`) is silent.
    """
    before = sys.stdout, sys.stderr
    sys.stderr = Lasting(sys.stderr or _nothing(2), "standard error", lost)
    sys.stdout = Lasting(sys.stdout or _nothing(1), "standard output", lost)
    try:
        for stream, original in zip((sys.stdout, sys.stderr), before):
            if original is None:
                stream.is_lost = True
                lost(stream.name, OSError(errno.EBADF, "closed"))
        yield
    finally:
        sys.stdout, sys.stderr = before


def end_quietly(name: str, error: Exception) -> None:
    """End the program when standard output is lost: without a word where its reader has left, as
    `cat` does in `cat FILE | head`.

    A closed output (`>&-`) is what was asked for, and without standard error there is nobody to
    tell.
    """
    number = getattr(error, "errno", None)
    if name == "standard output" and number == errno.EPIPE:
        raise OutputLost(SIGPIPE_STATUS)
    if name == "standard output" and number != errno.EBADF:
        raise OutputLost(f"{name}: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Return why a write failed: "Broken pipe"."""
    return getattr(error, "strerror", None) or str(error)


def _nothing(descriptor: int) -> TextIO:
    """Return a stream into nothing; `descriptor`, if it is free, gets one too, or the next file
    that is opened would take it.
    """
    stream = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the program)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(stream.fileno(), descriptor)
    return stream


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Within this context, while a program is loaded, Ctrl-C ends it without a traceback.

    Python would raise KeyboardInterrupt in the middle of an import.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

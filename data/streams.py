"""Standard output and standard error can be lost: the reader of a pipe exits, a disk is full, or a
terminal is closed.

Within `lasting`, printing never fails. After the first write that fails, the stream discards
everything, and the function `lost` is called once. `train.py` records the loss and continues; every
other program ends (`end_quietly`).
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# The exit status that a shell reports if SIGPIPE ended a program.
SIGPIPE_STATUS = 128 + 13


class OutputLost(SystemExit):
    """Ends a program whose standard output is lost. `except Exception` does not catch it."""


class Lasting:
    """A text stream that discards everything once a write has failed.

    `lost` is called once, with the stream's `name` and the error.
    """

    def __init__(self, stream: TextIO, name: str, lost: Callable[[str, Exception], None]):
        self.stream, self.name, self.lost = stream, name, lost
        self.is_lost = False

    def write(self, text: str) -> int:
        """Write to the stream, or discard the text if it is lost; return the length of the text.

        A character that the stream's encoding lacks is written as "?".
        """
        try:
            self._attempt(self.stream.write, text)
        except UnicodeEncodeError:
            # The error's encoding can be "charmap", which stands for any of Windows' code pages.
            encoding = self.stream.encoding
            self._attempt(self.stream.write, text.encode(encoding, "replace").decode(encoding))
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
            pass  # a terminal that cannot keep up: this text is lost, but later ones may not be
        except (OSError, ValueError) as error:  # ValueError: a closed file
            self.is_lost = True
            self._point_to_nothing()
            self.lost(self.name, error)

    def _point_to_nothing(self) -> None:
        """Redirect the descriptor to /dev/null.

        Otherwise the interpreter would try to write what is still buffered when it exits.
        """
        with suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)


@contextmanager
def lasting(lost: Callable[[str, Exception], None]) -> Iterator[None]:
    """Within this context standard output and standard error are `Lasting`.

    A stream that was closed when the program started (`>&-`) counts as lost.
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
    """End the program if standard output is lost.

    If the reader of a pipe has exited, the program ends without a message, as `cat` does in
    `cat FILE | head`. If the output was closed on purpose (`>&-`), or if only standard error is
    lost, the program continues.
    """
    number = getattr(error, "errno", None)
    if name == "standard output" and number == errno.EPIPE:
        raise OutputLost(SIGPIPE_STATUS)
    if name == "standard output" and number != errno.EBADF:
        raise OutputLost(f"{name}: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Return why a write failed, e.g. "Broken pipe"."""
    return getattr(error, "strerror", None) or str(error)


def _nothing(descriptor: int) -> TextIO:
    """Return a stream to /dev/null.

    If `descriptor` is closed it is opened to /dev/null as well. Otherwise the next file that is
    opened would get this descriptor.
    """
    # It stays open as long as the program lives.
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(stream.fileno(), descriptor)
    return stream


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Within this context Ctrl-C ends the program without a traceback.

    It is for the imports of a program: Python would raise KeyboardInterrupt in one of them.
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

"""Messages: text that is safe to show, errors that the user can correct, and how a program is
started and ends.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

# What torch says if the memory of the host or of a GPU is not enough. The last comes from oneDNN,
# which multiplies matrices on a CPU.
_MEMORY = re.compile("allocate memory|out of memory|ALLOC_FAILED|could not create a primitive")

# The longest line for the user, in characters.
LONGEST = 1_000


def escape_control(text: str) -> str:
    """Return `text` on one line, with unprintable characters spelled out.

    >>> escape_control("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():  # as most texts are, and much faster
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable(text: str) -> str:
    """Return `text` with its line breaks, and everything else unprintable spelled out."""
    return "\n".join(map(escape_control, text.split("\n")))


def quoted(path: object) -> str:
    """Return a path as a shell takes it, e.g. ``'runs/two words'``; escaped as `escape_control`."""
    return escape_control(shlex.quote(str(path)))


def shortened(text: str, most: int = 80) -> str:
    """Return `text` escaped, without its middle if it has more than `most` characters.

    >>> shortened("one two three four five", 11)
    'one t … five'
    """
    shown = escape_control(text)
    if len(shown) <= most:
        return shown
    half = most // 2
    return f"{shown[:half]} … {shown[-half:]}"


def shown(value: object) -> str:
    """Return the `repr` of a user's value, shortened."""
    return shortened(repr(value))


class UserError(ValueError):
    """One line for the user: what is wrong, where, and what would be right.

    A value of the user's may have line breaks or any length, so the text is escaped, and loses its
    middle if it is longer than LONGEST.
    """

    def __str__(self) -> str:
        return shortened(super().__str__(), LONGEST)


class EngineError(UserError):
    """A sampler of the user's choice failed (`grpo.rollout.engine`); the run is saved first."""


def command_of(name: str) -> str:
    """Return how the program "train", "eval", "inspect", "report", "export" or "audit" is started
    in the working directory: from the checkout, or by the installed command if the user did that or
    there is no checkout.
    """
    top, started = Path(__file__).parents[2], Path(sys.argv[0])
    if started.name.startswith("grpo-") or not (top / "train.py").is_file():
        return f"grpo-{name}"

    folder = os.path.relpath(top)
    if name in ("train", "eval"):
        return f"python {quoted(Path(folder, f'{name}.py'))}"
    # Elsewhere, Python has found this package beside the script alone.
    is_beside = folder != "." and started.resolve().parent == top.resolve()
    place = f"PYTHONPATH={quoted(folder)} " if is_beside else ""
    return f"{place}python -m grpo.{'tasks.' if name == 'audit' else ''}{name}"


class Parser(argparse.ArgumentParser):
    """A command line parser that raises UserError for what it cannot parse.

    It prints a description as it is written, and takes no abbreviated flags.
    """

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=raw, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the parser's message."""
        raise UserError(f"{message}; {self.prog} --help lists the flags")


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise UserError, which begins with `what`, for any exception of the block.

    The block reads what others have written; `what` names the file and says what it should be.
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
    """Import `package` within this block. If it is missing, UserError names the `extra` that
    installs it; `where` is the flag that needs it.
    """
    try:
        yield
    except ImportError as error:
        missing = f"{error.name or package} is not installed"
        is_wheel = command_of("train") == "grpo-train"
        what = f"'grpo-interleave[{extra}]'" if is_wheel else f"-c constraints.txt -e '.[{extra}]'"
        raise UserError(f"{where and where + ': '}{missing}; pip install {what}") from error


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error says that the memory of the host or of a GPU is not enough.

    Torch raises OutOfMemoryError, and other kinds of RuntimeError where it asks cuBLAS or the host.
    """
    return isinstance(error, MemoryError) or bool(_MEMORY.search(str(error)))


def exit_status(program: str, action: Callable[[], int]) -> int:
    """Return the exit status of a `program`: that of `action`, unless it fails.

    An error of the user or the disk, or a lack of memory, is printed as one line, and the status is
    2. Numbers that are not finite are printed in the same way, with status 1. After Ctrl-C the
    status is 130, and 141 if the reader of a pipe has left, as `head` does.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # what the encoding lacks is written as "?"
    status = 2
    try:
        if sys.platform == "win32":
            raise UserError("Windows is not supported; use its Linux subsystem (WSL)")
        if sys.flags.optimize > 1:
            raise UserError("transformers needs docstrings; unset PYTHONOPTIMIZE, leave out -OO")
        found = action()
        print(end="", flush=True)  # now: a failure at the end of the interpreter has no status
        return found
    except UserError as error:
        line = str(error)
    except FloatingPointError as error:
        line, status = f"stopped: {error}", 1
    except KeyboardInterrupt:
        line, status = "interrupted", 128 + signal.SIGINT
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        said = shortened(" ".join(str(error).split()), 200)
        line = f"this machine's memory is not enough{f' ({said})' if said else ''}"
    except BrokenPipeError:
        _discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        line = f"{error.filename or 'standard output'}: {error.strerror or error}"
        if not error.filename:
            _discard(sys.stdout)
    print(f"{program}: {escape_control(line)}", file=sys.stderr)
    return status


@contextmanager
def importing() -> Iterator[None]:
    """Import torch or transformers within this block, and let Ctrl-C wait for the end of it.

    An import that is broken off can leave half a module, which crashes when it is used. The signal
    is not blocked, because another thread, such as one of numpy's, would take it.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return

    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def _discard(stream: Any) -> None:
    """Send nowhere what a stream that cannot be written still holds, and whatever follows.

    The interpreter would try to write it when it exits.
    """
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


class Lasting:
    """A text stream that discards what can no longer be written.

    A terminal may be closed or a pipe's reader leave while a model is trained, which goes on.
    """

    def __init__(self, stream: TextIO | None):
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write `text`, or discard it; return its length."""
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self.stream.flush)

    def _try(self, action: Callable, *arguments: str) -> None:
        try:
            action(*arguments)
        except (OSError, ValueError):  # ValueError: a closed file
            _discard(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

"""The exception for errors that the user can correct, and how a program ends on one."""

import argparse
import difflib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from data.streams import OutputLost, end_quietly, lasting
from data.text import escape_control, shortened

# What torch says if the memory of the host or of a GPU is not enough.
_MEMORY = re.compile("allocate memory|out of memory")


# The longest line for the user, in characters.
LONGEST = 1_000


class UserError(ValueError):
    """One line for the user: what is wrong, where, and what would be right.

    The programs print it and exit with status 2. A value of the user's may have line breaks or
    any length, so the text is escaped, and loses its middle if it is longer than LONGEST.
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


def exit_status(
    program: str,
    action: Callable[[], int],
    on_lost: Callable[[str, Exception], None] = end_quietly,
) -> int:
    """Return the exit status of a `program`: that of `action`, unless it fails.

    An error of the user or the disk, or a lack of memory, is printed as one line, and the status is
    2. Numbers that are not finite are printed in the same way, with status 1. After Ctrl-C the
    status is 130.

    `on_lost` is called when standard output or error can no longer be written. By default that ends
    the program: silently with status 141 if the reader of a pipe has left, otherwise with one line
    and status 2.
    """
    with lasting(on_lost):
        try:
            try:
                return _status_of(program, action)
            finally:
                # Now, because a failure at the end of the interpreter cannot be handled.
                sys.stdout.flush()
        except OutputLost as lost:
            if isinstance(lost.code, int):
                return lost.code
            print(f"{program}: {lost.code}", file=sys.stderr)
            return 2


def _status_of(program: str, action: Callable[[], int]) -> int:
    def say(line: str) -> None:
        print(f"{program}: {escape_control(line)}", file=sys.stderr)

    try:
        if sys.platform == "win32":
            raise UserError("Windows is not supported; use its Linux subsystem (WSL)")
        if sys.flags.optimize > 1:
            raise UserError(
                "PYTHONOPTIMIZE=2 or -OO removes docstrings, which transformers needs; unset it, "
                "or use 1 or -O"
            )
        return action()
    except UserError as error:
        say(str(error))
    except FloatingPointError as error:
        say(f"stopped: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    except (MemoryError, RuntimeError) as error:
        # Torch reports a lack of memory by a RuntimeError.
        if not isinstance(error, MemoryError) and not _MEMORY.search(str(error)):
            raise
        said = shortened(" ".join(str(error).split()), 200)
        say(f"this machine's memory is not enough{f' ({said})' if said else ''}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"{where}{error.strerror or error}")
    return 2

"""The one exception for mistakes that the user can mend, and how a program ends on one."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from data.streams import OutputLost, end_quietly, lasting


class UserError(ValueError):
    """One line for the user: what is wrong, where, and what would be right. The programs print it
    and exit with 2.
    """


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are UserErrors, of one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the parser's message."""
        raise UserError(f"{message}; {self.prog} --help lists the flags")


@contextmanager
def needs(package: str, extra: str, where: str = "") -> Iterator[None]:
    """Within this context `package`, of the extra that is called `extra`, is imported: where it is
    missing, UserError says so and what to do.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{where and where + ': '}{package} is not installed; pip install -c constraints.txt "
            f"-e '.[{extra}]'"
        ) from error


def exit_status(
    program: str,
    action: Callable[[], int],
    on_lost: Callable[[str, Exception], None] = end_quietly,
) -> int:
    """Return what `action` returns; where the user or the disk is at fault, print that in one line
    of the `program` and return 2; where numbers are not finite, likewise and 1.

    `on_lost` is told when standard output or error can no longer be written. By default that ends
    the program: with 141, and no word, where the reader of a pipe has left, else with one line and
    2.
    """
    with lasting(on_lost):
        try:
            try:
                return _status_of(program, action)
            finally:
                # here, and not when the interpreter ends, a failure can be answered
                sys.stdout.flush()
        except OutputLost as lost:
            if isinstance(lost.code, int):
                return lost.code
            print(f"{program}: {lost.code}", file=sys.stderr)
            return 2


def _status_of(program: str, action: Callable[[], int]) -> int:
    try:
        return action()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except FloatingPointError as error:
        print(f"{program}: stopped: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror or error}", file=sys.stderr)
    return 2

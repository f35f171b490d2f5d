"""Locks: of a run, so that only one process writes its directory, and of single files."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from data.errors import UserError
from data.files import open_own

try:
    import fcntl
except ImportError:  # on Windows there is no lock
    fcntl = None  # type: ignore[assignment]  # the standard way to mark a missing module


# Files that are locked now. A forked process inherits the lock with the open file, and would still
# hold it when this process has been killed.
_HELD: set[IO[str]] = set()


def _let_go() -> None:
    """Close the locked files in a process that has just been forked; the lock stays with us."""
    for file in _HELD:
        file.close()
    _HELD.clear()


if fcntl:
    os.register_at_fork(after_in_child=_let_go)


def wait_for(file: IO[Any]) -> None:
    """Lock an open file until it is closed, once no other process has locked it.

    On a file system without locks it stays unlocked.
    """
    if fcntl:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def _note_owner(file: IO[str], path: Path) -> None:
    """Write our process id and host into the lock file, for whoever finds it locked."""
    try:
        file.truncate(0)
        # Past the buffer, which would be written again, and fail again, when the file is closed.
        os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _owner(file: IO[str]) -> str:
    """Return the process that has locked the file: "process 123 on host"."""
    file.seek(0)
    return f"process {file.read().strip() or '?'}"


def owner_of(folder: Path) -> str:
    """Return the process that is training the run in `folder`, e.g. "process 123 on host", or "".

    A file system without locks does not tell.
    """
    path = folder / ".lock"
    if not fcntl or not path.is_file():
        return ""
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner(file)
        except OSError:
            return ""
    return ""


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Lock `folder` until the block or the process ends; yield a warning, or "".

    Some network file systems have no locks (Lustre without the option `flock`). There the block
    runs without one, and the warning says so. Raises UserError if another process has locked it.
    """
    warning = ""
    with open_own(folder / ".lock", "a+") as file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{folder}: {_owner(file)} is training this run; wait for its end, or start "
                    "another run with --name"
                ) from error
            except OSError as error:
                warning = (
                    f"{folder}: its file system has no locks ({error.strerror}): make sure that no "
                    "other process continues this run meanwhile"
                )
            _note_owner(file, folder / ".lock")
        _HELD.add(file)
        try:
            yield warning
        finally:
            _HELD.discard(file)

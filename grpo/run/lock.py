"""One process a run: the second that would write the same directory is refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.base import UserError

try:
    import fcntl
except ImportError:  # not on Windows: there nobody is refused
    fcntl = None  # type: ignore[assignment]  # the standard way to mark a missing module


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` to the end of the block, or of the process, whichever way it ends. Raises
    UserError where another process holds it.
    """
    with open(folder / ".lock", "a+") as file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    f"{folder}: process {file.read().strip() or '?'} is training this run; let it "
                    "end, or start another with --name"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield

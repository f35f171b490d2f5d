"""The directory of a run: choose a new one, lock it, and keep other programs' output out of it."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from data.errors import UserError
from data.files import kind_of, open_own
from data.text import quoted
from grpo.config import Config

try:
    import fcntl
except ImportError:  # on Windows there is no lock
    fcntl = None  # type: ignore[assignment]  # the standard way to mark a missing module

# Where runs are written.
HOME = Path("runs")

# What a run writes before it has a result.
BEGINNING = {".lock", "config.yaml", "prompt.txt", "warnings.log"}

# The name of a checkpoint's folder.
CHECKPOINT = re.compile(r"step-(\d{6,})")


def new_folder(home: Path, config: Config) -> Path:
    """Return a directory that does not exist yet, named after task, level and seed."""
    parts = [re.sub(r"[^a-z0-9]+", "-", config.task.rpartition(":")[2].lower())]
    for value in config.task_options.values():
        if "," not in value:  # a list of numbers says little
            stem = Path(value.partition(":")[0]).stem.lower()
            parts.append(re.sub(r"[^a-z0-9-]", "", stem)[:60])
    if config.level:
        parts.append(str(config.level))
    if config.problems != "fresh":
        parts.append(config.problems.replace(":", ""))
    parts += [*config.mark.values(), f"seed{config.seed}"]

    base = parts[0] + "".join(f"-{part}" for part in parts[1:] if part)
    names = [base, *(f"{base}-{number}" for number in range(2, 10_000))]
    return next(home / name for name in names if not (home / name).exists())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match[1])


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints by step, damaged ones included."""
    folders = (Path(run) / "checkpoints").glob("step-*")
    return sorted((path for path in folders if CHECKPOINT.fullmatch(path.name)), key=step_of)


def is_empty(folder: Path) -> bool:
    """Return whether a run has no result yet."""
    return {path.name for path in folder.iterdir()} <= BEGINNING


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that has ended before it had a result."""
    with suppress(OSError):
        if is_empty(folder):
            shutil.rmtree(folder)


def resume_hint(folder: Path) -> str:
    """Return how to continue a run that ends here: from its last checkpoint, if there is one."""
    if checkpoint_folders(folder):
        return f"continue with --resume {quoted(folder)}"
    if not folder.exists() or is_empty(folder):
        return "start it again"
    return f"start it again after rm -r {quoted(folder)}, because it has no checkpoint yet"


def check_output(path: str, flag: str) -> None:
    """Raise UserError if `flag` names a file that can surely not be written.

    Called before a long computation whose result goes there.
    """
    if "\0" in path:
        raise UserError(f"{flag} {path}: has a null byte; give the path of a file")
    target = Path(path).absolute()
    if kind_of(target) == "folder":
        raise UserError(f"{flag} {path}: is a directory; give the path of a file")
    try:
        os.stat(target.with_name(f"{target.name}{20 * '_'}"))  # it is written under a longer name
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror}") from error

    if kind_of(target):
        _refuse_file_of_run(target, f"{flag} {path}")
        return
    folder = next(one for one in target.parents if kind_of(one))
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot be written, because of {folder}")


def _refuse_file_of_run(target: Path, named: str) -> None:
    """Raise UserError if the existing file `target` belongs to a run."""
    parents = [one.parent for one in target.parents if one.name in ("checkpoints", "rollouts")]
    if target.suffix in (".yaml", ".jsonl", ".txt", ".log"):
        parents.append(target.parent)
    for run in parents:
        if (run / "config.yaml").exists():
            raise UserError(
                f"{named}: belongs to the run in {run}, and would be overwritten; give another path"
            )


# --- locks ------------------------------------------------------------------------------------

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


def _owner(file: IO[str]) -> str:
    """Return the process that has locked the file: "process 123 on host"."""
    file.seek(0)
    return f"process {file.read().strip() or '?'}"


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


def _note_owner(file: IO[str], path: Path) -> None:
    """Write our process id and host into the lock file, for whoever finds it locked."""
    try:
        file.truncate(0)
        # Past the buffer, which would be written again, and fail again, when the file is closed.
        os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error

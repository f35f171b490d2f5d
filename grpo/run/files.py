"""The folder of a run: its name, its lock, and which files belong to it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.errors import UserError, quoted
from data.files import kind_of, open_own
from grpo.config import Config

# Where runs are written.
HOME = Path("runs")

# What a run writes before it has a result.
BEGINNING = {".lock", "config.yaml", "prompt.txt", "warnings.log"}

# The name of a checkpoint's folder.
CHECKPOINT = re.compile(r"step-(\d{6,})")


def new_folder(config: Config) -> Path:
    """Return a directory that does not exist yet, named after task, level and seed."""
    parts = [config.task.rpartition(":")[2]]
    for value in config.task_options.values():
        if "," not in value:  # a list of numbers says little
            parts.append(Path(value.partition(":")[0]).stem[:60])
    level = [str(config.level)] if config.level else []
    parts += [*level, *config.mark.values(), f"seed{config.seed}"]

    base = "-".join(filter(None, (re.sub(r"[^a-z0-9-]+", "-", part.lower()) for part in parts)))
    names = [base, *(f"{base}-{number}" for number in range(2, 10_000))]
    return next(HOME / name for name in names if not (HOME / name).exists())


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match[1])


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints by step, damaged ones included."""
    folders = (Path(run) / "checkpoints").glob("step-*")
    return sorted((path for path in folders if CHECKPOINT.fullmatch(path.name)), key=step_of)


def resume_hint(folder: Path) -> str:
    """Return how to continue a run that ends here: from its last checkpoint, if there is one."""
    if checkpoint_folders(folder):
        return f"continue with --resume {quoted(folder)}"
    if not folder.exists() or _is_empty(folder):
        return "start it again"
    return f"start it again after rm -r {quoted(folder)}, because it has no checkpoint yet"


def _is_empty(folder: Path) -> bool:
    """Return whether a run has no result yet."""
    return {path.name for path in folder.iterdir()} <= BEGINNING


def check_output(path: str, flag: str) -> None:
    """Raise UserError, before a long computation, if `flag` names a file that cannot be written."""
    target = Path(path).absolute()
    if kind_of(target) == "folder":
        raise UserError(f"{flag} {path}: is a directory; give the path of a file")

    folder = next(one for one in target.parents if kind_of(one))
    if not kind_of(target) and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot be written, because of {folder}")


@contextmanager
def new_run(folder: Path) -> Iterator[None]:
    """Make the folder of a run, and remove it at the end of the block if it has no result."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        way = f"--resume {quoted(folder)}"
        if not checkpoint_folders(folder):
            way = f"remove it (rm -r {quoted(folder)})"
            with locked(folder):  # unless it is being trained
                pass
        raise UserError(
            f"--name {folder.name}: {folder} exists; give another name, or {way}"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_empty(folder):
                shutil.rmtree(folder)
                folder.parent.rmdir()  # unless other runs are there


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block or the process ends; UserError if another process has.

    Some network file systems have no locks (Lustre without the option `flock`).
    """
    import fcntl  # not on Windows, which `exit_status` refuses

    with open_own(folder / ".lock", "a") as file:
        # A forked process, such as a reward's, inherits the open file, and with it the lock, which
        # it would still hold when this process has been killed.
        os.register_at_fork(after_in_child=file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another process is training this run; wait for its end, or start "
                "another run with --name"
            ) from error
        except OSError:
            pass
        yield

"""The directory of a run: choose a new one, find the latest one, and keep others' output out."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from data.errors import UserError
from data.files import kind_of
from data.text import quoted
from grpo.config import Config

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


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run has a checkpoint, valid or not."""
    return any((folder / "checkpoints").glob("step-*"))


def is_empty(folder: Path) -> bool:
    """Return whether a run has no result yet."""
    return {path.name for path in folder.iterdir()} <= BEGINNING


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that has ended before it had a result."""
    with suppress(OSError):
        if is_empty(folder):
            shutil.rmtree(folder)


def way_on(folder: Path) -> str:
    """Return how to go on with a run that ends here: from its last checkpoint, if there is one."""
    if has_checkpoint(folder):
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

    first, *others = Path(path).parts or (".",)
    if first.startswith("~") and others and not kind_of(first):
        raise UserError(
            f"{flag} {path}: only a shell replaces {first}, and not behind a =; give the whole path"
        )

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
        of_run = [
            one.parent
            for one in target.parents
            if one.name in ("checkpoints", "rollouts") and (one.parent / "config.yaml").exists()
        ]
        if target.suffix in (".yaml", ".jsonl", ".txt", ".log"):
            of_run += [target.parent] if (target.parent / "config.yaml").exists() else []
        if of_run:
            raise UserError(
                f"{flag} {path}: belongs to the run in {of_run[0]}, and would be overwritten; give "
                "another path"
            )
        return
    folder = next(one for one in target.parents if kind_of(one))
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path}: cannot be written, because of {folder}")

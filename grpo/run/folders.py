"""Choose the directory of a new run, and find that of the latest one."""

import os
import re
from pathlib import Path

from grpo.config import Config
from tasks.base import UserError


def new_folder(home: Path, config: Config) -> Path:
    """Return a directory that does not exist yet, named after task, level and seed."""
    parts = [re.sub(r"[^a-z0-9]+", "-", config.task.rpartition(":")[2].lower())]
    for value in config.task_options.values():
        if "," not in value:  # a list of numbers says little
            stem = Path(value.partition(":")[0]).stem.lower()
            parts.append(re.sub(r"[^a-z0-9-]", "", stem))
    if config.level:
        parts.append(str(config.level))
    if config.problems != "fresh":
        parts.append(config.problems.replace(":", ""))
    parts += [*config.mark.values(), f"seed{config.seed}"]

    base = parts[0] + "".join(f"-{part}" for part in parts[1:] if part)
    names = [base, *(f"{base}-{number}" for number in range(2, 10_000))]
    return next(home / name for name in names if not (home / name).exists())


def latest_run(home: Path) -> Path:
    """Return the run below `home` that was started or resumed last.

    Raises UserError if there is no run.
    """
    runs = [path for path in home.glob("*") if (path / "config.yaml").exists()]
    if not runs:
        raise UserError(
            f"--resume: no run in {home}{os.sep} to continue; start one without --resume"
        )
    return max(runs, key=lambda path: (path / "config.yaml").stat().st_mtime)

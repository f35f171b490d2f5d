"""Open a run: a new one, or one that continues from its latest valid checkpoint."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import read_yaml
from data.text import is_encodable, quoted, shortened
from grpo.config import (
    ON_RESUME,
    Config,
    load_config,
    names_in,
    programs_in,
    require_trusted,
    spelled,
)
from grpo.distributed import SINGLE, Ranks
from grpo.run.checkpoint import checkpoints, find_resume
from grpo.run.folders import has_checkpoint, new_folder, step_of
from grpo.run.lock import owner_of
from grpo.run.schemas import ConfigFile, check
from grpo.run.start import start_from
from tasks.registry import REWARD_FILE, is_same_program

# Task options that decide no result, and so may change when a run goes on.
FREE_OPTIONS = ("reward-timeout", "reward-workers")


@dataclass(frozen=True)
class OpenedRun:
    """Where a run is written, and what it continues.

    - `checkpoint`: where a resumed run continues; None for a new run;
    - `warnings`: what the user should know about the checkpoint;
    - `checkpoints`: the names of all its checkpoints when it was opened;
    - `found`: the settings in config.yaml of a resumed run;
    - `accept`: the kinds of sources that may have changed since the checkpoint was saved.
    """

    folder: Path
    checkpoint: Path | None = None
    warnings: Sequence[str] = ()
    checkpoints: frozenset[str] = frozenset()
    found: Mapping[str, Any] = field(default_factory=dict)
    accept: Sequence[str] = ()


def open_run(
    config: Config, given: dict[str, Any], *, home: Path, ranks: Ranks = SINGLE
) -> tuple[OpenedRun, Config]:
    """Return the run and its configuration: a new one below `home`, or the one of --resume.

    `given` are the settings on the command line. Raises UserError if the new run's folder exists,
    or if a flag differs from a setting that a resumed run cannot change.
    """
    if config.resume is None:
        return _open_new(config, given, home, ranks)
    return _open_resumed(config, given, home)


def _open_new(
    config: Config, given: dict[str, Any], home: Path, ranks: Ranks
) -> tuple[OpenedRun, Config]:
    """Return a run in a new folder. Raises UserError if the folder exists."""
    if config.accept_changes:
        raise UserError("--accept-changes: applies only with --resume; leave it out")
    config, warnings = start_from(config, given)

    named = home / config.name if config.name else None
    folder = ranks.on_rank0(lambda: named or new_folder(home, config))
    require_unicode(folder)
    if ranks.on_rank0(folder.exists):
        raise UserError(f"--name {config.name}: {folder} exists; {_other_ways(folder)}")
    return OpenedRun(folder, warnings=warnings), config


def require_unicode(folder: Path) -> None:
    """Raise UserError unless the whole path of `folder` is UTF-8.

    The libraries that write models cannot write to any other, and would say so after the first
    steps.
    """
    if not is_encodable(str(folder.absolute())):
        raise UserError(
            f"{folder.absolute()}: the path is not UTF-8, so models cannot be written there; start "
            "in another folder, or give another name"
        )


def _other_ways(folder: Path) -> str:
    """Return what to do about a folder that already exists."""
    shown = quoted(folder)
    valid, damaged = checkpoints(folder)
    if valid:
        return f"give another name, or --resume {shown}"
    if owner := owner_of(folder):
        return f"{owner} is training it: give another name"
    if damaged:
        return f"its checkpoints are not valid ({damaged[-1]}): give another name"
    return f"it has no checkpoint: give another name, or remove it (rm -r {shown})"


def require_unchanged(opened: OpenedRun) -> None:
    """Raise UserError if a resumed run, which is locked now, was continued since it was opened.

    To continue it from the older checkpoint would remove the other process's steps.
    """
    if _checkpoint_names(opened.folder) != opened.checkpoints:
        raise UserError(
            f"{opened.folder}: another process has continued this run meanwhile; give --resume "
            "again"
        )


def latest_run(home: Path) -> Path:
    """Return the run below `home` that has a checkpoint and was started, or resumed, last.

    Raises UserError if there is none.
    """
    runs = [
        path for path in home.glob("*") if (path / "config.yaml").exists() and has_checkpoint(path)
    ]
    if not runs:
        raise UserError(
            f"--resume: no run in {home}{os.sep} has a checkpoint to continue from; start one "
            "without --resume"
        )
    return max(runs, key=_last_start)


def _last_start(run: Path) -> str:
    """Return when a run was started or resumed last, as its config.yaml says; "" if it does not."""
    path = run / "config.yaml"
    values = read_yaml(path)
    check(str(path), values, ConfigFile)
    facts: Mapping[str, Any] = values.get("facts", {})
    return max(str(one.get("started", "")) for one in (facts, *facts.get("resumed", ())))


def _find_checkpoint(resume: str, home: Path) -> tuple[Path, list[str]]:
    """Return what `find_resume` does for a path, or for the latest run below `home` ("latest")."""
    return find_resume(latest_run(home) if resume == "latest" else Path(resume))


def saved_options(resume: str, home: Path) -> dict[str, str]:
    """Return the task's options in the run that `resume` names."""
    checkpoint, _ = _find_checkpoint(resume, home)
    return load_config(checkpoint.parent.parent / "config.yaml").task_options


def _require_same_options(
    folder: Path, options: Mapping[str, str], saved: Mapping[str, str]
) -> None:
    """Raise UserError, which names the first one, if an option differs from the `saved` one."""
    for name, value in options.items():
        if name not in FREE_OPTIONS and value != saved.get(name):
            raise UserError(
                f"--{name} {shortened(value)}: the run in {folder} has "
                f"{shortened(saved.get(name, '')) or 'none'}; with --resume only "
                f"{', '.join(FREE_OPTIONS)} can be changed"
            )


def _checkpoint_names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in (folder / "checkpoints").glob("step-*"))


def _open_resumed(config: Config, given: dict[str, Any], home: Path) -> tuple[OpenedRun, Config]:
    """Return the run that --resume names, with the settings that it may change."""
    assert config.resume is not None
    checkpoint, warnings = _find_checkpoint(config.resume, home)
    folder = checkpoint.parent.parent
    require_unicode(folder)
    before = _checkpoint_names(folder)

    steps = given.get("steps")
    done = step_of(checkpoint)
    if steps is not None and steps < done:
        raise UserError(
            f"--steps {steps}: the run in {folder} has made {done} steps; give more, or leave the "
            "flag out"
        )

    saved = dataclasses.asdict(load_config(folder / "config.yaml"))
    require_trusted(saved, programs_in(given), folder)

    # Task options that are left out stay as they are.
    if "task_options" in given:
        options = saved["task_options"] | given["task_options"]
        if is_same_program(options.get(REWARD_FILE), saved["task_options"].get(REWARD_FILE)):
            options[REWARD_FILE] = saved["task_options"][REWARD_FILE]
        _require_same_options(folder, options, saved["task_options"])
        given = given | {"task_options": options}
    for name in ("task", "loss"):
        if is_same_program(given.get(name), saved[name]):
            given = given | {name: saved[name]}

    changed = {
        name: value
        for name, value in given.items()
        if name not in ("resume", "accept_changes") and value != saved[name]
    }
    for name, value in changed.items():
        if name not in (*ON_RESUME, "task_options"):
            raise UserError(
                f"{spelled(name)} {shortened(str(value))}: the run in {folder} has "
                f"{shortened(str(saved[name])) or 'none'}; with --resume only "
                f"{', '.join([*ON_RESUME, *FREE_OPTIONS])} can be changed"
            )

    accept = names_in(config.accept_changes)
    opened = OpenedRun(folder, checkpoint, warnings, before, saved, accept)
    return opened, Config(**{**saved, **changed})

"""The facts of a run: its time, device and versions."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from data.files import kind_of
from grpo.distributed import Ranks

LIBRARIES = ("torch", "transformers", "peft")

# The most threads for each core that a resumed run uses.
MAX_THREADS = 8


def facts(device: torch.device, ranks: Ranks, model: str) -> dict[str, Any]:
    """Return time, versions, device, commit and where the model comes from, for config.yaml."""
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = platform.processor() or "cpu"

    return {
        "started": datetime.now(UTC).isoformat(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": device_name,
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "is_local_model": bool(kind_of(model)),
    }


def commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of the repository of which `file` is a part.

    None if there is no such repository, or git is not installed. A package that was installed into
    an environment within somebody's repository is not a part of that.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=file.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def restore_threads(before: Mapping[str, Any], device: torch.device) -> str:
    """Compute on a CPU with as many threads as the run has used until now; return a warning, or "".

    The number of threads decides in which order sums are added, so with another number a resumed
    run is no longer the same to the last bit. `before` are the facts in its config.yaml.
    """
    threads = before.get("threads")
    if device.type != "cpu" or not threads or threads == torch.get_num_threads():
        return ""

    cores = os.cpu_count() or 1
    if threads > MAX_THREADS * cores:
        return (
            f"the run used {threads} threads, too many for {cores} cores; with "
            f"{torch.get_num_threads()} its sums are rounded differently"
        )
    torch.set_num_threads(threads)
    return ""


def changed_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a warning if torch or a model library is not the one that the run used last; or "".

    `before` are the facts in its config.yaml. Other versions may round differently, and then a
    resumed run is no longer the same to the last bit.
    """
    last = {**before, **(before.get("resumed") or [{}])[-1]}
    changes = [
        f"{name} {last[name]} → {now[name]}"
        for name in LIBRARIES
        if name in last and last[name] != now[name]
    ]
    if not changes:
        return ""
    return (
        f"the run used other versions until now, which may round differently: {', '.join(changes)}"
    )


def with_resumption(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the facts of a run that is started, or resumed after `step`.

    `before` are the facts in its config.yaml, empty for a new run; they stay as they are. Each
    resumption adds an entry to "resumed" with the facts that differ `now`.
    """
    if not before:
        return dict(now)

    # "stopped" says why the run ended before. It no longer holds.
    before = {name: value for name, value in before.items() if name != "stopped"}
    changed = {name: value for name, value in now.items() if value != before.get(name)}
    return {**before, "resumed": [*before.get("resumed", []), {"step": step, **changed}]}

"""The facts of a run: its time, device and versions."""

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from grpo.distributed import Ranks


def facts(device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """Return time, versions, device and commit, for config.yaml."""
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = platform.processor() or "cpu"

    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": device_name,
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "commit": git.stdout.strip() or None,
    }


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

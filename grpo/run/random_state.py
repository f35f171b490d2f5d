"""The state of the random generators of Python, NumPy and torch, for rng.json of a checkpoint."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.run.schemas import RngFile, read_checked


def rng_state() -> dict[str, Any]:
    """Return the state of the random generators of Python, NumPy and torch, for rng.json."""
    kind, keys, *numbers = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)

    cuda: list[list[int]] = []
    if torch.cuda.is_available():
        cuda = [state.tolist() for state in torch.cuda.get_rng_state_all()]

    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *numbers],
        "torch": torch.get_rng_state().tolist(),
        "cuda": cuda,
    }


def load_rng(folder: Path) -> None:
    """Restore the `rng_state` in rng.json of a checkpoint."""
    saved = read_checked(folder / "rng.json", RngFile)

    version, state, gauss = saved["python"]
    random.setstate((version, tuple(state), gauss))

    kind, keys, *numbers = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *numbers))

    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(
            [torch.tensor(state, dtype=torch.uint8) for state in saved["cuda"]]
        )

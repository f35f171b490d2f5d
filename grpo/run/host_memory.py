"""Copies of tensors in host memory, which are written while training changes the originals."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Share of the free host memory that copies may take, because training may need more later.
SHARE_OF_FREE = 0.5


class HostMemory:
    """Copies of tensors in host memory.

    Each call of `copy` overwrites the copies of the previous call, because the system has to zero
    and map new memory, which takes several times as long as the copy itself. Copies of GPU tensors
    are in page-locked memory.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def copy(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested dictionaries with a copy of each tensor, and everything else unchanged.

        Tensors that share memory (tied weights) share one copy. Raises MemoryError if there is not
        enough memory.
        """
        originals: dict[Hashable, tuple[tuple, Tensor]] = {}
        for path, tensor in _tensors(tree):
            originals.setdefault(_address(tensor), (path, tensor))
        self._make_room(dict(originals.values()))

        for path, tensor in originals.values():
            self._copies[path].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for _, tensor in originals.values()):
            torch.cuda.synchronize()

        def copied(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: copied(item) for key, item in value.items()}
            if isinstance(value, Tensor):
                return self._copies[originals[_address(value)][0]]
            return value

        return copied(tree)

    def _make_room(self, originals: Mapping[tuple, Tensor]) -> None:
        """Allocate a copy for each tensor that has none of the same shape and type."""
        new = {
            path: tensor
            for path, tensor in originals.items()
            if path not in self._copies or _kind(self._copies[path]) != _kind(tensor)
        }
        needed = sum(tensor.nbytes for tensor in new.values())
        try:
            if needed > SHARE_OF_FREE * free_host_memory():
                raise MemoryError
            for path, tensor in new.items():
                self._copies[path] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
        except (MemoryError, RuntimeError) as error:  # torch's, if page-locked memory runs out
            self._copies.clear()
            raise MemoryError(f"{needed / 1e9:.1f} GB") from error


def _tensors(tree: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield (path of keys, tensor) for each tensor in nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*path, key))


def _address(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors exactly if they are the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


def free_host_memory(system: Path = Path("/")) -> float:
    """Return how many bytes of the host's memory are still available.

    The kernel's figure counts, and the limit of the control group (version 2) if a container sets
    one. Infinite where neither is known, as on systems other than Linux. `system` is the root of
    the file system.
    """
    free = float("inf")
    with suppress(OSError):
        for line in (system / "proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])

    group = system / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # ValueError: the limit is "max", which is none
        limit = int((group / "memory.max").read_text("utf-8"))
        used = int((group / "memory.current").read_text("utf-8"))
        figures = dict(
            line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines()
        )
        # The kernel drops cached files when it needs their memory.
        cached = int(figures["inactive_file"]) + int(figures["active_file"])
        free = min(free, limit - used + cached)
    return free

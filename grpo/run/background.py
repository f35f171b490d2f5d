"""Save checkpoints in the background: copy the state to host memory, and write it in a thread.

Training waits only for the copy. The thread writes the files, computes their checksums and reads
them back; on a machine without a spare core this slows training down as well. One checkpoint is
written at a time. If the process is killed meanwhile, all earlier checkpoints remain, and the next
start removes the partial folder.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.run.checkpoint import prune, save_checkpoint
from grpo.run.checkpoint_rules import spacing_for
from grpo.run.interrupt import WRITER

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
        tensors = dict(_tensors(tree))
        firsts: dict[Hashable, tuple[Any, ...]] = {}
        first_of = {path: firsts.setdefault(_address(each), path) for path, each in tensors.items()}

        originals = {path: tensors[path] for path in firsts.values()}
        self._make_room(originals)
        for path, original in originals.items():
            self._copies[path].copy_(original, non_blocking=True)
        if any(original.is_cuda for original in originals.values()):
            torch.cuda.synchronize()

        return _replaced(tree, {path: self._copies[first] for path, first in first_of.items()})

    def _make_room(self, originals: Mapping[tuple[Any, ...], Tensor]) -> None:
        """Allocate a copy for each tensor that has none of the same shape and type."""
        new = {
            path: original
            for path, original in originals.items()
            if path not in self._copies or _kind(self._copies[path]) != _kind(original)
        }
        needed = sum(original.nbytes for original in new.values())
        if needed > SHARE_OF_FREE * free_host_memory():
            self._copies.clear()
            raise MemoryError(f"{needed / 1e9:.1f} GB")

        try:
            for path, original in new.items():
                self._copies[path] = torch.empty(
                    original.shape, dtype=original.dtype, pin_memory=original.is_cuda
                )
        except RuntimeError as error:  # torch raises it if page-locked memory runs out
            self._copies.clear()
            raise MemoryError(f"{needed / 1e9:.1f} GB") from error


def _tensors(tree: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield (path of keys, tensor) for each tensor in nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*path, key))


def _replaced(tree: Mapping, tensors: Mapping[tuple, Tensor], path: tuple = ()) -> dict:
    """Return the nested dictionaries `tree` with its tensors replaced by `tensors`, by path."""
    found = {}
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            found[key] = _replaced(value, tensors, here)
        else:
            found[key] = tensors.get(here, value)
    return found


def _address(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors exactly if they are the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: why it was saved, and how long that took.

    - `waiting`: seconds that training waited for the copy and for an earlier checkpoint;
    - `writing`: seconds until all files were read back;
    - `spacing`: steps between saves for a new best, see `checkpoint_rules.CheckpointRules`;
    - `removed`: a line for each older checkpoint that was removed;
    - `in_background`: False if training waited for `writing` as well.
    """

    path: Path
    reasons: Sequence[str]
    waiting: float
    writing: float
    spacing: int | None
    removed: Sequence[str]
    in_background: bool

    @property
    def line(self) -> str:
        """One line for the console: what was saved, and how long training waited."""
        cost = f"training waited {self.waiting + self.writing:.1f} s"
        if self.in_background:
            cost = (
                f"training waited {self.waiting:.1f} s; written in {self.writing:.1f} s in the "
                "background"
            )
        return f"checkpoint {self.path.name}: {'; '.join(self.reasons)} ({cost})"


@dataclass(frozen=True)
class Save:
    """A checkpoint to be written. Training changes nothing of what it holds.

    - `write`: writes the files of the state into a folder;
    - `waiting`, `spacing`, `in_background`: as in `Saved`;
    - `step_times`: seconds of the steps so far; they decide the spacing if that is None;
    - `keep`: the best checkpoint, if it must not be removed.
    """

    run: Path
    step: int
    write: Callable[[Path], None]
    reasons: Sequence[str]
    waiting: float
    spacing: int | None
    step_times: Sequence[float]
    keep: Path | None
    in_background: bool = True

    def __call__(self) -> Saved:
        """Write the checkpoint, and only then remove those that are no longer needed.

        Raises UserError if it cannot be written.
        """
        started = time.thread_time()
        noted: dict[str, Any] = {}

        def note(writing: float) -> dict[str, Any]:
            # In the background, training loses only the time in which the thread is busy.
            busy = time.thread_time() - started if self.in_background else writing
            lost = self.waiting + busy
            duration = self.waiting + writing
            spacing = self.spacing or spacing_for(lost, duration, self.step_times)
            noted.update(waiting=self.waiting, writing=writing, spacing=spacing)
            return {"reasons": self.reasons, **noted}

        path = save_checkpoint(self.run, self.step, self.write, note=note)
        removed = prune(self.run, keep_best=self.keep)
        return Saved(path, self.reasons, removed=removed, in_background=self.in_background, **noted)


class Writer:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._saved: Future[Saved] | None = None

    def start(self, save: Save) -> None:
        """Begin to write. The previous checkpoint must have been collected."""
        assert self._saved is None
        self._saved = Future()
        threading.Thread(target=_write, args=(save, self._saved), name=WRITER, daemon=True).start()

    def collect(self, *, wait: bool = False) -> Saved | None:
        """Return the checkpoint that was started last if it is complete, or raise its error.

        Each checkpoint is returned once. Returns None if there is none, or if it is still being
        written; with `wait`, waits until it is complete.
        """
        if self._saved is None or not (wait or self._saved.done()):
            return None
        saved, self._saved = self._saved, None
        return saved.result()


def _write(save: Save, saved: Future[Saved]) -> None:
    """Write a checkpoint in the thread; its result or its error goes to the future."""
    try:
        saved.set_result(save())
    except BaseException as error:
        saved.set_exception(error)


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

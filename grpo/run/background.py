"""Saving without holding up training: the state is copied into the host's memory, and a thread
writes the copy.

What a save costs training is the copy, and a core's work where it has no other to spare; the write
of gigabytes, its checksums and the reading back are the thread's. One job is under way at a time. A
run that is killed in the middle of one leaves a folder that the next start removes, and the
checkpoints before it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.model.memory import free_host_memory
from grpo.run.checkpoint import prune, save_checkpoint, spacing_for

SHARE_OF_FREE = 0.5  # of the free memory that copies may take: training may still grow
NAME = "checkpoint writer"


class HostMemory:
    """Copies of tensors in the host's memory.

    The copies of one call are overwritten by the next: memory that is used again has not to be
    zeroed and mapped by the system first, which takes several times as long as the copy itself. For
    tensors of a GPU it is page-locked.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def copy(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested dictionaries with a copy of each tensor, and everything else as it is.

        Tensors that are the same memory (tied weights) share one copy. Raises MemoryError where
        there is no room.
        """
        tensors = dict(_tensors(tree))
        firsts: dict[Hashable, tuple[Any, ...]] = {}
        first_of = {path: firsts.setdefault(_place(each), path) for path, each in tensors.items()}

        originals = {path: tensors[path] for path in firsts.values()}
        self._make_room(originals)
        for path, original in originals.items():
            self._copies[path].copy_(original, non_blocking=True)
        if any(original.is_cuda for original in originals.values()):
            torch.cuda.synchronize()

        return _replaced(tree, {path: self._copies[first] for path, first in first_of.items()})

    def _make_room(self, originals: Mapping[tuple[Any, ...], Tensor]) -> None:
        """Allocate a copy for each tensor that has none of its shape yet."""
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
        except RuntimeError as error:  # how torch says that memory could not be had
            self._copies.clear()
            raise MemoryError(f"{needed / 1e9:.1f} GB") from error


def _tensors(tree: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield (keys that lead there, tensor) for each tensor in nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*path, key))


def _replaced(tree: Mapping, tensors: Mapping[tuple, Tensor], path: tuple = ()) -> dict:
    """Return nested dictionaries with the `tensors` in the places of their own."""
    found = {}
    for key, value in tree.items():
        here = (*path, key)
        found[key] = (
            _replaced(value, tensors, here)
            if isinstance(value, Mapping)
            else tensors.get(here, value)
        )
    return found


def _place(tensor: Tensor) -> Hashable:
    """Return what two tensors have in common if and only if they are the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole: why it was saved, and what it cost in seconds."""

    path: Path
    reasons: Sequence[str]
    waiting: float  # training stood still, for the copy and for an earlier checkpoint
    writing: float  # until all files were read back
    spacing: int | None  # of saves for a new best (`checkpoint.CheckpointRules`)
    removed: Sequence[str]  # a line for each older checkpoint that made way
    in_background: bool  # or training stood still for `writing`, too

    @property
    def line(self) -> str:
        """What was saved, and what it cost, in one line."""
        cost = f"training waited {self.waiting + self.writing:.1f} s"
        if self.in_background:
            cost = (
                f"training waited {self.waiting:.1f} s; written in {self.writing:.1f} s in the "
                "background"
            )
        return f"checkpoint {self.path.name}: {'; '.join(self.reasons)} ({cost})"


@dataclass(frozen=True)
class Save:
    """A checkpoint to be written: all that the writer needs, nothing of which training changes."""

    run: Path
    step: int
    write: Callable[[Path], None]  # the files of the state, into a folder
    reasons: Sequence[str]
    waiting: float  # as in `Saved`
    spacing: int | None
    step_times: Sequence[float]  # in seconds, from which the spacing is chosen where it is None
    keep: Path | None  # the best checkpoint, where it is to stay
    in_background: bool = True

    def __call__(self) -> Saved:
        """Write the checkpoint, and only then remove those that need not stay. Raises UserError
        where it cannot be written.
        """
        begun = time.thread_time()
        noted: dict[str, Any] = {}

        def note(writing: float) -> dict[str, Any]:
            busy = time.thread_time() - begun if self.in_background else writing
            lost, under_way = self.waiting + busy, self.waiting + writing
            spacing = self.spacing or spacing_for(lost, under_way, self.step_times)
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
        """Begin to write; the checkpoint before must have been collected."""
        assert self._saved is None
        self._saved = Future()
        threading.Thread(target=_do, args=(save, self._saved), name=NAME, daemon=True).start()

    def collect(self, *, wait: bool = False) -> Saved | None:
        """Return the checkpoint that was started last, once it is whole, and once; or raise what
        stopped it.

        None where there is none, or it is still being written. With `wait` none is being written
        afterwards.
        """
        if self._saved is None or not (wait or self._saved.done()):
            return None
        saved, self._saved = self._saved, None
        return saved.result()


def _do(save: Save, saved: Future[Saved]) -> None:
    try:
        saved.set_result(save())
    except BaseException as error:
        saved.set_exception(error)


def end_process(status: int) -> None:
    """End the program with this exit status, at once where a checkpoint is being written (after a
    second Ctrl-C).

    The interpreter would tear down a thread that is writing from within Rust, which aborts the
    process (status 134).
    """
    if any(thread.name == NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)

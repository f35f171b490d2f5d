"""The ranks of a run: processes that share out the work of each step, `torchrun --nproc-per-node N
train.py ...`.

Every rank holds the whole policy and the whole state of the trainer, and all of them decide alike,
for what one finds out it tells the others before anything is decided. Shared out are the problems
to be sampled and scored and the completions to be learned from; what is added up are the
gradients. Only the first rank writes and speaks. A process that was not started by torchrun is the
first of one.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.base import UserError


class Ranks:
    """One of `size` processes, number `rank`. Every method but `share` is called by all of them,
    in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> list[Any]:
        """Return this rank's part of `items`: every `size`-th."""
        return list(items[self.rank :: self.size])

    def gather(self, mine: list[Any]) -> list[Any]:
        """Return the items of all ranks, in the order that they were shared out in."""
        if self.size == 1:
            return mine
        every: list[list[Any]] = [[]] * self.size
        with _together():
            dist.all_gather_object(every, mine)
        return [every[i % self.size][i // self.size] for i in range(sum(map(len, every)))]

    def first(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on the first rank, which alone calls it; nobody goes on
        before all are here.
        """
        return self.gather([make() if self.is_first else None])[0]

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return max(self.gather([number]))

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add up each of the `tensors`, which are of one kind, over the ranks, in place."""
        if self.size == 1:
            return
        with _together():
            for bundle in _bundles(tensors):
                if len(bundle) == 1:
                    dist.all_reduce(bundle[0])
                    continue
                flat = torch.cat([tensor.flatten() for tensor in bundle])
                dist.all_reduce(flat)
                torch._foreach_copy_(
                    bundle,
                    [
                        part.view_as(tensor)
                        for part, tensor in zip(flat.split([t.numel() for t in bundle]), bundle)
                    ],
                )

    def part(self, rows: int) -> slice:
        """Return which of so many rows are this rank's, where they are cut into equal parts, the
        last one shorter.
        """
        size = -(-rows // self.size)
        return slice(min(rows, self.rank * size), min(rows, (self.rank + 1) * size))

    def add_to_parts(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the rows of `tensor`, added up over the ranks."""
        rows, size = len(tensor), -(-len(tensor) // self.size)
        mine = tensor.new_empty(size, *tensor.shape[1:])
        with _together():
            dist.reduce_scatter_tensor(mine, _padded(tensor.contiguous(), size * self.size))
        part = self.part(rows)
        return mine[: part.stop - part.start]

    def whole(self, mine: Tensor, rows: int) -> Tensor:
        """Return all `rows` of a tensor of which each rank has its part."""
        size = -(-rows // self.size)
        whole = mine.new_empty(size * self.size, *mine.shape[1:])
        with _together():
            dist.all_gather_into_tensor(whole, _padded(mine.contiguous(), size))
        return whole[:rows]


def _bundles(tensors: Sequence[Tensor], most: int = 1 << 24) -> Iterator[list[Tensor]]:
    """Yield the tensors in bundles of up to `most` numbers: hundreds of small ones would take as
    many times the latency.
    """
    bundle: list[Tensor] = []
    for tensor in tensors:
        if bundle and sum(each.numel() for each in bundle) + tensor.numel() > most:
            yield bundle
            bundle = []
        bundle.append(tensor)
    if bundle:
        yield bundle


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return (
        tensor
        if len(tensor) == rows
        else torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
    )


ALONE = Ranks()
RANK, SIZE = (
    int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
)  # by torchrun


@contextmanager
def _together() -> Iterator[None]:
    """Say in one line that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            "another rank has ended, and its own line says why; go on with --resume"
        ) from error


@contextmanager
def meeting(device: str) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun started, each on a GPU of its own where `device` (cpu,
    cuda, auto) has GPUs; part at the end.
    """
    if SIZE == 1:
        yield ALONE
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()

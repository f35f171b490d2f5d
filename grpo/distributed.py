"""The processes of a run: the ranks that divide the work of each step among themselves, started by
`torchrun --nproc-per-node N train.py ...`, and the signals that end them.

Every rank holds the whole policy and the whole state of the trainer. The ranks exchange their
results before anything is decided, so they all decide alike. They divide the problems to sample and
score and the completions to learn from, and they add up their gradients. Only rank 0 writes files
and prints. A process that torchrun did not start is rank 0 of one.

Torch takes seconds to load, so only the functions that need it import it.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from grpo.data.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Signals of which a second one stops the run immediately, and others. A scheduler sends SIGUSR1
# when the time of a job is almost over (Slurm's --signal=USR1@120), and SIGTERM later.
STOPPING = (signal.SIGINT, signal.SIGTERM)
GENTLE = (signal.SIGHUP, signal.SIGUSR1)

# A signal that follows the first one within so many seconds is the same request: many programs send
# one twice, once to the process and once to its group (GNU `timeout` does).
SAME = 1.0

# What torchrun says. A RANK without a WORLD_SIZE means nothing; another job may have left it.
SIZE = int(os.environ.get("WORLD_SIZE") or 1)
RANK = int(os.environ.get("RANK") or 0) if SIZE > 1 else 0


class Ranks:
    """Process number `rank` of `size`.

    All ranks must call every method except `share`, in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank = rank
        self.size = size

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, the only one that writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> list[Any]:
        """Return this rank's share of `items`: every `size`-th, beginning with number `rank`."""
        return list(items[self.rank :: self.size])

    def gather(self, local: list[Any]) -> list[Any]:
        """Return the items of all ranks, in the order that they had before `share`."""
        if self.size == 1:
            return local
        import torch.distributed as dist

        by_rank: list[list[Any]] = [[]] * self.size
        dist.all_gather_object(by_rank, local)

        total = sum(map(len, by_rank))
        return [by_rank[i % self.size][i // self.size] for i in range(total)]

    def on_rank0(self, make: Callable[[], Any]) -> Any:
        """Call `make` only on rank 0, and return its result on every rank.

        No rank continues before all have arrived here.
        """
        return self.gather([make() if self.is_rank0 else None])[0]

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return max(self.gather([number]))

    def all_reduce(self, tensors: Sequence["Tensor"]) -> None:
        """Replace each tensor by its sum over the ranks."""
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            dist.all_reduce(tensor)


SINGLE = Ranks()


@contextmanager
def peer_errors() -> Iterator[None]:
    """Report in one line that another rank has ended, wherever this one exchanged data with it."""
    try:
        yield
    except RuntimeError as error:
        # NCCL has an exception of its own; gloo names its file.
        if type(error).__name__ != "DistBackendError" and "gloo/" not in str(error):
            raise
        raise UserError(
            "another rank has ended, and its own line says why; continue with --resume"
        ) from error


def join_ranks(device: str) -> Ranks:
    """Join the ranks that torchrun started, until the process ends; return this one.

    Each rank has a GPU of its own if there are any and `device` is not "cpu". Raises UserError if
    there are too few, or if the ranks do not find each other.
    """
    if SIZE <= 1:
        return SINGLE
    import torch
    import torch.distributed as dist

    if device != "cpu" and torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", RANK)), torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"rank {RANK} has no GPU of its own, because there are {count} here; give torchrun "
                f"--nproc-per-node {count}, or give --device cpu"
            )
        torch.cuda.set_device(local)

    # Once in a process: a second rendezvous can find addresses of the first.
    if not dist.is_initialized():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"the {SIZE} ranks do not meet at {where} ({str(error).splitlines()[0]}); start "
                "all of them with torchrun, or unset WORLD_SIZE, which another job may have left"
            ) from error
        atexit.register(_leave)
    return Ranks(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    """Destroy the process group, and first what holds it. Gloo's threads may own tensors; if they
    free them while the interpreter ends, the process is aborted (pytorch/pytorch#179291).
    """
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()


class Interrupt:
    """Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its current step, which is saved.

    The first of them within the `with` block is `wanted`. A second SIGINT or SIGTERM, after more
    than `SAME` seconds, goes to the handler that was there before, and ends the run immediately.
    SIGHUP stays ignored under nohup. Python can handle signals only in the main thread; in any
    other one nothing is recorded.
    """

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None
        self.time = 0.0  # of the first signal, by the monotonic clock
        self.earlier: dict[int, Any] = {}
        self.process = os.getpid()

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            gentle = [each for each in GENTLE if signal.getsignal(each) == signal.SIG_DFL]
            numbers = [*STOPPING, *gentle]
            self.earlier = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def renew(self) -> None:
        """Set all handlers again, also the one that ignores SIGHUP under nohup.

        Triton replaces them without Python's knowledge when it compiles the first kernel: LLVM then
        sends a signal again, and meanwhile a second one would kill the process.
        """
        for number in (*STOPPING, *GENTLE) if self.earlier else ():
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)

    def note(self, number: int, _: object) -> None:
        """Remember the first signal, and announce how the run ends; pass a second one on."""
        if os.getpid() != self.process:  # forked, for example by a reward function: not a run
            signal.signal(number, self.earlier[number])
            signal.raise_signal(number)
        elif number in STOPPING and self.wanted in STOPPING:
            if time.monotonic() - self.time > SAME:
                for each in STOPPING:
                    signal.signal(each, self.earlier.pop(each))
                signal.raise_signal(number)
        elif number in STOPPING or not self.wanted:
            self.wanted, self.time = signal.Signals(number), time.monotonic()
            way = "finishing and saving what is under way; again to stop at once"
            line = f"\n{self.wanted.name}: {way}\n"
            with suppress(OSError, ValueError, AttributeError):  # standard error may be gone
                # Not print: a handler may run in the middle of one.
                os.write(sys.stderr.fileno(), line.encode())

"""Measure what the GPU at hand can do, in a few seconds, for the estimate of `grpo.plan`."""

import time
from collections.abc import Callable

import torch

from grpo.tools.estimate import LINK, Gpu
from tasks.base import UserError

# Each figure is the best of this many measurements, after one that does not count.
REPEATS = 8

# The bytes of a copy, and the side of the matrices of a product.
COPIED = 1 << 31
SIDE = 8192


def measure_gpu() -> Gpu:
    """Return the capacity of the current GPU, and of its link to another one if there are two.

    Raises UserError if there is no GPU, or if other programs have taken its memory.
    """
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here to measure; name a kind, e.g. --gpus 1xH200")

    here = torch.cuda.current_device()
    link = LINK
    try:
        bandwidth = copy_rate("cuda")
        rate = product_rate("cuda", torch.bfloat16)
        if torch.cuda.device_count() > 1:
            other = (here + 1) % torch.cuda.device_count()
            link = copy_rate(f"cuda:{here}", f"cuda:{other}") / 2  # read here, written there
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the GPU has no memory for the measurement; wait for other programs, or name a kind, "
            "e.g. --gpus 1xH200"
        ) from error
    finally:
        torch.cuda.empty_cache()

    memory = torch.cuda.get_device_properties(here).total_memory
    return Gpu(memory=memory, bandwidth=bandwidth, rate=rate, link=link)


def copy_rate(device: str, to: str | None = None, size: int = COPIED) -> float:
    """Return the bytes per second that a copy of `size` bytes reads and writes, in all."""
    source = torch.zeros(size, device=device, dtype=torch.uint8)
    target = torch.zeros(size, device=to or device, dtype=torch.uint8)
    return 2 * size / least_time(lambda: target.copy_(source))


def product_rate(device: str, dtype: torch.dtype, side: int = SIDE) -> float:
    """Return the FLOP/s of a product of two random matrices of `side` rows and columns."""
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / least_time(lambda: left @ right)


def least_time(work: Callable[[], object]) -> float:
    """Return the shortest of several times of `work`, in seconds."""
    times = []
    for _ in range(REPEATS + 1):
        start = _now()
        work()
        times.append(_now() - start)
    return min(times[1:])


def _now() -> float:
    """Return the time in seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()

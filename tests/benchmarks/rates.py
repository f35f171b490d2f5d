"""Measure what a device can do, in a few seconds: copies and matrix products."""

import time
from collections.abc import Callable

import torch

# Each figure is the best of this many measurements, after one that does not count.
REPEATS = 8

# The bytes of a copy, and the side of the matrices of a product.
COPIED = 1 << 31
SIDE = 8192


def copy_rate(device: str, size: int = COPIED) -> float:
    """Return the bytes per second that a copy of `size` bytes reads and writes, in all."""
    source = torch.zeros(size, device=device, dtype=torch.uint8)
    target = torch.zeros(size, device=device, dtype=torch.uint8)
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

"""Memory of the host, for training on a CPU."""

import ctypes
import sys

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GB of freed memory.

    By default it returns large arrays to the system, which zeroes their pages when they are
    allocated again. That takes a tenth of an update.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)

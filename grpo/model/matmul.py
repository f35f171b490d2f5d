"""Faster float32 matrix products on a CPU.

Forward pass: float32 throughout, by oneDNN where it beats MKL. It stays exact so that the sampler
and the trainer compute the same log-probabilities.

Backward pass: optionally bfloat16 products with float32 sums. This is two to five times as fast
on CPUs with AMX tiles. A gradient is rounded without bias to three digits, as in any mixed
precision training (arXiv:1710.03740).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional


class _Thread(threading.local):
    """What each thread has for itself."""

    is_low_precision = False  # set by `low_precision_backward`


_thread = _Thread()

# How many threads are within `bf16_matmul`, which changes a setting of the whole process.
_lock = threading.Lock()
_users = 0
_precision_before = ""


def _is_amd() -> bool:
    """Return whether this CPU is made by AMD; only Linux tells."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False


# PyTorch multiplies float32 matrices by MKL, which takes about twice as long as oneDNN on AMD's
# CPUs with AVX-512.
_prefers_onednn = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _is_amd()
)


def linear_no_grad(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `F.linear` by the faster library. The result has no gradient."""
    if _prefers_onednn and not x_NI.is_cuda and x_NI.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return functional.linear(x_NI, weight_OI, bias_O)


def has_fast_bf16_matmul() -> bool:
    """Return whether oneDNN beats MKL once it may round float32 to bfloat16.

    That is so on CPUs with AMX, which do round. It is so on CPUs with AVX512_BF16, too, although
    oneDNN 3.12 does not round there (on an AMD EPYC: errors of 5e-7, twice as fast).
    """
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def low_precision_backward(enabled: bool) -> Iterator[None]:
    """Within this context, `bf16_matmul` has an effect if `enabled`."""
    before = _thread.is_low_precision
    _thread.is_low_precision = enabled
    try:
        yield
    finally:
        _thread.is_low_precision = before


@contextmanager
def bf16_matmul(like: Tensor) -> Iterator[None]:
    """Within this context, products of matrices `like` this one may round to bfloat16.

    Only float32 on a CPU is affected, and only within `low_precision_backward`. While one thread is
    here, products in other threads may be rounded as well; the last one to leave ends that.
    """
    global _users, _precision_before
    if not _thread.is_low_precision or like.is_cuda or like.dtype != torch.float32:
        yield
        return

    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    with _lock:
        if _users == 0:
            _precision_before = settings.fp32_precision
            settings.fp32_precision = "bf16"
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                settings.fp32_precision = _precision_before

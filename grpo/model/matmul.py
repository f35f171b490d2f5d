"""Matrix products on a CPU: those of the forward pass in float32 by the faster library, those of
the backward pass in bfloat16 with float32 sums where it has tiles for them (AMX): two to five
times as fast.

The forward pass stays exact, so that sampler and trainer agree; a gradient is rounded to three
digits, as in any mixed precision (arXiv:1710.03740), without bias.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

_is_rough = False


def _is_amd() -> bool:
    """Tell whether this is a CPU of AMD's (on Linux, which says so)."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_by_onednn = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _is_amd()
)


def linear(x_MK: Tensor, weight_XK: Tensor, bias_X: Tensor | None = None) -> Tensor:
    """Return `F.linear`, without a gradient. PyTorch gives float32 matrices to MKL, which takes
    about twice as long as oneDNN on a CPU of AMD's with AVX-512.
    """
    if _by_onednn and not x_MK.is_cuda and x_MK.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x_MK, weight_XK, bias_X, "none", [], "")
    return F.linear(x_MK, weight_XK, bias_X)


def has_fast_products() -> bool:
    """Tell whether oneDNN, with leave to round to bfloat16, is faster than MKL: where there is
    AMX, by which it does round, and where there is AVX512_BF16, which it does not use for it (3.12
    on an AMD EPYC: errors of 5e-7, twice as fast).
    """
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def rough_gradients(wanted: bool) -> Iterator[None]:
    """Within this context the `products` of float32 matrices on a CPU are rough, if `wanted`."""
    global _is_rough
    before, _is_rough = _is_rough, wanted
    try:
        yield
    finally:
        _is_rough = before


@contextmanager
def products(like: torch.Tensor) -> Iterator[None]:
    """Within this context the products of matrices `like` this one are as `rough_gradients` wants
    them.
    """
    if not _is_rough or like.is_cuda or like.dtype != torch.float32:
        yield
        return
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before

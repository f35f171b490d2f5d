"""Products of the backward pass in bfloat16 with float32 sums, where a CPU has units for them: two to five times as fast.

The forward pass stays exact, so that sampler and trainer agree; a gradient is rounded to three digits, as in any mixed precision
(arXiv:1710.03740), without bias.
"""
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_is_rough = False


def has_fast_products() -> bool:
    """Tell whether this CPU multiplies bfloat16 matrices faster than float32 ones: by AMX, or by the dot products of AVX512_BF16."""
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
    """Within this context the products of matrices `like` this one are as `rough_gradients` wants them."""
    if not _is_rough or like.is_cuda or like.dtype != torch.float32:
        yield
        return
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before

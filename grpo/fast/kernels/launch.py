"""How the kernels of the decode step are launched."""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton was built without them
    gdc_launch_dependents = gdc_wait = None

# Decorates kernels that are compiled once for all sizes of the batch, and once for one row and for
# one token of each row.
for_any_batch = triton.jit(
    do_not_specialize=("tiles", "prompt_splits", "splits"),
    do_not_specialize_on_alignment=("T", "M", "R"),
)

IS_HOPPER = (
    gdc_wait is not None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] == 9
)

# Programmatic dependent launch: start a kernel while the one before it is still running.
LAUNCH = {"launch_pdl": True} if IS_HOPPER else {}
_USES_PDL = tl.constexpr(IS_HOPPER)


@triton.jit
def wait():
    """Allow the next kernel to start, and wait until the previous one has finished.

    What the kernel before the last matrix product has written may be read before the wait: a
    product lets the next kernel start only after it has waited itself.
    """
    if _USES_PDL:
        gdc_launch_dependents()
        gdc_wait()

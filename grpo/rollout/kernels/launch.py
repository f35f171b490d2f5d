"""How the decode step's kernels are launched."""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton that was built without it
    gdc_launch_dependents = gdc_wait = None

for_any_batch = triton.jit(
    do_not_specialize_on_alignment=("T", "M", "R", "tiles", "first", "splits")
)  # one kernel for 1 and one for all else
IS_HOPPER = (
    gdc_wait is not None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] == 9
)
EARLY = (
    {"launch_pdl": True} if IS_HOPPER else {}
)  # launch a kernel while the one before it is still at work (programmatic dependent launch)
_IS_EARLY = tl.constexpr(IS_HOPPER)


@triton.jit
def wait():
    """Let the next kernel be launched, and wait until the one before this has done all. What was
    written by the one before the last product may be read before: a product lets the next kernel
    be launched when it has waited itself.
    """
    if _IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()

"""Whether weights and the optimizer's moments are finite, which is asked after every step and
every load.

An optimizer can turn a finite gradient into a weight that is NaN, or square it to an infinite
second moment that freezes the weight for good. Neither shows in the loss of that step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.distributed import ALONE, Ranks
from tasks.base import UserError


def check_step(tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
    """Raise FloatingPointError, on all ranks alike, where one of the named `tensors` is not finite
    on some rank.

    The screen is one fused norm: a NaN or an infinity anywhere makes it NaN or infinite. So do
    finite numbers above 1e19, whose squares overflow; then each tensor is looked at by itself.
    """
    norm = _norm(tensors)
    ranks.add([norm])
    if bool(norm.isfinite()):
        return

    faults = [fault for found in ranks.gather([_faults(tensors)]) for fault in found]
    if faults:
        raise FloatingPointError(
            f"after the optimizer's step {_first_of(list(dict.fromkeys(faults)))}"
        )


def check_loaded(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError where one of the named `tensors`, which were read from `where`, is not
    finite.
    """
    if bool(_norm(tensors).isfinite()):
        return

    if faults := _faults(tensors):
        raise UserError(
            f"{where}: {_first_of(faults)}; the file is damaged: give another model, or an earlier "
            "checkpoint"
        )


def _norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of all numbers of the floating-point `tensors`, a float32 tensor without
    dimensions.
    """
    floating = [tensor.detach() for tensor in tensors.values() if tensor.is_floating_point()]
    return torch.nn.utils.get_total_norm(floating).float()


def _faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with each tensor that is not finite, in words."""
    faults = []
    for name, tensor in tensors.items():
        bad = int((~tensor.detach().isfinite()).sum()) if tensor.is_floating_point() else 0
        if bad:
            faults.append(f"{name} is not finite ({bad:,} of {tensor.numel():,} numbers)")
    return faults


def _first_of(faults: list[str]) -> str:
    others = len(faults) - 1
    return faults[0] + (
        f", and {others} other tensor{'s' * (others > 1)} likewise" if others else ""
    )

"""Checks of weights: complete and finite when they are loaded, finite after every step.

An optimizer can turn a finite gradient into a weight that is NaN. It can also square it to an
infinite second moment, which freezes the weight for good. Neither shows in the loss of that step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from data.errors import UserError
from grpo.distributed import SINGLE, Ranks

NAMED_TENSORS = 3  # how many tensors of each kind an error names


def check_step(
    tensors: Iterable[Tensor], named: Callable[[], Mapping[str, Tensor]], ranks: Ranks = SINGLE
) -> None:
    """Raise FloatingPointError on all ranks if a tensor is not finite on any of them.

    `named` returns the same tensors by name; it is called only to say which of them is at fault.

    One fused norm is computed first: it is not finite if any number is NaN or infinite. Nor is it
    if finite numbers exceed 1e19, whose squares overflow. So only if it is not finite is each
    tensor checked by itself.
    """
    norm = _norm(tensors)
    ranks.all_reduce([norm])
    if bool(norm.isfinite()):
        return

    faults = [fault for found in ranks.gather([_faults(named())]) for fault in found]
    if faults:
        unique = list(dict.fromkeys(faults))
        raise FloatingPointError(f"after the optimizer's step {_summary(unique)}")


def check_loaded(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError if one of the tensors read from `source` is not finite."""
    if bool(_norm(tensors.values()).isfinite()):
        return

    if faults := _faults(tensors):
        raise UserError(
            f"{source}: {_summary(faults)}; the file is damaged: give another model, or an earlier "
            "checkpoint"
        )


def check_names(
    source: str,
    what: str,
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[str] = (),
) -> None:
    """Raise UserError unless the tensors read from `source` are exactly those of `what`.

    The arguments name the tensors that differ; `mismatched` ones have another shape.
    """
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    problems = []
    for kind, names in kinds.items():
        names = sorted(names)
        if names:
            others = ", ..." if len(names) > NAMED_TENSORS else ""
            problems.append(f"{len(names)} {kind} ({', '.join(names[:NAMED_TENSORS])}{others})")
    if problems:
        raise UserError(
            f"--model {source}: the tensors there are not those of {what}: {'; '.join(problems)}; "
            "give a folder whose weights and configuration were saved together"
        )


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all numbers of the floating-point tensors, a float32 scalar tensor."""
    # A fused norm is of tensors of one type on one device.
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_floating_point():
            alike[tensor.device, tensor.dtype].append(tensor.detach())

    norms = [torch.stack(torch._foreach_norm(each)).float().norm() for each in alike.values()]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).norm()


def _faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a description of each tensor that is not finite."""
    faults = []
    for name, tensor in tensors.items():
        bad = int((~tensor.detach().isfinite()).sum()) if tensor.is_floating_point() else 0
        if bad:
            faults.append(f"{name} is not finite ({bad:,} of {tensor.numel():,} numbers)")
    return faults


def _summary(faults: list[str]) -> str:
    """Return the first fault in words, and the number of the others."""
    others = len(faults) - 1
    if not others:
        return faults[0]
    return f"{faults[0]}, and {others} other tensor{'s' * (others > 1)} likewise"

"""The distance between two sets of log-probabilities of a model, and how large rounding makes it.

Shapes: N tokens, V vocabulary.
"""

import torch
from torch import Tensor

from grpo.model.interfaces import Model

# The largest distance that is accepted in float32, in nats. In a model of 30 layers rounding comes
# to 1e-5 at most, and a missing mechanism to 1e-3 or more (runs/LOG.md, 2026-11-23).
FLOAT32_TOLERANCE = 1e-4

# The largest relative distance that is accepted in bfloat16, float16 and quantised models. Rounding
# comes to 0.03 in a trained model of 30 layers (SmolLM2), and to 0.04 in a random one (the shape of
# Llama-3.2-3B). A single token may differ by more, where it makes a router choose another expert.
LOW_PRECISION_TOLERANCE = 0.07


def tolerance(model: Model) -> float:
    """Return the largest `distance` between two ways to run `model` that rounding explains."""
    return LOW_PRECISION_TOLERANCE if has_low_precision(model) else FLOAT32_TOLERANCE


def has_low_precision(model: Model) -> bool:
    """Return whether the model rounds more than float32 does."""
    is_quantised = bool(getattr(model, "is_quantized", False))
    return model.dtype not in (torch.float32, torch.float64) or is_quantised


def logprobs_of(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits (..., V), in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def distance(found_NV: Tensor, expected_NV: Tensor, low_precision: bool) -> float:
    """Return the distance between two sets of log-probabilities.

    In float32 it is the mean absolute difference over the vocabulary, in nats, at the worst token.
    In `low_precision` it is the mean absolute deviation of the differences over the vocabulary,
    divided by that of the expected log-probabilities, at the median token.
    """
    difference_NV = found_NV - expected_NV

    # An impossible token has -inf on both sides: no difference, where inf - inf would be NaN.
    is_impossible_NV = expected_NV.isinf()
    counts_NV = ~(is_impossible_NV & (found_NV == expected_NV))
    if not low_precision:
        return difference_NV.where(counts_NV, 0.0).abs().mean(-1).max().item()

    # Rounding of the largest logit (from 16 on bfloat16 has only multiples of 1/8) moves the
    # normaliser, and so all log-probabilities by the same amount. The deviation leaves that out.
    deviation_N = _deviation(difference_NV, counts_NV)
    return (deviation_N / _deviation(expected_NV, ~is_impossible_NV).mean()).median().item()


def _deviation(x_NV: Tensor, counts_NV: Tensor) -> Tensor:
    """Return the mean absolute deviation (N,) of the values that count from their mean."""
    count_N1 = counts_NV.sum(-1, keepdim=True)
    mean_N1 = x_NV.where(counts_NV, 0.0).sum(-1, keepdim=True) / count_N1
    return ((x_NV - mean_N1).where(counts_NV, 0.0).abs().sum(-1, keepdim=True) / count_N1)[:, 0]


def constant_factor(whole: Tensor, part: Tensor, low_precision: bool) -> float | None:
    """Return the constant c with whole = c * part, or None if there is none."""
    if whole is part:
        return 1.0
    if whole.shape != part.shape:
        return None

    # The least-squares solution.
    whole, part = whole.double(), part.double()
    factor = ((whole * part).sum() / part.square().sum()).item()
    residual = (whole - factor * part).norm() / whole.norm()
    if residual > (1e-2 if low_precision else 1e-5):
        return None
    return factor if abs(factor - 1) > 1e-3 else 1.0

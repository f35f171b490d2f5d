"""How a model is run: its own forward pass over whole sequences, padded on the right.

Causal attention alone is right for them in every architecture, and no state is kept between two
passes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

# `transformers` and `peft` resolve most attributes of a model at run time, so a type checker knows
# hardly any of them.
Model = Any


# What an update runs at once: a `PaddedBatch`, or a `grpo.fast.packing.Packing`.
Batch = Any


class PaddedBatch:
    """A micro-batch of whole sequences (R, X), padded on the right; each token counts by itself.

    `predictors_M` are the places in the flattened rows that predict the completions' tokens.
    `distinct` returns the values of the distinct tokens (U, ...) from those of all tokens (M, ...),
    and `of_tokens` the values of all tokens from those of the distinct ones. Here they are one.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        each = len(completions) // len(prompts)
        prompt_of = [prompts[r // each] for r in range(len(completions))]

        # The last token of a sequence predicts nothing.
        rows = [
            torch.tensor([*prompt, *completion][:-1])
            for prompt, completion in zip(prompt_of, completions)
        ]
        tokens_RX = pad_sequence(rows, batch_first=True)
        X = tokens_RX.shape[1]
        predictors = [
            torch.arange(len(prompt) - 1, len(row)) + r * X
            for r, (prompt, row) in enumerate(zip(prompt_of, rows))
        ]
        self.tokens_RX = to_device(tokens_RX, device)
        self.predictors_M = to_device(torch.cat(predictors), device)

    def distinct(self, values_M: Tensor) -> Tensor:
        """Return the values as they are."""
        return values_M

    def of_tokens(self, values_M: Tensor) -> Tensor:
        """Return the values as they are."""
        return values_M


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on the device.

    A GPU copies it from pinned memory when it gets there, and the host does not wait.
    """
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def flat_indices(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """Return the indices of all tokens in a flattened grid of rows of `longest` tokens (N,).

    Row i holds `lengths[i]` tokens, from its left end on.
    """
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return to_device(is_token.flatten().nonzero()[:, 0], device)


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


def checkpoint_layers(model: Model) -> None:
    """Switch gradient checkpointing (arXiv:1604.06174) on in the layers of any model, in place.

    The layers are those of its longest module list. `transformers` has checkpointing for models in
    training mode alone.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len):
        # Assigning a callable to a module's `forward` replaces it for this one module.
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, whose activations are computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

"""Gradient checkpointing (arXiv:1604.06174) for models that run by their own forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo.model.interfaces import Model


def checkpoint_layers(model: Model) -> None:
    """Switch gradient checkpointing on in the layers of any model, in place.

    The layers are those of its longest module list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len):
        # Assigning a callable to a module's `forward` replaces it for this one module.
        layer.forward = _CheckpointedForward(layer.forward)


class _CheckpointedForward:
    """A `forward` that computes its activations again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)

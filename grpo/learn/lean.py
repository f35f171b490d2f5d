"""A model's own forward pass in fewer kernels and less memory: the same arithmetic, up to the order of rounding.

`peft` computes an adapter in float32 beside a bfloat16 layer, with a copy of the input and four passes over the output, all kept for
the backward pass; here it is two products in the layer's precision, the second added in place of the sum. The parameters stay as they are.
"""
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def is_plain_lora(module: nn.Module) -> bool:
    """Tell whether `module` is a linear layer with one adapter, W x + s B A x, and nothing else (no dropout, DoRA or bias)."""
    if not hasattr(module, "lora_A") or len(module.active_adapters) != 1 or not isinstance(module.base_layer, nn.Linear):
        return False
    name = module.active_adapters[0]
    return not (module.use_dora.get(name) or module.lora_bias.get(name) or type(module.lora_dropout[name]) is not nn.Identity)


def make_lean(model: nn.Module):
    """Replace the forward passes of `model`'s adapters, and on a GPU of its norms, in place."""
    for module in model.modules():
        if is_plain_lora(module):
            module.forward = MethodType(_adapted_linear, module)
        elif type(module).__name__ in RMS_NORMS and module.weight.is_cuda:
            module.forward = MethodType(_rms_norm, module)


def _adapted_linear(self, x: Tensor, *_, **__) -> Tensor:
    y = self.base_layer(x)
    if self.disable_adapters:
        return y
    name = self.active_adapters[0]
    down = F.linear(x, self.lora_A[name].weight.to(x.dtype))
    up = self.lora_B[name].weight.to(x.dtype)
    return torch.addmm(y.flatten(0, -2), down.flatten(0, -2), up.t(), alpha=self.scaling[name]).view_as(y)


def _rms_norm(self, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def checkpoint_layers(model: nn.Module):
    """Let the layers of `model` forget their activations and compute them again in the backward pass (arXiv:1604.06174), in place."""
    layers = max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    for layer in layers:
        layer.forward = _Forgetful(layer.forward)


class _Forgetful:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)

"""The operations of a Llama layer and their gradients, each in few passes over memory.

On a GPU a pass is a Triton kernel (`grpo.fast.update_kernels`); on a CPU it is a PyTorch operation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo.fast.merged_linear import MergedLinear

SWIGLU_BLOCK = 1024  # columns of one program of the SwiGLU kernels


def add_norm(
    x_NE: Tensor, y_NE: Tensor | None, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + y, and its RMSNorm (arXiv:1910.07467). No y counts as 0."""
    return _apply(_AddNorm, x_NE, y_NE, weight_E, eps)


def linear(x_NI: Tensor, layer: MergedLinear, use_lora: bool, has_swiglu: bool = False) -> Tensor:
    """Return the outputs (N, O) of merged linear layers, with their adapters if `use_lora`.

    With `has_swiglu` the input x (N, 2 F) goes through `swiglu` first.
    """
    return _apply(_Linear, x_NI, layer, use_lora, has_swiglu, *layer.parameters)


def apply_rotary(
    heads_NO: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, H: int, K: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (N, H, D), keys and values (N, K, D) from these side by side.

    Queries and keys get rotary positions (arXiv:2104.09864): the pair (i, i + D / 2) of a token is
    rotated by the angle whose cosine and sine are in column i of `cos_Nd` and `sin_Nd`.
    """
    return _apply(_Rotary, heads_NO, cos_Nd, sin_Nd, H, K)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (N, F) (arXiv:2002.05202). The result has no gradient.

    `gate_up` (N, 2 F) is gate and up side by side.
    """
    N, F = len(gate_up), gate_up.shape[1] // 2
    if not gate_up.is_cuda:
        return functional.silu(gate_up[:, :F]).mul_(gate_up[:, F:])

    from grpo.fast import update_kernels as kernels

    out = gate_up.new_empty(N, F)
    grid = (N, -(-F // SWIGLU_BLOCK))
    kernels.swiglu[grid](gate_up, out, gate_up.stride(0), F, BLOCK=SWIGLU_BLOCK)
    return out


def _swiglu_backward(d_NF: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradients of gate and up, side by side (N, 2 F)."""
    N, F = d_NF.shape
    out = gate_up.new_empty(N, 2 * F)
    if not gate_up.is_cuda:
        gate_NF, up_NF = gate_up[:, :F], gate_up[:, F:]
        torch.mul(d_NF, functional.silu(gate_NF), out=out[:, F:])
        out[:, :F] = torch.ops.aten.silu_backward(d_NF * up_NF, gate_NF)
        return out

    from grpo.fast import update_kernels as kernels

    grid = (N, -(-F // SWIGLU_BLOCK))
    kernels.swiglu_backward[grid](d_NF, gate_up, out, gate_up.stride(0), F, BLOCK=SWIGLU_BLOCK)
    return out


class _NoContext:
    """Stands in for the context of an autograd function without a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply an autograd function.

    Without gradients only its forward pass runs, because autograd costs 40 us per call on a CPU.
    """
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoContext(), *inputs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: MergedLinear,
        use_lora: bool,
        has_swiglu: bool,
        *parameters: Tensor | None,
    ) -> Tensor:
        # The parameters are inputs only so that autograd asks for their gradients.
        y, lora_hidden = layer.forward(swiglu(x) if has_swiglu else x, use_lora)

        ctx.save_for_backward(x, lora_hidden)
        ctx.layer = layer
        ctx.has_swiglu = has_swiglu
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_hidden = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]

        # SwiGLU is computed again: that is cheaper than keeping its output.
        inputs = swiglu(x) if ctx.has_swiglu else x
        dx, grads = ctx.layer.gradients(dy, inputs, lora_hidden, needed)

        if ctx.has_swiglu:
            dx = _swiglu_backward(dx, x)
        return dx, None, None, None, *grads


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # None, not zeros, where an output is not used
        if x.is_cuda:
            total, normed, scale_N1 = _add_norm_cuda(x, y, weight, eps)
        else:
            # The mean of squares and its root are float32 at least.
            wide = torch.promote_types(x.dtype, torch.float32)
            total = x if y is None else x + y
            scale_N1 = (total.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
            normed = (total * scale_N1).to(x.dtype) * weight

        ctx.save_for_backward(total, weight, scale_N1)
        ctx.has_y = y is not None
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, d_total: Tensor | None, d_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, scale_N1 = ctx.saved_tensors
        if d_normed is None:
            return d_total, d_total if ctx.has_y else None, None, None

        if total.is_cuda:
            d_sum = _add_norm_backward_cuda(d_total, d_normed, total, weight, scale_N1)
        else:
            # With s = 1 / rms(x), a gradient d of s x is one of s d - s^3 mean(d x) x of x.
            E = total.shape[1]
            d_scaled = d_normed * weight
            along_N1 = (d_scaled * total).sum(-1, keepdim=True, dtype=scale_N1.dtype)
            along_N1 = along_N1 * scale_N1**3 / -E
            d_sum = torch.addcmul(d_scaled * scale_N1, total, along_N1).to(total.dtype)
            if d_total is not None:
                d_sum = d_sum.add_(d_total)

        d_weight = None
        if ctx.needs_input_grad[2]:
            d_weight = (d_normed * (total * scale_N1).to(total.dtype)).sum(0)
        return d_sum, d_sum if ctx.has_y else None, d_weight, None


def _add_norm_cuda(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y, its norm times `weight` (N, E), and the factors of the norm (N, 1)."""
    from grpo.fast import update_kernels as kernels

    N, E = x.shape
    total = x if y is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    scale_N1 = x.new_empty(N, 1, dtype=torch.float32)
    kernels.add_norm[(N,)](
        x,
        x if y is None else y,
        weight,
        total,
        normed,
        scale_N1,
        0 if y is None else y.stride(0),
        E,
        eps,
        ADD=y is not None,
        BLOCK=1 << (E - 1).bit_length(),
        num_warps=8,
    )
    return total, normed, scale_N1


def _add_norm_backward_cuda(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, scale_N1: Tensor
) -> Tensor:
    """Return the gradient of the sum (N, E): through the norm, and its own if there is one."""
    from grpo.fast import update_kernels as kernels

    N, E = total.shape
    d_sum = torch.empty_like(total)
    own = d_sum if d_total is None else d_total.contiguous()
    kernels.add_norm_backward[(N,)](
        d_normed.contiguous(),
        own,
        total,
        weight,
        scale_N1,
        d_sum,
        E,
        ADD=d_total is not None,
        BLOCK=1 << (E - 1).bit_length(),
        num_warps=8,
    )
    return d_sum


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = H, K

        N, D = len(heads), 2 * cos.shape[1]
        parts = heads.view(N, H + 2 * K, D).split([H, K, K], 1)
        rotated = tuple(heads.new_empty(N, count, D) for count in (H, K, K))
        _rotate(parts, rotated, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        H, K = ctx.sizes
        N, D = len(cos), 2 * cos.shape[1]

        heads = gradients[0].new_empty(N, (H + 2 * K) * D)
        parts = heads.view(N, H + 2 * K, D).split([H, K, K], 1)
        _rotate(gradients, parts, cos, -sin)  # back by the same angle
        return heads, None, None, None, None


def _rotate(
    sources: Sequence[Tensor], targets: Sequence[Tensor], cos_Nd: Tensor, sin_Nd: Tensor
) -> None:
    """Write rotated queries and keys, and unchanged values, into `targets`.

    Both sequences hold queries (N, H, D), keys and values (N, K, D).
    """
    if cos_Nd.is_cuda:
        _rotate_cuda(sources, targets, cos_Nd, sin_Nd)
        return

    half = cos_Nd.shape[1]
    cos, sin = cos_Nd[:, None], sin_Nd[:, None]
    for source, target in zip(sources[:2], targets):
        a, b = source[..., :half], source[..., half:]
        torch.mul(a, cos, out=target[..., :half]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=target[..., half:]).addcmul_(a, sin)
    targets[2].copy_(sources[2])


def _rotate_cuda(
    sources: Sequence[Tensor], targets: Sequence[Tensor], cos_Nd: Tensor, sin_Nd: Tensor
) -> None:
    from grpo.fast import update_kernels as kernels

    N, half = cos_Nd.shape
    H, K = sources[0].shape[1], sources[1].shape[1]
    # The kernel takes any stride between tokens, but heads must be dense.
    q, k, v = (
        x if x.stride(2) == 1 and x.stride(1) == 2 * half else x.contiguous() for x in sources
    )
    kernels.rotary[(N,)](
        q,
        k,
        v,
        *targets,
        cos_Nd,
        sin_Nd,
        *(x.stride(0) for x in (q, k, v, *targets)),
        H=H,
        K=K,
        D=2 * half,
        BLOCK_H=1 << (H - 1).bit_length(),
        BLOCK_K=1 << (K - 1).bit_length(),
    )

"""The operations of a Llama layer with their gradients, each in as few passes over memory as may
be.

On a GPU a pass is a Triton kernel (`model.kernels`). Shapes: M tokens, N hidden size, H and K
query and key heads of size D, F inner size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo.model.matmul import products
from grpo.model.merged_linear import MergedLinear


def add_norm(
    x_MN: Tensor, y_MN: Tensor | None, weight_N: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + y and its RMSNorm (arXiv:1910.07467)."""
    return _apply(_AddNorm, x_MN, y_MN, weight_N, eps)


def product(x_MN: Tensor, joined: MergedLinear, is_adapted: bool, is_gated: bool = False) -> Tensor:
    """Return the joined layers' outputs of x, or (`is_gated`) of silu(a) * b, where x (M, 2 N) is
    a and b side by side.
    """
    return _apply(_Product, x_MN, joined, is_adapted, is_gated, *joined.parameters)


def rotate(
    heads_MX: Tensor, cos_Md: Tensor, sin_Md: Tensor, H: int, K: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (M, H, D), keys and values (M, K, D) from these side by side; the first two
    by rotary positions (arXiv:2104.09864).

    `cos` and `sin` (M, D / 2) are of the angles by which the pairs (i, i + D / 2) of a token turn.
    """
    return _apply(_Rotate, heads_MX, cos_Md, sin_Md, H, K)


def _apply(function, *inputs):
    """Apply an autograd function. Where no gradient is wanted only its forward pass runs:
    autograd's part costs a CPU 40 us a call.
    """
    return (
        function.apply(*inputs)
        if torch.is_grad_enabled()
        else function.forward(_Forgotten(), *inputs)
    )


class _Forgotten:
    """Stands for the context of an autograd function whose backward pass is not wanted."""

    save_for_backward = set_materialize_grads = staticmethod(lambda *_: None)


def gate(both_MF: Tensor) -> Tensor:
    """Return silu(a) * b (arXiv:2002.05202), where `both` (M, 2 F) is a and b side by side; no
    gradient.
    """
    M, width = len(both_MF), both_MF.shape[1] // 2
    if both_MF.is_cuda:
        from grpo.model import kernels

        out = both_MF.new_empty(M, width)
        kernels.gate[(M, -(-width // 1024))](both_MF, out, both_MF.stride(0), width, BLOCK=1024)
        return out
    return F.silu(both_MF[:, :width]).mul_(both_MF[:, width:])


def _gate_backward(d_MF: Tensor, both_MF: Tensor) -> Tensor:
    M, width = d_MF.shape
    out = both_MF.new_empty(M, 2 * width)
    if both_MF.is_cuda:
        from grpo.model import kernels

        kernels.gate_backward[(M, -(-width // 1024))](
            d_MF, both_MF, out, both_MF.stride(0), width, BLOCK=1024
        )
        return out
    a, b = both_MF[:, :width], both_MF[:, width:]
    torch.mul(d_MF, F.silu(a), out=out[:, width:])
    out[:, :width] = torch.ops.aten.silu_backward(d_MF * b, a)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, joined, is_adapted, is_gated, *parameters):
        y, inner = joined.product(gate(x) if is_gated else x, is_adapted)
        ctx.save_for_backward(x, inner)
        ctx.joined, ctx.is_gated = joined, is_gated
        return y

    @staticmethod
    def backward(ctx, dy):
        x, inner = ctx.saved_tensors
        with products(dy):
            dx, on = ctx.joined.gradients(
                dy, gate(x) if ctx.is_gated else x, inner, ctx.needs_input_grad[4:]
            )
        return _gate_backward(dx, x) if ctx.is_gated else dx, None, None, None, *on


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight, eps):
        ctx.set_materialize_grads(False)
        M, N = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.is_cuda:
            from grpo.model import kernels

            total = x if y is None else torch.empty_like(x)
            normed, scale_M1 = torch.empty_like(x), x.new_empty(M, 1, dtype=torch.float32)
            kernels.add_norm[(M,)](
                x,
                x if y is None else y,
                weight,
                total,
                normed,
                scale_M1,
                0 if y is None else y.stride(0),
                N,
                eps,
                ADD=y is not None,
                BLOCK=1 << (N - 1).bit_length(),
                num_warps=8,
            )
        else:
            total = x if y is None else x + y
            scale_M1 = (total.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
            normed = (total * scale_M1).to(x.dtype) * weight
        ctx.save_for_backward(total, weight, scale_M1)
        ctx.adds = y is not None
        return total, normed

    @staticmethod
    def backward(ctx, d_total, d_normed):
        total, weight, scale_M1 = ctx.saved_tensors
        if d_normed is None:
            return d_total, d_total if ctx.adds else None, None, None
        M, N = total.shape
        if total.is_cuda:
            from grpo.model import kernels

            d_sum = torch.empty_like(total)
            own = d_sum if d_total is None else d_total.contiguous()
            kernels.add_norm_backward[(M,)](
                d_normed.contiguous(),
                own,
                total,
                weight,
                scale_M1,
                d_sum,
                N,
                ADD=d_total is not None,
                BLOCK=1 << (N - 1).bit_length(),
                num_warps=8,
            )
        else:
            d_scaled = d_normed * weight
            along_M1 = (
                (d_scaled * total).sum(-1, keepdim=True, dtype=scale_M1.dtype) * scale_M1**3 / -N
            )
            d_sum = torch.addcmul(d_scaled * scale_M1, total, along_M1).to(total.dtype)
            d_sum = d_sum if d_total is None else d_sum.add_(d_total)
        d_weight = (
            (d_normed * (total * scale_M1).to(total.dtype)).sum(0)
            if ctx.needs_input_grad[2]
            else None
        )
        return d_sum, d_sum if ctx.adds else None, d_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, cos, sin, H, K):
        ctx.save_for_backward(cos, sin)
        ctx.sizes = H, K
        M, D = len(heads), 2 * cos.shape[1]
        parts = heads.view(M, H + 2 * K, D).split([H, K, K], 1)
        turned = tuple(heads.new_empty(M, count, D) for count in (H, K, K))
        _turn(parts, turned, cos, sin)
        return turned

    @staticmethod
    def backward(ctx, *gradients):
        cos, sin = ctx.saved_tensors
        (M, half), (H, K) = cos.shape, ctx.sizes
        heads = gradients[0].new_empty(M, (H + 2 * K) * 2 * half)
        _turn(
            gradients, heads.view(M, H + 2 * K, 2 * half).split([H, K, K], 1), cos, -sin
        )  # back by the same angle
        return heads, None, None, None, None


def _turn(parts, turned, cos_Md: Tensor, sin_Md: Tensor):
    """Write queries and keys (M, heads, D), turned, and values as they are, into `turned`."""
    M, half = cos_Md.shape
    if cos_Md.is_cuda:
        from grpo.model import kernels

        (q, k, v), (H, K) = parts, (parts[0].shape[1], parts[1].shape[1])
        q, k, v = (
            x if x.stride(2) == 1 and x.stride(1) == 2 * half else x.contiguous() for x in (q, k, v)
        )
        kernels.turn[(M,)](
            q,
            k,
            v,
            *turned,
            cos_Md,
            sin_Md,
            *(x.stride(0) for x in (q, k, v, *turned)),
            H=H,
            K=K,
            D=2 * half,
            BLOCK_H=1 << (H - 1).bit_length(),
            BLOCK_K=1 << (K - 1).bit_length(),
        )
        return
    cos, sin = cos_Md[:, None], sin_Md[:, None]
    for source, target in zip(parts[:2], turned):
        a, b, first, second = (
            source[..., :half],
            source[..., half:],
            target[..., :half],
            target[..., half:],
        )
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
    turned[2].copy_(parts[2])

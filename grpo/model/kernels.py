"""Triton kernels of the update: one program a token, or a token and a block of columns, unless
something else is said.

Shapes: M tokens, N hidden size, H and K heads of size D, F inner size, V vocabulary. Sums are
float32.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x_MN,
    y_MN,
    weight_N,
    sum_MN,
    normed_MN,
    scale_M,
    y_stride,
    N,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum = x + y (if ADD); scale = 1 / its root mean square; normed = sum * scale * weight."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < N
    x = tl.load(x_MN + m * N + n, mask=inside, other=0.0)
    if ADD:
        x = (
            x.to(tl.float32)
            + tl.load(y_MN + m * y_stride + n, mask=inside, other=0.0).to(tl.float32)
        ).to(x.dtype)
        tl.store(sum_MN + m * N + n, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / N + eps)
    tl.store(scale_M + m, scale)
    weight = tl.load(weight_N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_MN + m * N + n, (wide * scale * weight).to(x.dtype), mask=inside)


@triton.jit
def add_norm_backward(
    d_normed_MN,
    d_sum_MN,
    sum_MN,
    weight_N,
    scale_M,
    out_MN,
    N,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the sum: that through the norm, and (if ADD) its own."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < N
    scale = tl.load(scale_M + m)
    weight = tl.load(weight_N + n, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_normed_MN + m * N + n, mask=inside, other=0.0).to(tl.float32) * weight
    x = tl.load(sum_MN + m * N + n, mask=inside, other=0.0)
    unit = x.to(tl.float32) * scale
    out = scale * (d - unit * (tl.sum(d * unit) / N))
    if ADD:
        out += tl.load(d_sum_MN + m * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_MN + m * N + n, out.to(x.dtype), mask=inside)


@triton.jit
def turn(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    cos,
    sin,
    q_stride,
    k_stride,
    v_stride,
    q_out_stride,
    k_out_stride,
    v_out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Turn the pairs (i, i + D / 2) of queries and keys by the token's angles; copy the values."""
    m = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, D // 2)
    c = tl.load(cos + m * (D // 2) + half).to(tl.float32)[None, :]
    s = tl.load(sin + m * (D // 2) + half).to(tl.float32)[None, :]
    _turn_heads(q + m * q_stride, q_out + m * q_out_stride, c, s, half, H, D, BLOCK_H)
    _turn_heads(k + m * k_stride, k_out + m * k_out_stride, c, s, half, K, D, BLOCK_K)
    head = tl.arange(0, BLOCK_K)
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(
        v_out + m * v_out_stride + at,
        tl.load(v + m * v_stride + at, mask=(head < K)[:, None]),
        mask=(head < K)[:, None],
    )


@triton.jit
def _turn_heads(
    source, target, c, s, half, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (half < D)[None, :]
    at = head[:, None] * D + half[None, :]
    first, second = tl.load(source + at, mask=inside), tl.load(source + D // 2 + at, mask=inside)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(target + at, (a * c - b * s).to(first.dtype), mask=inside)
    tl.store(target + D // 2 + at, (b * c + a * s).to(first.dtype), mask=inside)


@triton.jit
def gate(both_MF, out_MF, stride, F, BLOCK: tl.constexpr):
    """out = silu(a) * b, where a and b stand side by side."""
    m, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    a = tl.load(both_MF + m * stride + f, mask=inside).to(tl.float32)
    b = tl.load(both_MF + m * stride + F + f, mask=inside)
    tl.store(out_MF + m * F + f, (a / (1 + tl.exp(-a))).to(b.dtype) * b, mask=inside)


@triton.jit
def gate_backward(d_MF, both_MF, out_MF, stride, F, BLOCK: tl.constexpr):
    """The gradients of a and b, side by side, from that of silu(a) * b."""
    m, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    a = tl.load(both_MF + m * stride + f, mask=inside)
    b = tl.load(both_MF + m * stride + F + f, mask=inside).to(tl.float32)
    d = tl.load(d_MF + m * F + f, mask=inside).to(tl.float32)
    wide = a.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-wide))
    tl.store(
        out_MF + m * 2 * F + f,
        (d * b * sigmoid * (1 + wide * (1 - sigmoid))).to(a.dtype),
        mask=inside,
    )
    tl.store(out_MF + m * 2 * F + F + f, (d * wide * sigmoid).to(a.dtype), mask=inside)


@triton.jit
def join(
    one_MHD,
    other_MHD,
    one_lse,
    other_lse,
    out_MHD,
    lse_MH,
    one_m,
    one_h,
    other_m,
    other_h,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One softmax of two parts (Hydragen, arXiv:2402.05099), given their log-sum-exps, of strides
    m and h.
    """
    m, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real = h < H
    a = tl.load(one_lse + m * one_m + h * one_h, mask=real, other=0.0)
    b = tl.load(other_lse + m * other_m + h * other_h, mask=real, other=0.0)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    tl.store(lse_MH + m * H + h, both, mask=real)
    at, inside = m * H * D + h[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :]
    one, other = tl.load(one_MHD + at, mask=inside), tl.load(other_MHD + at, mask=inside)
    out = (
        one.to(tl.float32) * tl.exp(a - both)[:, None]
        + other.to(tl.float32) * tl.exp(b - both)[:, None]
    )
    tl.store(out_MHD + at, out.to(one.dtype), mask=inside)


@triton.jit
def logprobs(logits_MV, target_M, heat_M, logprob_M, entropy_M, lse_M, V, BLOCK: tl.constexpr):
    """Of softmax(logits / heat): the log-probability of the target, the entropy, and the log of
    the sum of exponentials.
    """
    m = tl.program_id(0).to(tl.int64)
    heat = tl.load(heat_M + m)
    v = tl.arange(0, BLOCK)
    top, total, weighted = (
        tl.full((), -1e30, tl.float32),
        tl.zeros((), tl.float32),
        tl.zeros((), tl.float32),
    )
    for start in range(0, V, BLOCK):
        x = (
            tl.load(logits_MV + m * V + start + v, mask=start + v < V, other=-1e30).to(tl.float32)
            / heat
        )
        higher = tl.maximum(top, tl.max(x))
        shrink = tl.exp(top - higher)
        mass = tl.exp(x - higher)
        weighted = (weighted + total * (top - higher)) * shrink + tl.sum(
            mass * tl.maximum(x - higher, -1e4)
        )
        total = total * shrink + tl.sum(mass)
        top = higher
    lse = top + tl.log(total)
    tl.store(lse_M + m, lse)
    tl.store(
        logprob_M + m,
        tl.load(logits_MV + m * V + tl.load(target_M + m)).to(tl.float32) / heat - lse,
    )
    tl.store(entropy_M + m, tl.log(total) - weighted / total)


@triton.jit
def logprobs_backward(logits_MV, target_M, heat_M, lse_M, d_M, V, BLOCK: tl.constexpr):
    """The gradient of the logits, written over them, from that of the target's log-probability."""
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    heat, lse, d, target = (
        tl.load(heat_M + m),
        tl.load(lse_M + m),
        tl.load(d_M + m),
        tl.load(target_M + m),
    )
    x = tl.load(logits_MV + m * V + v, mask=v < V, other=0.0)
    p = tl.exp(x.to(tl.float32) / heat - lse)
    tl.store(
        logits_MV + m * V + v,
        (tl.where(v == target, 1.0 - p, -p) * d / heat).to(x.dtype),
        mask=v < V,
    )

"""Triton kernels of an update: rotary, SwiGLU and log-probabilities. Sums are float32.

One program handles one token, unless its docstring says otherwise. A suffix gives the shape that a
pointer stands for: see `grpo.model`.
"""

# Triton compiles for the types that annotations name, so parameters have none but `constexpr`.
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def rotary(
    q, k, v, q_out, k_out, v_out,
    cos_Nd, sin_Nd,
    q_stride, k_stride, v_stride, q_out_stride, k_out_stride, v_out_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs (i, i + D / 2) of queries and keys by the token's angles; copy values."""
    n = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, D // 2)
    c = tl.load(cos_Nd + n * (D // 2) + half).to(tl.float32)[None, :]
    s = tl.load(sin_Nd + n * (D // 2) + half).to(tl.float32)[None, :]

    _rotate_heads(q + n * q_stride, q_out + n * q_out_stride, c, s, half, H, D, BLOCK_H)
    _rotate_heads(k + n * k_stride, k_out + n * k_out_stride, c, s, half, K, D, BLOCK_K)

    head = tl.arange(0, BLOCK_K)
    inside = (head < K)[:, None]
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    values = tl.load(v + n * v_stride + at, mask=inside)
    tl.store(v_out + n * v_out_stride + at, values, mask=inside)


@triton.jit
def _rotate_heads(
    source, target, c, s, half, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate all heads of one token by angles of cosine `c` and sine `s`."""
    head = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (half < D)[None, :]
    at = head[:, None] * D + half[None, :]

    first = tl.load(source + at, mask=inside)
    second = tl.load(source + D // 2 + at, mask=inside)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    tl.store(target + at, (a * c - b * s).to(first.dtype), mask=inside)
    tl.store(target + D // 2 + at, (b * c + a * s).to(first.dtype), mask=inside)


@triton.jit
def swiglu(gate_up, out_NF, stride, F, BLOCK: tl.constexpr):
    """Write silu(gate) * up, where gate and up (N, F) stand side by side.

    One program handles BLOCK columns of one token.
    """
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F

    gate = tl.load(gate_up + n * stride + f, mask=inside).to(tl.float32)
    up = tl.load(gate_up + n * stride + F + f, mask=inside)
    # Rounded before the product, as PyTorch does.
    silu = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out_NF + n * F + f, silu * up, mask=inside)


@triton.jit
def swiglu_backward(d_NF, gate_up, out, stride, F, BLOCK: tl.constexpr):
    """Write the gradients of gate and up, side by side, from that of silu(gate) * up.

    One program handles BLOCK columns of one token.
    """
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F

    gate = tl.load(gate_up + n * stride + f, mask=inside)
    up = tl.load(gate_up + n * stride + F + f, mask=inside).to(tl.float32)
    d = tl.load(d_NF + n * F + f, mask=inside).to(tl.float32)

    # silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x))).
    wide = gate.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-wide))
    d_gate = d * up * sigmoid * (1 + wide * (1 - sigmoid))
    tl.store(out + n * 2 * F + f, d_gate.to(gate.dtype), mask=inside)
    tl.store(out + n * 2 * F + F + f, (d * wide * sigmoid).to(gate.dtype), mask=inside)


@triton.jit
def logprobs(logits_NV, target_N, temperature, logprob_N, entropy_N, lse_N, V, BLOCK: tl.constexpr):
    """Write the target's log-probability in softmax(logits / temperature), and the entropy.

    `lse_N` gets the log-sum-exp of the scaled logits, which the backward pass needs.
    """
    n = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)

    # One pass over the vocabulary, with all sums relative to the largest logit so far:
    # total = sum exp(x - top), weighted = sum exp(x - top) (x - top).
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        logits = tl.load(logits_NV + n * V + start + v, mask=start + v < V, other=-1e30)
        x = logits.to(tl.float32) / temperature

        higher = tl.maximum(top, tl.max(x))
        shrink = tl.exp(top - higher)
        mass = tl.exp(x - higher)
        weighted = (weighted + total * (top - higher)) * shrink + tl.sum(
            mass * tl.maximum(x - higher, -1e4)  # no 0 * -inf
        )
        total = total * shrink + tl.sum(mass)
        top = higher

    lse = top + tl.log(total)
    tl.store(lse_N + n, lse)

    # The entropy is log(total) - weighted / total, because the scale `top` cancels out.
    target = tl.load(logits_NV + n * V + tl.load(target_N + n)).to(tl.float32)
    tl.store(logprob_N + n, target / temperature - lse)
    tl.store(entropy_N + n, tl.log(total) - weighted / total)


@triton.jit
def logprobs_backward(logits_NV, target_N, temperature, lse_N, d_N, V, BLOCK: tl.constexpr):
    """Overwrite the logits by their gradient, from that of the target's log-probability.

    One program handles BLOCK columns of one token.
    """
    n = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_N + n)
    d = tl.load(d_N + n)
    target = tl.load(target_N + n)

    # d logprob / d logits = (onehot(target) - p) / temperature.
    x = tl.load(logits_NV + n * V + v, mask=v < V, other=0.0)
    p = tl.exp(x.to(tl.float32) / temperature - lse)
    d_logits = tl.where(v == target, 1.0 - p, -p) * d / temperature
    tl.store(logits_NV + n * V + v, d_logits.to(x.dtype), mask=v < V)

"""Products for few tokens, and what lies between products."""

import triton
import triton.language as tl

from grpo.rollout.kernels.launch import for_any_batch, gdc_launch_dependents, gdc_wait, wait


@for_any_batch
def multiply(
    x_MK,
    weight_XK,
    y_SMX,
    M,
    X,
    K,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = x weight' for few tokens, as SPLITS sums that are to be added up, each over a part of K.
    One program for BLOCK_X columns and a part.

    It takes about as long as the reading of the weights. What the vendor's library loses are the
    gaps before and after: here the next kernel is launched when few steps are left.
    """
    split, steps = tl.program_id(1), K // BLOCK_K
    n, m, k = (
        tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X),
        tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_K),
    )
    weights = weight_XK + (tl.minimum(n, X - 1).to(tl.int64) * K)[:, None] + k[None, :]
    inputs = x_MK + (tl.minimum(m, M - 1) * K)[None, :] + k[:, None]
    end = (split + 1) * steps // SPLITS
    gdc_wait()
    y = tl.zeros([BLOCK_X, BLOCK_M], tl.float32)
    for i in tl.range(split * steps // SPLITS, end, num_stages=STAGES):
        if i == end - 8:
            gdc_launch_dependents()
        y = tl.dot(tl.load(weights + i * BLOCK_K), tl.load(inputs + i * BLOCK_K), y)
    tl.store(
        y_SMX + (split * M + m)[None, :] * X + n[:, None],
        y,
        mask=(m < M)[None, :] & (n < X)[:, None],
    )


@triton.jit
def _second(up_rX, n, width, RANK: tl.constexpr):
    """Columns n of an adapter's second matrix (RANK, n); something that is not used where there is
    none.
    """
    if RANK > 0:
        return tl.load(
            up_rX + tl.arange(0, RANK)[:, None] + n[None, :] * RANK,
            mask=(n < width)[None, :],
            other=0.0,
        )
    else:
        return n


@triton.jit
def _summed(y_SMX, m, n, mask, M, stride, SPLITS: tl.constexpr):
    """Columns n of the tokens m of a product in SPLITS parts."""
    y = tl.zeros(mask.shape, tl.float32)
    for s in tl.static_range(SPLITS):
        y += tl.load(y_SMX + (s * M + m)[:, None] * stride + n[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    return y


@triton.jit
def _finished(
    y_SMX,
    up_rn,
    bias_X,
    scale_M,
    m,
    n,
    inside,
    M,
    stride,
    width,
    down_at,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Columns n of a product, summed, with the adapter's part (its down-projections stand in the
    columns from `down_at` on), what the inputs' norm multiplies with, and the bias.
    """
    y = _summed(y_SMX, m, n, inside, M, stride, SPLITS)
    if RANK > 0:
        j = tl.arange(0, RANK)
        down = _summed(
            y_SMX, m, down_at + j, (m < M)[:, None] & (j < RANK)[None, :], M, stride, SPLITS
        )
        y += tl.dot(down.to(dtype), up_rn, input_precision="ieee")
    if scale_M is not None:
        y *= scale_M[:, None]
    if bias_X is not None:
        y += tl.load(bias_X + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    return y.to(dtype)


@triton.jit
def _scale(squares_MB, m, N, eps, BLOCKS: tl.constexpr):
    """What RMSNorm (arXiv:1910.07467) multiplies the tokens m with; `add` has left their sums of
    squares by blocks.
    """
    b = tl.arange(0, triton.next_power_of_2(BLOCKS))
    squares = tl.load(
        squares_MB + m[:, None] * BLOCKS + b[None, :], mask=(b < BLOCKS)[None, :], other=0.0
    )
    return tl.rsqrt(tl.sum(squares, 1) / N + eps)


@for_any_batch
def add(
    x_MN,
    y_SMX,
    up_rX,
    bias_X,
    weight_N,
    out_MN,
    squares_MB,
    stride,
    M,
    N,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x += y, a product (if any); out = x * weight, and the sums of squares of BLOCK columns each,
    for the norm after the next product.
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = m < M
    inside = real[:, None] & (n < N)[None, :]
    m = tl.minimum(m, M - 1)
    at = m[:, None] * N + n[None, :]
    x = tl.load(x_MN + at, mask=inside, other=0.0)
    weight = tl.load(weight_N + n, mask=n < N, other=0.0).to(tl.float32)
    up = _second(up_rX, n, N, RANK)
    wait()
    if y_SMX is not None:
        y = _finished(y_SMX, up, bias_X, None, m, n, inside, M, stride, N, N, RANK, SPLITS, x.dtype)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_MN + at, x, mask=inside)
    wide = x.to(tl.float32)
    tl.store(
        squares_MB + m * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 1), mask=real
    )
    tl.store(out_MN + at, (wide * weight[None, :]).to(x.dtype), mask=inside)


@for_any_batch
def silu_mul(
    both_SMX,
    up_rX,
    bias_X,
    squares_MB,
    out_MN,
    stride,
    M,
    N,
    hidden,
    eps,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = silu(gate) * up, where gate and up stand side by side. One program for some tokens and
    BLOCK columns.
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None, :]
    m = tl.minimum(m, M - 1)
    scale = _scale(squares_MB, m, hidden, eps, BLOCKS)
    for_gate = _second(up_rX, n, 2 * N, RANK)
    for_up = _second(up_rX, N + n, 2 * N, RANK)
    dtype: tl.constexpr = out_MN.dtype.element_ty
    wait()
    gate = _finished(
        both_SMX,
        for_gate,
        bias_X,
        scale,
        m,
        n,
        inside,
        M,
        stride,
        2 * N,
        2 * N,
        RANK,
        SPLITS,
        dtype,
    )
    up = _finished(
        both_SMX,
        for_up,
        bias_X,
        scale,
        m,
        N + n,
        inside,
        M,
        stride,
        2 * N,
        2 * N + RANK,
        RANK,
        SPLITS,
        dtype,
    )
    wide = gate.to(tl.float32)
    tl.store(
        out_MN + m[:, None] * N + n[None, :],
        (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up,
        mask=inside,
    )


@for_any_batch
def rotate_and_store(
    qkv_SMX,
    up_rX,
    bias_X,
    squares_MB,
    q_MHD,
    own_keys,
    own_values,
    cos,
    sin,
    q_weight,
    k_weight,
    start_R,
    written_R,
    slot_R,
    live_R,
    stride,
    M,
    room,
    hidden,
    eps,
    head_eps,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Rotary positions (arXiv:2104.09864) on queries and keys, normed before where there are
    weights; keys and values into the cache.

    One program for some tokens and a head: queries, keys, then values. Caches are (slots, K, room,
    D); `cos`, `sin` (positions, D / 2).
    """
    m, head = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.program_id(1)
    real = m < M
    m = tl.minimum(m, M - 1)
    r, t = m // T, m % T
    half = tl.arange(0, D // 2)
    width: tl.constexpr = (H + 2 * K) * D
    kind = tl.where(head < H, 0, tl.where(head < H + K, 1, 2))
    inside = real[:, None] & (half < D)[None, :]
    scale, n, down_at = (
        _scale(squares_MB, m, hidden, eps, BLOCKS),
        head * D + half,
        width + kind * RANK,
    )
    for_first = _second(up_rX, n, width, RANK)
    for_second = _second(up_rX, n + D // 2, width, RANK)
    place = tl.load(written_R + r) - 1 + t
    position = tl.maximum(tl.load(start_R + r) + place, 0)[:, None] * (D // 2) + half[None, :]
    c, s = tl.load(cos + position).to(tl.float32), tl.load(sin + position).to(tl.float32)
    dtype: tl.constexpr = q_MHD.dtype.element_ty
    wait()
    first = _finished(
        qkv_SMX,
        for_first,
        bias_X,
        scale,
        m,
        n,
        inside,
        M,
        stride,
        width,
        down_at,
        RANK,
        SPLITS,
        dtype,
    )
    second = _finished(
        qkv_SMX,
        for_second,
        bias_X,
        scale,
        m,
        n + D // 2,
        inside,
        M,
        stride,
        width,
        down_at,
        RANK,
        SPLITS,
        dtype,
    )
    if head < H + K:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if q_weight is not None:
            weight = q_weight if head < H else k_weight
            head_scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + head_eps)[:, None]
            a = (
                (a * head_scale * tl.load(weight + half).to(tl.float32)[None, :])
                .to(first.dtype)
                .to(tl.float32)
            )
            b = (
                (b * head_scale * tl.load(weight + D // 2 + half).to(tl.float32)[None, :])
                .to(first.dtype)
                .to(tl.float32)
            )
        first, second = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    if head < H:
        target = q_MHD + ((m * H + head) * D)[:, None] + half[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)
    else:
        kept = inside & ((tl.load(live_R + r) != 0) & (place >= 0) & (place < room))[:, None]
        cache = own_keys if head < H + K else own_values
        target = (
            cache
            + (((tl.load(slot_R + r) * K + (head - H) % K) * room + place) * D)[:, None]
            + half[None, :]
        )
        tl.store(target, first, mask=kept)
        tl.store(target + D // 2, second, mask=kept)

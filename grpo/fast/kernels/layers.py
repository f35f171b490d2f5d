"""What a Llama layer does between its matrix products, except the attention."""

import triton
import triton.language as tl

from grpo.fast.kernels.launch import for_any_batch, wait
from grpo.fast.kernels.products import finish_product, load_lora_b


@triton.jit
def _tokens_of_program(M, BLOCK_M: tl.constexpr):
    """Return this program's tokens, clamped to the last one, and which of them exist."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    return tl.minimum(m, M - 1), m < M


@triton.jit
def _rms_scale(squares_MB, m, E, eps, BLOCKS: tl.constexpr):
    """Return the scale of RMSNorm (arXiv:1910.07467, eq. 4) for the tokens `m`.

    `squares_MB` has their sums of squares for each block of columns, as `add_and_weigh` writes
    them.
    """
    b = tl.arange(0, triton.next_power_of_2(BLOCKS))
    at = squares_MB + m[:, None] * BLOCKS + b[None, :]
    squares = tl.load(at, mask=(b < BLOCKS)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / E + eps)


@for_any_batch
def add_and_weigh(
    x_ME, y_SMO, lora_b_rE, bias_E, weight_E, weighted_ME, squares_MB,
    stride, M, E,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a product to the residual stream, x += y, and begin the next norm of x.

    Writes weighted = x * weight, and the sums of squares of BLOCK columns each. The norm's scale is
    applied to the product that follows (`finish_product`), because it is known only when all blocks
    of x are. Without a product (`y` None) nothing is added.
    """
    m, is_real = _tokens_of_program(M, BLOCK_M)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = is_real[:, None] & (columns < E)[None, :]
    at = m[:, None] * E + columns[None, :]
    x = tl.load(x_ME + at, mask=mask, other=0.0)
    weight = tl.load(weight_E + columns, mask=columns < E, other=0.0).to(tl.float32)
    lora_b = load_lora_b(lora_b_rE, columns, E, RANK)

    wait()
    if y_SMO is not None:
        y = finish_product(
            y_SMO, lora_b, bias_E, None, m, columns, mask, M, stride, E, E, RANK, PARTS, x.dtype
        )
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_ME + at, x, mask=mask)

    wide = x.to(tl.float32)
    place = squares_MB + m * tl.num_programs(1) + tl.program_id(1)
    tl.store(place, tl.sum(wide * wide, 1), mask=is_real)
    tl.store(weighted_ME + at, (wide * weight[None, :]).to(x.dtype), mask=mask)


@for_any_batch
def silu_mul(
    gate_up_SMO, lora_b_rO, bias_O, squares_MB, out_MF,
    stride, M, F, E, eps,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SwiGLU (arXiv:2002.05202): out = silu(gate) * up, where gate and up (F columns each) are the
    two halves of one product.
    """
    m, is_real = _tokens_of_program(M, BLOCK_M)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = is_real[:, None] & (columns < F)[None, :]
    scale = _rms_scale(squares_MB, m, E, eps, BLOCKS)
    gate_lora_b = load_lora_b(lora_b_rO, columns, 2 * F, RANK)
    up_lora_b = load_lora_b(lora_b_rO, F + columns, 2 * F, RANK)
    dtype: tl.constexpr = out_MF.dtype.element_ty

    # Both halves of the product, with their adapters and the scale of the norm.
    wait()
    gate = finish_product(
        gate_up_SMO, gate_lora_b, bias_O, scale,
        m, columns, mask,
        M, stride, 2 * F, 2 * F,
        RANK, PARTS, dtype,
    )  # fmt: skip
    up = finish_product(
        gate_up_SMO, up_lora_b, bias_O, scale,
        m, F + columns, mask,
        M, stride, 2 * F, 2 * F + RANK,
        RANK, PARTS, dtype,
    )  # fmt: skip

    # silu(gate) is rounded before it is multiplied, as PyTorch does.
    wide = gate.to(tl.float32)
    out = (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up
    tl.store(out_MF + m[:, None] * F + columns[None, :], out, mask=mask)


@triton.jit
def _rotate(first, second, cos, sin, weight, eps, D: tl.constexpr):
    """Return both halves of a head after its norm, if it has one, and the rotation by its position.

    The norm is RMSNorm over the head, as in Qwen 3; `weight` is None for models without it.
    """
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if weight is not None:
        half = tl.arange(0, D // 2)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        weight_a = tl.load(weight + half).to(tl.float32)[None, :]
        weight_b = tl.load(weight + D // 2 + half).to(tl.float32)[None, :]
        a = (a * scale * weight_a).to(first.dtype).to(tl.float32)
        b = (b * scale * weight_b).to(first.dtype).to(tl.float32)

    # The pair (i, i + D / 2) is rotated.
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@for_any_batch
def rotate_and_store(
    qkv_SMO, lora_b_rO, bias_O, squares_MB, q_MHD, row_keys, row_values,
    cos, sin, q_weight, k_weight,
    start_R, written_R, slot_R, live_R,
    stride, M, row_room, E, eps, head_eps, T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Finish queries, keys and values; rotate the former two; append keys and values to the cache.

    One program handles some tokens and one head: first the query heads, then the key heads, then
    the value heads. Rotary positions: arXiv:2104.09864. The caches are (slots, K, row_room, D);
    `cos` and `sin` (positions, D / 2). `q_weight` and `k_weight` are those of the heads' norms.
    """
    m, is_real = _tokens_of_program(M, BLOCK_M)
    head = tl.program_id(1)
    half = tl.arange(0, D // 2)
    mask = is_real[:, None] & (half < D)[None, :]

    # Each kind of head (query, key, value) has its own adapter.
    width: tl.constexpr = (H + 2 * K) * D
    kind = tl.where(head < H, 0, tl.where(head < H + K, 1, 2))
    lora_a_begin = width + kind * RANK
    columns = head * D + half
    lora_b_first = load_lora_b(lora_b_rO, columns, width, RANK)
    lora_b_second = load_lora_b(lora_b_rO, columns + D // 2, width, RANK)

    # The place of each token in its row, and the angle of its position.
    scale = _rms_scale(squares_MB, m, E, eps, BLOCKS)
    r = m // T
    place = tl.load(written_R + r) - 1 + m % T
    angle = tl.maximum(tl.load(start_R + r) + place, 0)[:, None] * (D // 2) + half[None, :]
    c = tl.load(cos + angle).to(tl.float32)
    s = tl.load(sin + angle).to(tl.float32)
    dtype: tl.constexpr = q_MHD.dtype.element_ty

    wait()
    first = finish_product(
        qkv_SMO, lora_b_first, bias_O, scale,
        m, columns, mask, M, stride, width, lora_a_begin, RANK, PARTS, dtype,
    )  # fmt: skip
    second = finish_product(
        qkv_SMO, lora_b_second, bias_O, scale,
        m, columns + D // 2, mask, M, stride, width, lora_a_begin, RANK, PARTS, dtype,
    )  # fmt: skip

    if head < H:
        first, second = _rotate(first, second, c, s, q_weight, head_eps, D)
        target = q_MHD + ((m * H + head) * D)[:, None] + half[None, :]
        tl.store(target, first, mask=mask)
        tl.store(target + D // 2, second, mask=mask)
    else:
        if head < H + K:
            first, second = _rotate(first, second, c, s, k_weight, head_eps, D)
        cache = row_keys if head < H + K else row_values
        is_stored = (tl.load(live_R + r) != 0) & (place >= 0) & (place < row_room)
        at = ((tl.load(slot_R + r) * K + (head - H) % K) * row_room + place) * D
        target = cache + at[:, None] + half[None, :]
        tl.store(target, first, mask=mask & is_stored[:, None])
        tl.store(target + D // 2, second, mask=mask & is_stored[:, None])

"""The Triton kernels of the decode step: everything between the matrix products.

PyTorch would launch some forty small kernels a layer between the products; here there are five.
The products themselves are left to the vendor's library. A product comes out unfinished: the kernel
that reads it applies the RMSNorm of its input, the second half of its LoRA adapter, and its bias.

Arithmetic is in float32. Results are rounded where `transformers` rounds them, except inside the
norms. Rows that are not live write nothing that is ever read.

Shapes: R rows, T tokens of each in a pass, M = R * T tokens, E hidden size, H query heads, K key
heads, Q = H / K, D head size, P prompts, L tokens of a prompt, V vocabulary, r rank of an adapter.
A row's first `written - 1` tokens are in the cache; the pass appends its T tokens to them.

Attention: the keys are divided into splits, which are read in parallel and combined afterwards
(FlashDecoding; arXiv:2402.05099 for prompts that several rows share). The partial result of a
split is the maximum of the scores and the sum of their exponentials, (M, H, splits) each, and the
weighted sum of the values (M, H, splits, D).
"""

# Triton compiles for the types that annotations name, so parameters have none but `constexpr`.
# mypy: allow-untyped-defs

import triton
import triton.language as tl

# Decorates kernels that are compiled once for all sizes of the batch, and once for one row and for
# one token of each row.
for_any_batch = triton.jit(
    do_not_specialize=("tiles", "prompt_splits", "splits"),
    do_not_specialize_on_alignment=("T", "M", "R"),
)

# How a product is finished by the kernel that reads it


@triton.jit
def load_lora_b(lora_b_rO, columns, width, RANK: tl.constexpr):
    """Return `columns` of an adapter's second matrix (RANK, columns).

    Without an adapter (RANK 0) the result is a placeholder that `finish_product` ignores.
    """
    if RANK > 0:
        return tl.load(
            lora_b_rO + tl.arange(0, RANK)[:, None] + columns[None, :] * RANK,
            mask=(columns < width)[None, :],
            other=0.0,
        )
    else:
        return columns


@triton.jit
def finish_product(
    y_MO, lora_b_rn, bias_O, scale_M,
    m, columns, mask,
    M, stride, width, lora_a_begin,
    RANK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return `columns` of a product for the tokens `m`, complete: W x, plus s B A x, plus the bias.

    `scale_M` is the scale of the RMSNorm of the input, which the product has left out; None if
    there is none. A x is in the product's columns from `lora_a_begin` on.
    """
    at = y_MO + m[:, None] * stride
    y = tl.load(at + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if RANK > 0:
        j = tl.arange(0, RANK)
        lora_mask = (m < M)[:, None] & (j < RANK)[None, :]
        hidden = tl.load(at + (lora_a_begin + j)[None, :], mask=lora_mask, other=0.0)
        y += tl.dot(hidden, lora_b_rn, input_precision="ieee")

    if scale_M is not None:
        y *= scale_M[:, None]
    if bias_O is not None:
        y += tl.load(bias_O + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return y.to(dtype)


# What a layer does between its products, except the attention


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
    x_ME, y_MO, lora_b_rE, bias_E, weight_E, weighted_ME, squares_MB,
    stride, M, E,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
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

    if y_MO is not None:
        y = finish_product(
            y_MO, lora_b, bias_E, None, m, columns, mask, M, stride, E, E, RANK, x.dtype
        )
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_ME + at, x, mask=mask)

    wide = x.to(tl.float32)
    place = squares_MB + m * tl.num_programs(1) + tl.program_id(1)
    tl.store(place, tl.sum(wide * wide, 1), mask=is_real)
    tl.store(weighted_ME + at, (wide * weight[None, :]).to(x.dtype), mask=mask)


@for_any_batch
def silu_mul(
    gate_up_MO, lora_b_rO, bias_O, squares_MB, out_MF,
    stride, M, F, E, eps,
    RANK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
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
    gate = finish_product(
        gate_up_MO, gate_lora_b, bias_O, scale,
        m, columns, mask,
        M, stride, 2 * F, 2 * F,
        RANK, dtype,
    )  # fmt: skip
    up = finish_product(
        gate_up_MO, up_lora_b, bias_O, scale,
        m, F + columns, mask,
        M, stride, 2 * F, 2 * F + RANK,
        RANK, dtype,
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
    qkv_MO, lora_b_rO, bias_O, squares_MB, q_MHD, row_keys, row_values,
    cos, sin, q_weight, k_weight,
    start_R, written_R, slot_R, live_R,
    stride, M, row_room, E, eps, head_eps, T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    RANK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
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

    first = finish_product(
        qkv_MO, lora_b_first, bias_O, scale,
        m, columns, mask, M, stride, width, lora_a_begin, RANK, dtype,
    )  # fmt: skip
    second = finish_product(
        qkv_MO, lora_b_second, bias_O, scale,
        m, columns + D // 2, mask, M, stride, width, lora_a_begin, RANK, dtype,
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


# Attention of each token to its prompt and to its row's own tokens


@triton.jit
def _attend_split(
    query_MHD, keys, values, maxima, sums, outputs,
    first_token, tokens, k, base, begin, end, seen, split, splits, scale,
    IS_CAUSAL: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of `tokens` neighbouring tokens to the keys from `begin` up to `end`;
    store the partial results as number `split`.

    The queries are those of the Q heads that share the key head `k`. The keys begin at `base` in
    the cache. The first token sees the keys up to number `seen`; if IS_CAUSAL, each token sees one
    more than the one before. A query of a draft may see no key at all, so the maximum begins at a
    finite number.
    """
    # Query i is that of head k * Q + i % Q of token i // Q.
    Q: tl.constexpr = H // K
    i = tl.arange(0, BLOCK_Q)
    j = tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, D)
    mask = i < tokens * Q
    head = (first_token + i // Q).to(tl.int64) * H + k * Q + i % Q
    q = tl.load(query_MHD + head[:, None] * D + d[None, :], mask=mask[:, None], other=0.0)
    last = seen + (i // Q if IS_CAUSAL else tl.zeros_like(i))

    maximum = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    output = tl.zeros([BLOCK_Q, D], tl.float32)
    for block in range(begin, end, BLOCK_KEYS):
        # A block of keys and values.
        is_real = block + j < end
        cached = base + (block + j)[:, None] * D + d[None, :]
        key = tl.load(keys + cached, mask=is_real[:, None], other=0.0)
        value = tl.load(values + cached, mask=is_real[:, None], other=0.0)

        # The scores of the keys that each query sees.
        scores = tl.dot(q, tl.trans(key), input_precision="tf32x3") * scale
        is_seen = is_real[None, :] & ((block + j)[None, :] <= last[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))

        # The softmax is computed online (arXiv:1805.02867): earlier sums are rescaled whenever the
        # maximum grows.
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(value.dtype), value, input_precision="tf32x3")
        output = output * shrink[:, None] + weighted
        maximum = higher

    at = head * splits + split
    tl.store(maxima + at, maximum, mask=mask)
    tl.store(sums + at, total, mask=mask)
    tl.store(outputs + at[:, None] * D + d[None, :], output, mask=mask[:, None])


@for_any_batch
def attend(
    query_MHD, prompt_keys, prompt_values, row_keys, row_values,
    tile_prompt, tile_first, tile_tokens,
    length_P, written_R, slot_R, live_R,
    maxima, sums, outputs,
    scale, prompt_room, row_room, tiles, R, T,
    prompt_split, row_split, prompt_splits, splits,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    PROMPT_QUERIES: tl.constexpr, ROW_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the partial results of all splits.

    The first programs read splits of `prompt_split` keys of the prompts, the others splits of
    `row_split` keys of the rows. These sizes vary from batch to batch, so they are no constants:
    the kernel would be compiled again for each. A program has PROMPT_QUERIES or ROW_QUERIES
    queries, Q of each token; some of them may be padding. A tile is a run of neighbouring tokens
    that share a prompt. Of a token's `splits` partial results the first `prompt_splits` belong to
    its prompt.

    The prompt caches are (P, K, prompt_room, D), the row caches (slots, K, row_room, D).
    """
    program = tl.program_id(0)
    prompt_programs = tiles * K * prompt_splits
    if program < prompt_programs:
        # A tile of tokens, one key head, and one split of their prompt.
        tile = program % tiles
        k = program // tiles % K
        split = program // tiles // K
        p = tl.load(tile_prompt + tile).to(tl.int64)
        tokens = tl.load(tile_tokens + tile)
        length = tl.load(length_P + p)
        begin = split * prompt_split

        if tokens > 0 and begin < length:
            _attend_split(
                query_MHD, prompt_keys, prompt_values, maxima, sums, outputs,
                tl.load(tile_first + tile), tokens, k, (p * K + k) * prompt_room * D,
                begin, tl.minimum(begin + prompt_split, length), length, split, splits, scale,
                False, H, K, D, PROMPT_QUERIES, BLOCK_KEYS,
            )  # fmt: skip
    else:
        _attend_row(
            program - prompt_programs,
            query_MHD, row_keys, row_values, maxima, sums, outputs,
            written_R, slot_R, live_R,
            scale, row_room, R, T, row_split, prompt_splits, splits,
            H, K, D, ROW_QUERIES, BLOCK_KEYS,
        )  # fmt: skip


@triton.jit
def _attend_row(
    program,
    query_MHD, row_keys, row_values, maxima, sums, outputs,
    written_R, slot_R, live_R,
    scale, row_room, R, T, row_split, prompt_splits, splits,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend from some tokens of a row to one split of the row's own tokens."""
    # The program's row, key head, part of the row's tokens, and split of its keys.
    tokens_at_once: tl.constexpr = BLOCK_Q // (H // K)
    parts = tl.cdiv(T, tokens_at_once)
    r = program % R
    k = program // R % K
    part = program // R // K % parts
    split = program // R // K // parts

    # The tokens from `first` up to `after`. The first token fed is the last one written, which is
    # not in the cache yet; hence the 1.
    first = part * tokens_at_once
    after = tl.minimum(first + tokens_at_once, T)
    cached = tl.load(written_R + r) - 1

    begin = split * row_split
    end = tl.minimum(tl.minimum(cached + after, row_room), begin + row_split)
    is_live = tl.load(live_R + r) != 0
    slot = tl.load(slot_R + r)

    if is_live & (begin < end):
        _attend_split(
            query_MHD, row_keys, row_values, maxima, sums, outputs,
            r * T + first, after - first, k, (slot * K + k) * row_room * D,
            begin, end, cached + first, prompt_splits + split, splits, scale,
            True, H, K, D, BLOCK_Q, BLOCK_KEYS,
        )  # fmt: skip


@for_any_batch
def combine_splits(
    out_MHD, length_R, written_R, live_R, maxima, sums, outputs,
    M, T, prompt_split, row_split, prompt_splits, splits,
    H: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of each query into one softmax (arXiv:2402.05099, section 3.1).

    One program handles PAIRS pairs of token and head, TOGETHER splits at a time. `length_R` is the
    length of each row's prompt.
    """
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, TOGETHER)
    d = tl.arange(0, D)
    m = tl.minimum(pair // H, M - 1)
    r = m // T

    # How many splits the query has: those of its prompt, then those of its row.
    is_live = (pair < M * H) & (tl.load(live_R + r) != 0)
    in_prompt = (tl.load(length_R + r) + prompt_split - 1) // prompt_split
    in_row = (tl.load(written_R + r) + m % T + row_split - 1) // row_split
    number = tl.where(is_live, in_prompt + tl.minimum(in_row, splits - prompt_splits), 0)

    maximum = tl.full([PAIRS], -1e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    output = tl.zeros([PAIRS, D], tl.float32)

    for begin in range(0, tl.max(number), TOGETHER):
        s = begin + i[None, :]
        is_real = s < number[:, None]
        place = tl.where(s < in_prompt[:, None], s, prompt_splits + s - in_prompt[:, None])
        at = pair[:, None] * splits + place

        # Sums so far and new ones are put on the scale of the larger maximum.
        here = tl.load(maxima + at, mask=is_real, other=-float("inf"))
        higher = tl.maximum(maximum, tl.max(here, 1))
        shrink = tl.exp(maximum - higher)
        grow = tl.exp(here - higher[:, None])
        total = total * shrink + tl.sum(tl.load(sums + at, mask=is_real, other=0.0) * grow, 1)
        values = tl.load(
            outputs + at[:, :, None] * D + d[None, None, :], mask=is_real[:, :, None], other=0.0
        )
        output = output * shrink[:, None] + tl.sum(values * grow[:, :, None], 1)
        maximum = higher

    out = (output / total[:, None]).to(out_MHD.dtype.element_ty)
    tl.store(out_MHD + pair[:, None] * D + d[None, :], out, mask=is_live[:, None])


# Sampling


@triton.jit
def _uniform(key, position):
    """Return the uniform number of `grpo.rollout.sampling.uniform` (SplitMix64).

    The constants are those of SplitMix64 as signed integers; products wrap.
    """
    x = key + (position.to(tl.int64) + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@for_any_batch
def reduce_blocks(
    logits_MV, temperature_1, maxima, sums, argmaxima, V, blocks, BLOCK: tl.constexpr
):
    """Reduce each BLOCK of a token's logits, divided by the temperature, to the maximum, the sum of
    exponentials relative to it, and the place of the maximum: (M, blocks) each.
    """
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)

    temperature = tl.load(temperature_1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_MV + m * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    x = x / tl.where(temperature == 0, 1.0, temperature)

    maximum = tl.max(x)
    total = tl.where(maximum == -float("inf"), 0.0, tl.sum(tl.exp(x - maximum)))
    at = m * blocks + block
    tl.store(maxima + at, maximum)
    tl.store(sums + at, total)
    tl.store(argmaxima + at, block * BLOCK + tl.argmax(x, 0))


@for_any_batch
def sample(
    logits_MV, temperature_1, key_R, written_R,
    maxima, sums, argmaxima, chosen_M, logprob_M,
    V, blocks, T,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sample by the inverse CDF: take the token at which the cumulative probability passes the
    place's uniform number.

    The block is found first, and then the token in it. Temperature 0 takes the likeliest token.
    """
    m = tl.program_id(0).to(tl.int64)
    r = m // T
    temperature = tl.load(temperature_1)

    # The mass of each block, relative to the maximum of all logits.
    b = tl.arange(0, BLOCKS)
    maximum_b = tl.load(maxima + m * blocks + b, mask=b < blocks, other=-float("inf"))
    maximum = tl.max(maximum_b)
    mass_b = tl.load(sums + m * blocks + b, mask=b < blocks, other=0.0)
    mass_b = mass_b * tl.exp(maximum_b - maximum)
    total = tl.sum(mass_b)
    logsumexp = maximum + tl.log(total)

    if temperature == 0:
        token = tl.load(argmaxima + m * blocks + tl.argmax(maximum_b, 0))
        logprob = maximum - logsumexp
    else:
        u = _uniform(tl.load(key_R + r), tl.load(written_R + r) + m % T)
        passed = (u * total.to(tl.float64)).to(tl.float32)

        # Rounding may carry the number beyond the last block or token that has any mass.
        block = tl.sum((tl.cumsum(mass_b, 0) <= passed).to(tl.int32))
        block = tl.minimum(block, tl.max(tl.where(mass_b > 0, b, 0)))
        before = tl.sum(tl.where(b < block, mass_b, 0.0))

        # The same within the block.
        i = tl.arange(0, BLOCK)
        v = block * BLOCK + i
        x = tl.load(logits_MV + m * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
        x = x / temperature
        mass = tl.exp(x - maximum)
        place = tl.sum((tl.cumsum(mass, 0) <= passed - before).to(tl.int32))
        place = tl.minimum(place, tl.max(tl.where(mass > 0, i, 0)))
        token = block * BLOCK + place
        logprob = tl.max(tl.where(i == place, x, -float("inf"))) - logsumexp

    tl.store(chosen_M + m, token)
    tl.store(logprob_M + m, logprob)


@for_any_batch
def accept(
    chosen_M, logprob_M, feed, out_tokens, out_logprobs, stops,
    slot_R, budget_R, written_R, live_R,
    row_room, T,
    WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Write the tokens that count (see `decoder.accepted`); end the row if it is finished.

    A token counts if all drafted tokens before it were chosen. The last one that counts is fed
    next. One program handles one row.
    """
    r = tl.program_id(0)
    t = tl.arange(0, WIDTH)
    is_live = tl.load(live_R + r) != 0
    written = tl.load(written_R + r)
    budget = tl.load(budget_R + r)
    token = tl.load(chosen_M + r * T + t, mask=t < T, other=0).to(tl.int64)
    drafted = tl.load(feed + r * WIDTH + t + 1, mask=t + 1 < T, other=-1)  # -1: no draft

    # The last token that counts is the first that ends the row or differs from the draft.
    is_end = written + t + 1 >= budget
    for s in tl.static_range(STOPS):
        is_end = is_end | (token == tl.load(stops + s))
    last = tl.min(tl.where((is_end == 0) & (token == drafted), WIDTH, t))
    counts = (t <= last) & is_live

    place = tl.load(slot_R + r).to(tl.int64) * row_room + written + t
    logprob = tl.load(logprob_M + r * T + t, mask=t < T, other=0.0)
    tl.store(out_tokens + place, token, mask=counts)
    tl.store(out_logprobs + place, logprob, mask=counts)

    # What the next step feeds and continues from.
    goes_on = tl.sum((counts & (t == last) & (is_end == 0)).to(tl.int32)) > 0
    next_token = tl.sum(tl.where(t == last, token, 0))
    tl.store(feed + r * WIDTH, tl.where(goes_on, next_token, 0))
    tl.store(written_R + r, written + tl.sum(counts.to(tl.int32)))
    tl.store(live_R + r, goes_on.to(tl.int64))

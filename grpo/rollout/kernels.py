"""The decode step's own kernels, in Triton: everything between the matrix products.

Products are left to the vendor's library; what lies between them would otherwise be some forty small kernels a layer. A product is bare:
the norm of its inputs, the second half of its adapter and its bias are left to the kernel that reads it. Arithmetic is in float32,
roundings stand where `transformers` has them, but for those of the norms. Rows that are not live write nothing that anyone reads.

Shapes: R rows, T tokens of each that are fed at once, M = R * T, N hidden size, H query heads, K key heads, Q = H / K, D head size,
L tokens of a prompt, V vocabulary. A row's first `written - 1` tokens are in the cache; those fed stand behind them.
"""
import triton
import triton.language as tl

for_any_batch = triton.jit(do_not_specialize_on_alignment=("T", "M", "R", "tiles", "first", "splits"))  # one kernel for 1 and one for all else


@triton.jit
def _finished(y_MX, up_rX, bias_X, scale_M, m, n, inside, stride, width, down_at, RANK: tl.constexpr):
    """Columns n of the tokens m of a product: with the adapter's part (its down-projections stand in the columns from `down_at` on), what
    the inputs' norm multiplies with, and the bias."""
    bare = tl.load(y_MX + m[:, None] * stride + n[None, :], mask=inside, other=0.0)
    y = bare.to(tl.float32)
    if RANK > 0:
        j = tl.arange(0, RANK)
        down = tl.load(y_MX + m[:, None] * stride + down_at + j[None, :])
        up = tl.load(up_rX + j[:, None] + n[None, :] * RANK, mask=(n < width)[None, :], other=0.0)
        y += tl.dot(down, up, input_precision="ieee")
    if scale_M is not None:
        y *= scale_M[:, None]
    if bias_X is not None:
        y += tl.load(bias_X + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    return y.to(bare.dtype)


@triton.jit
def _scale(squares_MB, m, N, eps, BLOCKS: tl.constexpr):
    """What RMSNorm (arXiv:1910.07467) multiplies the tokens m with; `add` has left their sums of squares by blocks."""
    b = tl.arange(0, triton.next_power_of_2(BLOCKS))
    squares = tl.load(squares_MB + m[:, None] * BLOCKS + b[None, :], mask=(b < BLOCKS)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / N + eps)


@for_any_batch
def add(x_MN, y_MX, up_rX, bias_X, weight_N, out_MN, squares_MB, stride, M, N, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK: tl.constexpr):
    """x += y, a product (if any); out = x * weight, and the sums of squares of BLOCK columns each, for the norm after the next product."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = m < M
    inside = real[:, None] & (n < N)[None, :]
    m = tl.minimum(m, M - 1)
    at = m[:, None] * N + n[None, :]
    x = tl.load(x_MN + at, mask=inside, other=0.0)
    if y_MX is not None:
        y = _finished(y_MX, up_rX, bias_X, None, m, n, inside, stride, N, N, RANK)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_MN + at, x, mask=inside)
    wide = x.to(tl.float32)
    tl.store(squares_MB + m * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 1), mask=real)
    weight = tl.load(weight_N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_MN + at, (wide * weight[None, :]).to(x.dtype), mask=inside)


@for_any_batch
def silu_mul(both_MX, up_rX, bias_X, squares_MB, out_MN, stride, M, N, hidden, eps, RANK: tl.constexpr, BLOCKS: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up, where gate and up stand side by side. One program for some tokens and BLOCK columns."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None] & (n < N)[None, :]
    m = tl.minimum(m, M - 1)
    scale = _scale(squares_MB, m, hidden, eps, BLOCKS)
    gate = _finished(both_MX, up_rX, bias_X, scale, m, n, inside, stride, 2 * N, 2 * N, RANK)
    up = _finished(both_MX, up_rX, bias_X, scale, m, N + n, inside, stride, 2 * N, 2 * N + RANK, RANK)
    wide = gate.to(tl.float32)
    tl.store(out_MN + m[:, None] * N + n[None, :], (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up, mask=inside)


@for_any_batch
def rotate_and_store(qkv_MX, up_rX, bias_X, squares_MB, q_MHD, own_keys, own_values, cos, sin, q_weight, k_weight, start_R, written_R,
                     slot_R, live_R, stride, M, room, hidden, eps, head_eps, T, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
                     RANK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rotary positions (arXiv:2104.09864) on queries and keys, normed before where there are weights; keys and values into the cache.

    One program for some tokens and a head: queries, keys, then values. Caches are (slots, K, room, D); `cos`, `sin` (positions, D / 2).
    """
    m, head = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.program_id(1)
    real = m < M
    m = tl.minimum(m, M - 1)
    r, t = m // T, m % T
    half = tl.arange(0, D // 2)
    width: tl.constexpr = (H + 2 * K) * D
    kind = tl.where(head < H, 0, tl.where(head < H + K, 1, 2))
    inside = real[:, None] & (half < D)[None, :]
    scale, n, down_at = _scale(squares_MB, m, hidden, eps, BLOCKS), head * D + half, width + kind * RANK
    first = _finished(qkv_MX, up_rX, bias_X, scale, m, n, inside, stride, width, down_at, RANK)
    second = _finished(qkv_MX, up_rX, bias_X, scale, m, n + D // 2, inside, stride, width, down_at, RANK)
    place = tl.load(written_R + r) - 1 + t
    if head < H + K:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if q_weight is not None:
            weight = q_weight if head < H else k_weight
            head_scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + head_eps)[:, None]
            a = (a * head_scale * tl.load(weight + half).to(tl.float32)[None, :]).to(first.dtype).to(tl.float32)
            b = (b * head_scale * tl.load(weight + D // 2 + half).to(tl.float32)[None, :]).to(first.dtype).to(tl.float32)
        position = tl.maximum(tl.load(start_R + r) + place, 0)[:, None] * (D // 2) + half[None, :]
        c, s = tl.load(cos + position).to(tl.float32), tl.load(sin + position).to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(first.dtype)
    if head < H:
        target = q_MHD + ((m * H + head) * D)[:, None] + half[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)
    else:
        kept = inside & ((tl.load(live_R + r) != 0) & (place >= 0) & (place < room))[:, None]
        cache = own_keys if head < H + K else own_values
        target = cache + (((tl.load(slot_R + r) * K + (head - H) % K) * room + place) * D)[:, None] + half[None, :]
        tl.store(target, first, mask=kept)
        tl.store(target + D // 2, second, mask=kept)


@triton.jit
def _attend_stretch(q_MD, keys, values, base, begin, end, last_M, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The softmax of each query over the keys from `begin` up to `end`, not beyond its `last`: tops, sums of exponentials, weighted values."""
    d, n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a query of a draft may see nothing of a stretch
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for s in range(begin, end, BLOCK_N):
        real = s + n < end
        at = base + (s + n)[:, None] * D + d[None, :]
        key = tl.load(keys + at, mask=real[:, None], other=0.0)
        value = tl.load(values + at, mask=real[:, None], other=0.0)
        scores = tl.dot(q_MD, tl.trans(key), input_precision="tf32x3") * scale
        scores = tl.where(real[None, :] & ((s + n)[None, :] <= last_M[:, None]), scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="tf32x3")
        top = higher
    return top, total, acc


@for_any_batch
def attend(q_MHD, keys, values, own_keys, own_values, tile_prompt, tile_first, tile_tokens, length_P, written_R, slot_R, live_R, sums, tops,
           partial, scale, longest, room, tiles, R, T, first, splits, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
           PROMPT: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Attention to stretches of PROMPT keys of the prompts, by the first programs, and of OWN keys of each row, by the others.

    BLOCK_P and BLOCK_R are the queries of a program, Q for each of its tokens, and perhaps some that are none. A token has `splits` stretches,
    its row's own from `first` on. Written are the scores' tops, the sums of their exponentials, and the weighted values, (M, H, splits) and
    (M, H, splits, D), for `join`.
    """
    program = tl.program_id(0)
    if program < tiles * K * first:
        _attend_prompt(program % tiles, program // tiles % K, program // tiles // K, q_MHD, keys, values, tile_prompt, tile_first,
                       tile_tokens, length_P, sums, tops, partial, scale, longest, splits, H, K, D, PROMPT, BLOCK_P, BLOCK_N)
    else:
        program -= tiles * K * first
        stretch, parts = program // R // K, tl.cdiv(T, BLOCK_R // (H // K))
        _attend_own(program % R, program // R % K, stretch // parts, stretch % parts, q_MHD, own_keys, own_values, written_R, slot_R, live_R,
                    sums, tops, partial, scale, room, T, first, splits, H, K, D, OWN, BLOCK_R, BLOCK_N)


@triton.jit
def _attend_prompt(tile, k, split, q_MHD, keys, values, tile_prompt, tile_first, tile_tokens, length_P, sums, tops, partial, scale, longest,
                   splits, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """One stretch of a prompt, for a key head and a tile of tokens that share it. Prompt caches are (P, K, longest, D)."""
    Q: tl.constexpr = H // K
    p, tokens = tl.load(tile_prompt + tile).to(tl.int64), tl.load(tile_tokens + tile)
    length = tl.load(length_P + p)
    begin = split * SPLIT
    if tokens > 0 and begin < length:
        i, d = tl.arange(0, BLOCK_M), tl.arange(0, D)
        inside = i < tokens * Q
        m = tl.load(tile_first + tile) + i // Q  # the tokens of a tile are neighbours
        head = m.to(tl.int64) * H + k * Q + i % Q
        q = tl.load(q_MHD + head[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        base = (p * K + k) * longest * D
        last = tl.zeros_like(i) + length  # every query sees all of the prompt
        top, total, acc = _attend_stretch(q, keys, values, base, begin, tl.minimum(begin + SPLIT, length), last, scale, D, BLOCK_M, BLOCK_N)
        at = head * splits + split
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=inside[:, None])


@triton.jit
def _attend_own(r, k, split, part, q_MHD, own_keys, own_values, written_R, slot_R, live_R, sums, tops, partial, scale, room, T,
                own, splits, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """One stretch of a row's own tokens, for a key head and a part of the tokens fed; into the places from `own` on."""
    Q: tl.constexpr = H // K
    filled = tl.load(written_R + r) - 1
    first = part * (BLOCK_M // Q)
    after = tl.minimum(first + BLOCK_M // Q, T)
    begin = split * SPLIT
    end = tl.minimum(tl.minimum(filled + after, room), begin + SPLIT)
    if (tl.load(live_R + r) != 0) & (begin < end):
        i, d = tl.arange(0, BLOCK_M), tl.arange(0, D)
        inside = i < (after - first) * Q
        t = first + i // Q
        head = (r * T + t).to(tl.int64) * H + k * Q + i % Q
        q = tl.load(q_MHD + head[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        base = (tl.load(slot_R + r) * K + k) * room * D
        last = filled + t  # the last token that a query may see: itself
        top, total, acc = _attend_stretch(q, own_keys, own_values, base, begin, end, last, scale, D, BLOCK_M, BLOCK_N)
        at = head * splits + own + split
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=inside[:, None])


@for_any_batch
def join(out_MHD, length_R, written_R, live_R, sums, tops, partial, T, first, splits, H: tl.constexpr, D: tl.constexpr,
         PROMPT: tl.constexpr, OWN: tl.constexpr):
    """One softmax of a query's stretches (Hydragen, arXiv:2402.05099). One program for each token and head."""
    m, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = m // T
    if tl.load(live_R + r) != 0:
        d = tl.arange(0, D)
        at = (m * H + h) * splits
        prompt = (tl.load(length_R + r) + PROMPT - 1) // PROMPT
        own = (tl.load(written_R + r) + m % T + OWN - 1) // OWN
        top, total = -1e30, 0.0
        acc = tl.zeros([D], tl.float32)
        for i in range(prompt + tl.minimum(own, splits - first)):
            place = at + tl.where(i < prompt, i, first + i - prompt)
            other = tl.load(tops + place)
            higher = tl.maximum(top, other)
            shrink, grow = tl.exp(top - higher), tl.exp(other - higher)
            total = total * shrink + tl.load(sums + place) * grow
            acc = acc * shrink + tl.load(partial + place * D + d) * grow
            top = higher
        tl.store(out_MHD + (m * H + h) * D + d, (acc / total).to(out_MHD.dtype.element_ty))


@triton.jit
def _uniform(key, position):
    """`sampling.uniform`: SplitMix64, by signed integers that wrap."""
    x = key + (position.to(tl.int64) + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@for_any_batch
def sum_blocks(logits_MV, heat_R, tops, sums, best, V, blocks, T, BLOCK: tl.constexpr):
    """Top, sum of exponentials, and place of the top, of each BLOCK of a token's logits over its temperature."""
    m, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(heat_R + m // T)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_MV + m * V + v, mask=v < V, other=-float("inf")).to(tl.float32) / tl.where(heat == 0, 1.0, heat)
    top = tl.max(x)
    tl.store(tops + m * blocks + block, top)
    tl.store(sums + m * blocks + block, tl.where(top == -float("inf"), 0.0, tl.sum(tl.exp(x - top))))
    tl.store(best + m * blocks + block, block * BLOCK + tl.argmax(x, 0))


@for_any_batch
def pick(logits_MV, heat_R, key_R, written_R, tops, sums, best, chosen_M, logprob_M, V, blocks, T, BLOCK: tl.constexpr,
         BLOCKS: tl.constexpr):
    """The token at which the cumulative distribution passes the place's uniform number: first its block, then the place in it."""
    m = tl.program_id(0).to(tl.int64)
    r = m // T
    heat = tl.load(heat_R + r)
    b = tl.arange(0, BLOCKS)
    top_b = tl.load(tops + m * blocks + b, mask=b < blocks, other=-float("inf"))
    top = tl.max(top_b)
    mass_b = tl.load(sums + m * blocks + b, mask=b < blocks, other=0.0) * tl.exp(top_b - top)
    total = tl.sum(mass_b)
    logsum = top + tl.log(total)
    if heat == 0:
        token = tl.load(best + m * blocks + tl.argmax(top_b, 0))
        logprob = top - logsum
    else:
        u = _uniform(tl.load(key_R + r), tl.load(written_R + r) + m % T)
        passed = (u * total.to(tl.float64)).to(tl.float32)
        cumulated = tl.cumsum(mass_b, 0)
        block = tl.sum((cumulated <= passed).to(tl.int32))
        block = tl.minimum(block, tl.max(tl.where(mass_b > 0, b, 0)))
        before = tl.sum(tl.where(b < block, mass_b, 0.0))
        i = tl.arange(0, BLOCK)
        v = block * BLOCK + i
        x = tl.load(logits_MV + m * V + v, mask=v < V, other=-float("inf")).to(tl.float32) / heat
        mass = tl.exp(x - top)
        place = tl.sum((tl.cumsum(mass, 0) <= passed - before).to(tl.int32))
        place = tl.minimum(place, tl.max(tl.where(mass > 0, i, 0)))
        token = block * BLOCK + place
        logprob = tl.max(tl.where(i == place, x, -float("inf"))) - logsum
    tl.store(chosen_M + m, token)
    tl.store(logprob_M + m, logprob)


@for_any_batch
def advance(chosen_M, logprob_M, feed, out_tokens, out_logprobs, stops, slot_R, budget_R, written_R, live_R, room, T, WIDTH: tl.constexpr,
            STOPS: tl.constexpr):
    """Write down the chosen tokens that count (`eager.accepted`), and see whether the row is finished. One program a row."""
    r, t = tl.program_id(0), tl.arange(0, WIDTH)
    is_live, written, budget = tl.load(live_R + r) != 0, tl.load(written_R + r), tl.load(budget_R + r)
    token = tl.load(chosen_M + r * T + t, mask=t < T, other=0).to(tl.int64)
    planned = tl.load(feed + r * WIDTH + t + 1, mask=t + 1 < T, other=-1)  # behind the last is none
    is_end = written + t + 1 >= budget
    for s in tl.static_range(STOPS):
        is_end = is_end | (token == tl.load(stops + s))
    last = tl.min(tl.where((is_end == 0) & (token == planned), WIDTH, t))
    counts = (t <= last) & is_live
    place = tl.load(slot_R + r).to(tl.int64) * room + written + t
    tl.store(out_tokens + place, token, mask=counts)
    tl.store(out_logprobs + place, tl.load(logprob_M + r * T + t, mask=t < T, other=0.0), mask=counts)
    goes_on = tl.sum((counts & (t == last) & (is_end == 0)).to(tl.int32)) > 0
    tl.store(feed + r * WIDTH, tl.where(goes_on, tl.sum(tl.where(t == last, token, 0)), 0))
    tl.store(written_R + r, written + tl.sum(counts.to(tl.int32)))
    tl.store(live_R + r, goes_on.to(tl.int64))

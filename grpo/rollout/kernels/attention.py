"""Attention of each token to its prompt and to its row's own tokens, in stretches."""

import triton
import triton.language as tl

from grpo.rollout.kernels.launch import for_any_batch, wait


@triton.jit
def _attend_stretch(
    q_MD,
    keys,
    values,
    base,
    begin,
    end,
    last_M,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The softmax of each query over the keys from `begin` up to `end`, not beyond its `last`:
    tops, sums of exponentials, weighted values.
    """
    d, n = tl.arange(0, D), tl.arange(0, BLOCK_N)
    top = tl.full(
        [BLOCK_M], -1e30, tl.float32
    )  # finite: a query of a draft may see nothing of a stretch
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for s in range(begin, end, BLOCK_N):
        real = s + n < end
        at = base + (s + n)[:, None] * D + d[None, :]
        key = tl.load(keys + at, mask=real[:, None], other=0.0)
        value = tl.load(values + at, mask=real[:, None], other=0.0)
        scores = tl.dot(q_MD, tl.trans(key), input_precision="tf32x3") * scale
        scores = tl.where(
            real[None, :] & ((s + n)[None, :] <= last_M[:, None]), scores, -float("inf")
        )
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="tf32x3"
        )
        top = higher
    return top, total, acc


@for_any_batch
def attend(
    q_MHD,
    keys,
    values,
    own_keys,
    own_values,
    tile_prompt,
    tile_first,
    tile_tokens,
    length_P,
    written_R,
    slot_R,
    live_R,
    sums,
    tops,
    partial,
    scale,
    longest,
    room,
    tiles,
    R,
    T,
    first,
    splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PROMPT: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention to stretches of PROMPT keys of the prompts, by the first programs, and of OWN keys
    of each row, by the others.

    BLOCK_P and BLOCK_R are the queries of a program, Q for each of its tokens, and perhaps some
    that are none. A token has `splits` stretches, its row's own from `first` on. Written are the
    scores' tops, the sums of their exponentials, and the weighted values, (M, H, splits) and (M,
    H, splits, D), for `join`.
    """
    program = tl.program_id(0)
    if program < tiles * K * first:
        _attend_prompt(
            program % tiles,
            program // tiles % K,
            program // tiles // K,
            q_MHD,
            keys,
            values,
            tile_prompt,
            tile_first,
            tile_tokens,
            length_P,
            sums,
            tops,
            partial,
            scale,
            longest,
            splits,
            H,
            K,
            D,
            PROMPT,
            BLOCK_P,
            BLOCK_N,
        )
    else:
        program -= tiles * K * first
        stretch, parts = program // R // K, tl.cdiv(T, BLOCK_R // (H // K))
        _attend_own(
            program % R,
            program // R % K,
            stretch // parts,
            stretch % parts,
            q_MHD,
            own_keys,
            own_values,
            written_R,
            slot_R,
            live_R,
            sums,
            tops,
            partial,
            scale,
            room,
            T,
            first,
            splits,
            H,
            K,
            D,
            OWN,
            BLOCK_R,
            BLOCK_N,
        )


@triton.jit
def _attend_prompt(
    tile,
    k,
    split,
    q_MHD,
    keys,
    values,
    tile_prompt,
    tile_first,
    tile_tokens,
    length_P,
    sums,
    tops,
    partial,
    scale,
    longest,
    splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One stretch of a prompt, for a key head and a tile of tokens that share it. Prompt caches
    are (P, K, longest, D).
    """
    Q: tl.constexpr = H // K
    p, tokens = tl.load(tile_prompt + tile).to(tl.int64), tl.load(tile_tokens + tile)
    length = tl.load(length_P + p)
    begin = split * SPLIT
    wait()
    if tokens > 0 and begin < length:
        i, d = tl.arange(0, BLOCK_M), tl.arange(0, D)
        inside = i < tokens * Q
        m = tl.load(tile_first + tile) + i // Q  # the tokens of a tile are neighbours
        head = m.to(tl.int64) * H + k * Q + i % Q
        q = tl.load(q_MHD + head[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        base = (p * K + k) * longest * D
        last = tl.zeros_like(i) + length  # every query sees all of the prompt
        top, total, acc = _attend_stretch(
            q,
            keys,
            values,
            base,
            begin,
            tl.minimum(begin + SPLIT, length),
            last,
            scale,
            D,
            BLOCK_M,
            BLOCK_N,
        )
        at = head * splits + split
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=inside[:, None])


@triton.jit
def _attend_own(
    r,
    k,
    split,
    part,
    q_MHD,
    own_keys,
    own_values,
    written_R,
    slot_R,
    live_R,
    sums,
    tops,
    partial,
    scale,
    room,
    T,
    own,
    splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One stretch of a row's own tokens, for a key head and a part of the tokens fed; into the
    places from `own` on.
    """
    Q: tl.constexpr = H // K
    filled = tl.load(written_R + r) - 1
    first = part * (BLOCK_M // Q)
    after = tl.minimum(first + BLOCK_M // Q, T)
    begin = split * SPLIT
    end = tl.minimum(tl.minimum(filled + after, room), begin + SPLIT)
    is_live, slot = tl.load(live_R + r) != 0, tl.load(slot_R + r)
    wait()
    if is_live & (begin < end):
        i, d = tl.arange(0, BLOCK_M), tl.arange(0, D)
        inside = i < (after - first) * Q
        t = first + i // Q
        head = (r * T + t).to(tl.int64) * H + k * Q + i % Q
        q = tl.load(q_MHD + head[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        base = (slot * K + k) * room * D
        last = filled + t  # the last token that a query may see: itself
        top, total, acc = _attend_stretch(
            q, own_keys, own_values, base, begin, end, last, scale, D, BLOCK_M, BLOCK_N
        )
        at = head * splits + own + split
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=inside[:, None])


@for_any_batch
def join(
    out_MHD,
    length_R,
    written_R,
    live_R,
    sums,
    tops,
    partial,
    M,
    T,
    first,
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    PROMPT: tl.constexpr,
    OWN: tl.constexpr,
    PAIRS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One softmax of a query's stretches (Hydragen, arXiv:2402.05099). One program for PAIRS of
    token and head, TOGETHER stretches at once.
    """
    pair, i, d = (
        tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS),
        tl.arange(0, TOGETHER),
        tl.arange(0, D),
    )
    m = tl.minimum(pair // H, M - 1)
    r = m // T
    is_live = (pair < M * H) & (tl.load(live_R + r) != 0)
    prompt = (tl.load(length_R + r) + PROMPT - 1) // PROMPT
    number = prompt + tl.minimum((tl.load(written_R + r) + m % T + OWN - 1) // OWN, splits - first)
    number = tl.where(is_live, number, 0)
    wait()
    top, total, acc = (
        tl.full([PAIRS], -1e30, tl.float32),
        tl.zeros([PAIRS], tl.float32),
        tl.zeros([PAIRS, D], tl.float32),
    )
    for begin in range(0, tl.max(number), TOGETHER):
        s = begin + i[None, :]
        place = pair[:, None] * splits + tl.where(
            s < prompt[:, None], s, first + s - prompt[:, None]
        )
        real = s < number[:, None]
        here = tl.load(tops + place, mask=real, other=-float("inf"))
        higher = tl.maximum(top, tl.max(here, 1))
        shrink, grow = tl.exp(top - higher), tl.exp(here - higher[:, None])
        total = total * shrink + tl.sum(tl.load(sums + place, mask=real, other=0.0) * grow, 1)
        values = tl.load(
            partial + place[:, :, None] * D + d[None, None, :], mask=real[:, :, None], other=0.0
        )
        acc = acc * shrink[:, None] + tl.sum(values * grow[:, :, None], 1)
        top = higher
    tl.store(
        out_MHD + pair[:, None] * D + d[None, :],
        (acc / total[:, None]).to(out_MHD.dtype.element_ty),
        mask=is_live[:, None],
    )

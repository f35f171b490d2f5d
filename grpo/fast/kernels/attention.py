"""Attention of each token to its prompt and to its row's own tokens.

The keys are divided into splits, which are read in parallel and combined afterwards (FlashDecoding;
arXiv:2402.05099 for prompts that several rows share). The partial result of a split is the maximum
of the scores and the sum of their exponentials, (M, H, splits) each, and the weighted sum of the
values (M, H, splits, D).
"""

import triton
import triton.language as tl

from grpo.fast.kernels.launch import for_any_batch, wait


@triton.jit
def _attend_keys(
    q_ND, keys, values, base, begin, end, last_N, scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the partial result of N = BLOCK_Q queries over the keys from `begin` up to `end`.

    A query sees no key beyond its `last`. A query of a draft may see no key at all, so the maximum
    begins at a finite number.
    """
    d = tl.arange(0, D)
    j = tl.arange(0, BLOCK_KEYS)
    maximum = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    output = tl.zeros([BLOCK_Q, D], tl.float32)

    for block in range(begin, end, BLOCK_KEYS):
        # A block of keys and values.
        is_real = block + j < end
        at = base + (block + j)[:, None] * D + d[None, :]
        key = tl.load(keys + at, mask=is_real[:, None], other=0.0)
        value = tl.load(values + at, mask=is_real[:, None], other=0.0)

        # The scores of the keys that each query sees.
        scores = tl.dot(q_ND, tl.trans(key), input_precision="tf32x3") * scale
        is_seen = is_real[None, :] & ((block + j)[None, :] <= last_N[:, None])
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
    return maximum, total, output


@triton.jit
def _attend_split(
    query_MHD, keys, values, maxima, sums, outputs,
    first_token, tokens, k, base, begin, end, seen, split, splits, scale,
    IS_CAUSAL: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of `tokens` neighbouring tokens to one split of keys; store the
    partial results as number `split`.

    The queries are those of the Q heads that share the key head `k`. The keys begin at `base` in
    the cache. The first token sees the keys up to number `seen`; if IS_CAUSAL, each token sees one
    more than the one before.
    """
    # Query i is that of head k * Q + i % Q of token i // Q.
    Q: tl.constexpr = H // K
    i = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    mask = i < tokens * Q
    head = (first_token + i // Q).to(tl.int64) * H + k * Q + i % Q
    q = tl.load(query_MHD + head[:, None] * D + d[None, :], mask=mask[:, None], other=0.0)
    last = seen + (i // Q if IS_CAUSAL else tl.zeros_like(i))

    maximum, total, output = _attend_keys(
        q, keys, values, base, begin, end, last, scale, D, BLOCK_Q, BLOCK_KEYS
    )

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

        wait()
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

    wait()
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

    wait()
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

"""Drawing a token from each distribution, and writing down those that count."""

import triton
import triton.language as tl

from grpo.rollout.kernels.launch import for_any_batch, wait


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
    """Top, sum of exponentials, and place of the top, of each BLOCK of a token's logits over its
    temperature.
    """
    wait()
    m, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(heat_R + m // T)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_MV + m * V + v, mask=v < V, other=-float("inf")).to(tl.float32) / tl.where(
        heat == 0, 1.0, heat
    )
    top = tl.max(x)
    tl.store(tops + m * blocks + block, top)
    tl.store(
        sums + m * blocks + block, tl.where(top == -float("inf"), 0.0, tl.sum(tl.exp(x - top)))
    )
    tl.store(best + m * blocks + block, block * BLOCK + tl.argmax(x, 0))


@for_any_batch
def pick(
    logits_MV,
    heat_R,
    key_R,
    written_R,
    tops,
    sums,
    best,
    chosen_M,
    logprob_M,
    V,
    blocks,
    T,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token at which the cumulative distribution passes the place's uniform number: first its
    block, then the place in it.
    """
    wait()
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
def advance(
    chosen_M,
    logprob_M,
    feed,
    out_tokens,
    out_logprobs,
    stops,
    slot_R,
    budget_R,
    written_R,
    live_R,
    room,
    T,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Write down the chosen tokens that count (`eager_decoder.accepted`), and see whether the row
    is finished. One program a row.
    """
    wait()
    r, t = tl.program_id(0), tl.arange(0, WIDTH)
    is_live, written, budget = (
        tl.load(live_R + r) != 0,
        tl.load(written_R + r),
        tl.load(budget_R + r),
    )
    token = tl.load(chosen_M + r * T + t, mask=t < T, other=0).to(tl.int64)
    planned = tl.load(feed + r * WIDTH + t + 1, mask=t + 1 < T, other=-1)  # behind the last is none
    is_end = written + t + 1 >= budget
    for s in tl.static_range(STOPS):
        is_end = is_end | (token == tl.load(stops + s))
    last = tl.min(tl.where((is_end == 0) & (token == planned), WIDTH, t))
    counts = (t <= last) & is_live
    place = tl.load(slot_R + r).to(tl.int64) * room + written + t
    tl.store(out_tokens + place, token, mask=counts)
    tl.store(
        out_logprobs + place, tl.load(logprob_M + r * T + t, mask=t < T, other=0.0), mask=counts
    )
    goes_on = tl.sum((counts & (t == last) & (is_end == 0)).to(tl.int32)) > 0
    tl.store(feed + r * WIDTH, tl.where(goes_on, tl.sum(tl.where(t == last, token, 0)), 0))
    tl.store(written_R + r, written + tl.sum(counts.to(tl.int32)))
    tl.store(live_R + r, goes_on.to(tl.int64))

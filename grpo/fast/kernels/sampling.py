"""Sample a token from each distribution, and accept the tokens that count."""

import triton
import triton.language as tl

from grpo.fast.kernels.launch import for_any_batch, wait


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
    logits_MV, temperature_R, maxima, sums, argmaxima, V, blocks, T, BLOCK: tl.constexpr
):
    """Reduce each BLOCK of a token's logits, divided by its temperature, to the maximum, the sum of
    exponentials relative to it, and the place of the maximum: (M, blocks) each.
    """
    wait()
    m = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)

    temperature = tl.load(temperature_R + m // T)
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
    logits_MV, temperature_R, key_R, written_R,
    maxima, sums, argmaxima, chosen_M, logprob_M,
    V, blocks, T,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sample by the inverse CDF: take the token at which the cumulative probability passes the
    place's uniform number.

    The block is found first, and then the token in it. Temperature 0 takes the likeliest token.
    """
    wait()
    m = tl.program_id(0).to(tl.int64)
    r = m // T
    temperature = tl.load(temperature_R + r)

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
    """Write the tokens that count (see `eager_decoder.accepted`); end the row if it is finished.

    A token counts if all drafted tokens before it were chosen. The last one that counts is fed
    next. One program handles one row.
    """
    wait()
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

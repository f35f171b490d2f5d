"""Matrix products for few tokens, and how a product is finished by the kernel that reads it."""

import triton
import triton.language as tl

from grpo.fast.kernels.launch import for_any_batch, gdc_launch_dependents, gdc_wait


@for_any_batch
def multiply(
    x_MI, weight_OI, y_SMO,
    M, O, I,  # noqa: E741
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y = x weight' for few tokens, as PARTS sums over a part of I each, to be added up.

    One program computes BLOCK_O columns of one part. It takes about as long as reading the weights
    does. The vendor's library loses time in the gaps before and after a product; here the next
    kernel starts when few steps are left.
    """
    part = tl.program_id(1)
    steps = I // BLOCK_I
    begin = part * steps // PARTS
    end = (part + 1) * steps // PARTS

    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_I)
    weights = weight_OI + (tl.minimum(o, O - 1).to(tl.int64) * I)[:, None] + i[None, :]
    inputs = x_MI + (tl.minimum(m, M - 1) * I)[None, :] + i[:, None]

    gdc_wait()
    y = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        if step == end - 8:
            gdc_launch_dependents()
        y = tl.dot(tl.load(weights + step * BLOCK_I), tl.load(inputs + step * BLOCK_I), y)

    target = y_SMO + (part * M + m)[None, :] * O + o[:, None]
    tl.store(target, y, mask=(m < M)[None, :] & (o < O)[:, None])


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
def _sum_parts(y_SMO, m, columns, mask, M, stride, PARTS: tl.constexpr):
    """Return `columns` of a product for the tokens `m`, summed over its parts."""
    y = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        at = y_SMO + (part * M + m)[:, None] * stride + columns[None, :]
        y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def finish_product(
    y_SMO, lora_b_rn, bias_O, scale_M,
    m, columns, mask,
    M, stride, width, lora_a_begin,
    RANK: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return `columns` of a product for the tokens `m`, complete: W x, plus s B A x, plus the bias.

    `scale_M` is the scale of the RMSNorm of the input, which the product has left out; None if
    there is none. A x is in the product's columns from `lora_a_begin` on.
    """
    y = _sum_parts(y_SMO, m, columns, mask, M, stride, PARTS)
    if RANK > 0:
        j = tl.arange(0, RANK)
        lora_mask = (m < M)[:, None] & (j < RANK)[None, :]
        hidden = _sum_parts(y_SMO, m, lora_a_begin + j, lora_mask, M, stride, PARTS)
        y += tl.dot(hidden.to(dtype), lora_b_rn, input_precision="ieee")

    if scale_M is not None:
        y *= scale_M[:, None]
    if bias_O is not None:
        y += tl.load(bias_O + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return y.to(dtype)

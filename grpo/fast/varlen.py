"""Attention between runs of queries and runs of keys of different lengths, without padding.

Three kernels do it: FlashAttention (arXiv:2205.14135) on a GPU in half precision, PyTorch's
memory-efficient attention on a GPU in other precisions, and its CPU kernel on a padded grid. Each
returns the log-sum-exp of the scores along with the output, and none keeps the scores. So parts of
one softmax can be computed one by one and merged (`merge_lse`).

Shapes: queries (N, H, D), keys and values (N, K, D), log-sum-exps (N, H). N is the number of
queries or of keys.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.model.policy import flat_indices, to_device

aten = torch.ops.aten

# The smallest value that FlashAttention gets as the length of the longest run of queries. With 1,
# and fewer key heads than query heads, it treats the heads of a group as queries of one sequence
# and relies on exactly one query in each run. Ours may have none, for a completion of one token.
# The number only bounds the kernel's grid, so a larger one changes no result.
MIN_QUERIES = 2

# Values of `custom_mask_type` in aten._efficient_attention_forward.
NO_MASK = 0
CAUSAL_FROM_TOP_LEFT = 1

# The memory-efficient kernel pads each row of log-sum-exps to a multiple of this many queries.
LSE_MULTIPLE = 32


class VarlenSegments:
    """Which queries attend to which keys.

    The i-th run of queries attends to the i-th run of keys: to all of it or, if `is_causal`, up to
    the query's own place. `queries` and `keys` are the lengths of the runs.
    """

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int], is_causal: bool, device: torch.device
    ):
        self.queries = queries
        self.keys = keys
        self.is_causal = is_causal
        self.device = device

        self.count = len(queries)
        self.is_empty = not sum(queries)
        self.max_queries = max(queries, default=0)
        self.max_keys = max(keys, default=0)
        self.has_ragged_keys = min(keys, default=0) < self.max_keys
        self.query_bounds = _bounds(queries, device)
        self.key_bounds = _bounds(keys, device)

    # Only the kernels that work on a padded grid need these.

    @cached_property
    def query_indices(self) -> Tensor:
        """The indices of the queries in a flattened grid of rows of `max_queries`."""
        return flat_indices(self.queries, self.max_queries, self.device)

    @cached_property
    def key_indices(self) -> Tensor:
        """The indices of the keys in a flattened grid of rows of `max_keys`."""
        if self.keys is self.queries:
            return self.query_indices
        return flat_indices(self.keys, self.max_keys, self.device)

    @cached_property
    def key_lengths(self) -> Tensor:
        """The number of keys of each run."""
        return to_device(torch.tensor(self.keys), self.device)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return where each run begins, and where the last one ends."""
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


class Attention(NamedTuple):
    """An attention that has been computed, as its backward pass needs it.

    `output` and `lse` may be those of a softmax over more keys than `key` holds. The gradients are
    then exactly the share of these keys: all that the backward pass of FlashAttention knows of
    the other keys is in the output and the log-sum-exp.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, D) within `segments`, and its log-sum-exps (N, H)."""
    if _has_flash_kernel(query):
        return _flash(query, key, value, segments, scale)
    if query.is_cuda:
        return _efficient(query, key, value, segments, scale)
    return _padded(query, key, value, segments, scale)


def attend_backward(
    gradient: Tensor, attention: Attention, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from that of the output."""
    if _has_flash_kernel(attention.query):
        return _flash_backward(gradient, attention, segments, scale)
    if attention.query.is_cuda:
        return _efficient_backward(gradient, attention, segments, scale)
    return _padded_backward(gradient, attention, segments, scale)


def merge_lse(
    one: Tensor, other: Tensor, one_lse: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, D) to both of two parts, and its log-sum-exps (N, H).

    The result is exact: see Hydragen (arXiv:2402.05099).
    """
    lse = torch.logaddexp(one_lse, other_lse)
    # The products are in the precision of the log-sum-exps, float32 at least.
    merged = one * (one_lse - lse).exp()[..., None] + other * (other_lse - lse).exp()[..., None]
    return merged.to(one.dtype), lse


# FlashAttention, on a GPU in half precision


def _has_flash_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor]:
    output, lse_HN, *_ = aten._flash_attention_forward(
        query,
        key,
        value,
        segments.query_bounds,
        segments.key_bounds,
        max(segments.max_queries, MIN_QUERIES),
        segments.max_keys,
        0.0,  # dropout
        segments.is_causal,
        False,  # no debug mask
        scale=scale,
    )
    return output, lse_HN.transpose(0, 1)


def _flash_backward(
    gradient: Tensor, attention: Attention, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse_NH = attention
    seed = _no_dropout(query.device)
    return aten._flash_attention_backward(
        gradient.contiguous(),
        query,
        key,
        value,
        output,
        lse_NH.transpose(0, 1).contiguous(),
        segments.query_bounds,
        segments.key_bounds,
        max(segments.max_queries, MIN_QUERIES),
        segments.max_keys,
        0.0,  # dropout
        segments.is_causal,
        seed,
        seed[:0],
        scale=scale,
    )


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """Return a state of dropout's random numbers, which are never drawn."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


# Memory-efficient attention, on a GPU in other precisions


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor]:
    H = query.shape[1]
    key, value = (_repeat_heads(x, H) for x in (key, value))
    output, lse, *_ = aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        None,  # no bias
        segments.query_bounds,
        segments.key_bounds,
        segments.max_queries,
        segments.max_keys,
        0.0,  # dropout
        CAUSAL_FROM_TOP_LEFT if segments.is_causal else NO_MASK,
        True,  # with log-sum-exps
        scale=scale,
    )

    # The log-sum-exps come as (runs, H, queries, padded).
    indices = _query_indices_in(segments, lse.shape[2])
    return output[0], lse.transpose(1, 2).reshape(-1, H)[indices]


def _efficient_backward(
    gradient: Tensor, attention: Attention, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse_NH = attention
    H, K = query.shape[1], key.shape[1]

    # Back to (runs, H, queries, padded), as the forward pass returned them.
    length = -(-segments.max_queries // LSE_MULTIPLE) * LSE_MULTIPLE
    rows = lse_NH.new_full((segments.count * length, H), torch.inf)
    rows[_query_indices_in(segments, length)] = lse_NH
    lse = rows.view(segments.count, length, H).transpose(1, 2).contiguous()

    # The state of dropout's random numbers, which are never drawn.
    seed = torch.zeros((), dtype=torch.long, device=query.device)
    d_query, d_key, d_value, _ = aten._efficient_attention_backward(
        gradient[None].contiguous(),
        query[None],
        _repeat_heads(key, H)[None],
        _repeat_heads(value, H)[None],
        None,  # no bias
        output[None],
        segments.query_bounds,
        segments.key_bounds,
        segments.max_queries,
        segments.max_keys,
        lse,
        0.0,  # dropout
        seed,
        seed,
        CAUSAL_FROM_TOP_LEFT if segments.is_causal else NO_MASK,
        False,  # no gradient of the bias
        scale=scale,
    )

    # A key head collects the gradients of all query heads that read it.
    d_key, d_value = (x[0].unflatten(1, (K, -1)).sum(2) for x in (d_key, d_value))
    return d_query[0], d_key, d_value


def _repeat_heads(x_NKD: Tensor, H: int) -> Tensor:
    """Return keys or values (N, H, D), one head for each query head."""
    return x_NKD.repeat_interleave(H // x_NKD.shape[1], 1)


def _query_indices_in(segments: VarlenSegments, length: int) -> Tensor:
    """Return the indices of the queries in a flattened grid of rows of `length` tokens."""
    row = segments.query_indices // segments.max_queries
    offset = segments.query_indices % segments.max_queries
    return row * length + offset


# PyTorch's CPU kernel, on a padded grid


def _padded(
    query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor]:
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        _query_grid(query, segments),
        _key_grid(key, segments),
        _key_grid(value, segments),
        0.0,  # dropout
        segments.is_causal,
        attn_mask=_padding_mask(segments, query),
        scale=scale,
    )
    return _pack(output, segments.query_indices), _pack(lse, segments.query_indices)


def _padded_backward(
    gradient: Tensor, attention: Attention, segments: VarlenSegments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse = attention
    d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _query_grid(gradient, segments),
        _query_grid(query, segments),
        _key_grid(key, segments),
        _key_grid(value, segments),
        _query_grid(output, segments),
        _query_grid(lse, segments),
        0.0,  # dropout
        segments.is_causal,
        attn_mask=_padding_mask(segments, query),
        scale=scale,
    )
    return (
        _pack(d_query, segments.query_indices),
        _pack(d_key, segments.key_indices),
        _pack(d_value, segments.key_indices),
    )


def _query_grid(x: Tensor, segments: VarlenSegments) -> Tensor:
    """Return queries, or what belongs to queries, as a padded grid."""
    return _grid(x, segments.query_indices, segments.count, segments.max_queries)


def _key_grid(x: Tensor, segments: VarlenSegments) -> Tensor:
    """Return keys or values as a padded grid."""
    return _grid(x, segments.key_indices, segments.count, segments.max_keys)


def _grid(x: Tensor, indices_N: Tensor, count: int, longest: int) -> Tensor:
    """Return (N, H, ...) as (count, H, longest, ...), with zeros at padding."""
    grid = x
    if len(indices_N) < count * longest:
        grid = x.new_zeros(count * longest, *x.shape[1:])
        grid[indices_N] = x
    return grid.unflatten(0, (count, longest)).transpose(1, 2)


def _pack(grid: Tensor, indices_N: Tensor) -> Tensor:
    """Return (count, H, longest, ...) as (N, H, ...), without padding."""
    rows = grid.transpose(1, 2).flatten(0, 1)
    return rows if len(indices_N) == len(rows) else rows[indices_N]


def _padding_mask(segments: VarlenSegments, like: Tensor) -> Tensor | None:
    """Return what is added to the scores, -inf at padded keys; None where nothing needs hiding.

    A causal mask hides padded keys already, because they come after all queries.
    """
    if segments.is_causal or not segments.has_ragged_keys:
        return None
    is_padding = (
        torch.arange(segments.max_keys, device=like.device) >= segments.key_lengths[:, None]
    )
    return like.new_zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)[:, None, None]

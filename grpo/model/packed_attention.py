"""The update's attention: a micro-batch as one row without padding, each prompt run once for all
its completions.

The prompts stand first, then the completions (each without its last token, which predicts
nothing). A prompt attends to itself; a completion to itself and to its prompt. The two parts of a
completion's attention are joined by their log-sum-exps, which is exact (Hydragen,
arXiv:2402.05099); and as the backward pass of FlashAttention (arXiv:2205.14135) needs the output
and the log-sum-exp of a whole row alone, to be given those of the join is all that makes each
part's gradients exact as well. No scores are kept.

Shapes: N tokens of the row, M completion tokens to be predicted, H query heads, K key heads (K
divides H), D head size.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

aten = torch.ops.aten
# The least that FlashAttention is told of the longest run of queries. Told 1, with fewer key heads
# than query heads, it takes the heads of a group for queries of one sequence, and counts on
# exactly one query in each run; ours may have none, as a completion of one token has. The number
# only bounds the kernel's grid, so a larger one changes no result.
LEAST_QUERIES = 2
TO_THE_TOP_LEFT = 1  # the name of causal masks in aten._efficient_attention_forward


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on the device. A GPU fetches it when it comes to it, from memory that cannot
    be paged; the host does not wait for that.
    """
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type == "cuda"
        else tensor.to(device)
    )


class Segments:
    """Which queries attend to which keys: the i-th run of queries to the i-th run of keys, all of
    them or (`causal`) up to its own.
    """

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device
    ):
        self.causal, self.count, self.empty = causal, len(queries), not sum(queries)
        self.most_queries, self.most_keys = max(queries, default=0), max(keys, default=0)
        self.query_bounds, self.key_bounds = _bounds(queries, device), _bounds(keys, device)
        self.queries, self.keys, self.device = queries, keys, device
        self.ragged_keys = min(keys, default=0) < self.most_keys

    # The places of each token in a padded grid, and how many keys stand in a row of it; not every
    # kernel wants them:

    @cached_property
    def query_places(self) -> Tensor:
        return places(self.queries, self.most_queries, self.device)

    @cached_property
    def key_places(self) -> Tensor:
        return (
            self.query_places
            if self.keys is self.queries
            else places(self.keys, self.most_keys, self.device)
        )

    @cached_property
    def key_lengths(self) -> Tensor:
        return sent(torch.tensor(self.keys), self.device)


def _bounds(lengths, device) -> Tensor:
    return sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def places(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """Return where the tokens of sequences of such lengths stand, one after the other, in a grid
    of rows of `longest`.
    """
    return sent(
        (torch.arange(longest) < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0], device
    )


class Packing:
    """The row: `tokens_N`, their `positions_N`, and `predictors_M`, the places that predict the
    completion tokens, in their order.

    `prompts` and `completions` are token ids, `rows` completions to each prompt, in order. Given
    to a `transformers` model as the keyword argument `shared`, it is asked for the attention of
    each layer (see `model.prefix_cache`).
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        rows = len(completions) // len(prompts)
        before, after = (
            [len(prompt) for prompt in prompts],
            [len(completion) - 1 for completion in completions],
        )
        ends = list(accumulate(before))
        self.first = place = ends[-1]  # of the completions' tokens
        self.longest, predictors = max(before), []
        tokens, positions = (
            [torch.tensor(prompt) for prompt in prompts],
            [torch.arange(length) for length in before],
        )
        for r, completion in enumerate(completions):
            predictors += [
                torch.tensor([ends[r // rows] - 1]),
                torch.arange(place, place + after[r]),
            ]
            positions.append(torch.arange(before[r // rows], before[r // rows] + after[r]))
            tokens.append(torch.tensor(completion[:-1], dtype=torch.long))
            place, self.longest = place + after[r], max(self.longest, before[r // rows] + after[r])
        self.tokens_N, self.positions_N, self.predictors_M = (
            sent(torch.cat(parts), device) for parts in (tokens, positions, predictors)
        )
        self.prompts = Segments(before, before, True, device)
        self.own = Segments(after, after, True, device)
        self.on_prompt = Segments(
            [sum(after[i : i + rows]) for i in range(0, len(after), rows)], before, False, device
        )

    def reach(self, new: int) -> int:
        """Return how many tokens the longest sequence has, `new` ones included."""
        return self.longest

    def attend(
        self, layer: int, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, scale: float
    ) -> Tensor:
        """Return the attention (1, N, H, D)."""
        query, key, value = (x[0].transpose(0, 1) for x in (query_1HND, key_1KND, value_1KND))
        return _SharedPrefixAttention.apply(query, key, value, self, scale)[None]


class PlainPacking:
    """The same for a model that cannot share prompts (see `model.fallback`): `tokens_RT`, padded,
    and `mask_RT`, where tokens stand.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        self.prompts = prompts
        tokens_RT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(completion) for completion in completions], batch_first=True
        )
        lengths = torch.tensor([len(completion) for completion in completions])
        self.tokens_RT, self.mask_RT = (
            sent(tokens_RT, device),
            sent(torch.arange(tokens_RT.shape[1]) < lengths[:, None], device),
        )


class _SharedPrefixAttention(torch.autograd.Function):
    """Queries (N, H, D), keys and values (N, K, D) to the output (N, H, D)."""

    @staticmethod
    def forward(ctx, query, key, value, packing, scale):
        n = packing.first
        output, logsumexp = _attend(query[:n], key[:n], value[:n], packing.prompts, scale)
        if not packing.own.empty:
            own, own_lse = _attend(query[n:], key[n:], value[n:], packing.own, scale)
            other, other_lse = _attend(query[n:], key[:n], value[:n], packing.on_prompt, scale)
            both, both_lse = _joined(own, other, own_lse, other_lse)
            output, logsumexp = torch.cat([output, both]), torch.cat([logsumexp, both_lse])
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.packing, ctx.scale = packing, scale
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, lse = ctx.saved_tensors
        packing, n = ctx.packing, ctx.packing.first
        before, after = slice(0, n), slice(n, None)

        def part(queries, keys, segments):
            return _attend_backward(
                gradient[queries],
                query[queries],
                key[keys],
                value[keys],
                output[queries],
                lse[queries],
                segments,
                ctx.scale,
            )

        on_query, on_key, on_value = part(before, before, packing.prompts)
        if not packing.own.empty:
            own_query, own_key, own_value = part(after, after, packing.own)
            other_query, other_key, other_value = part(after, before, packing.on_prompt)
            on_query = torch.cat([on_query, own_query + other_query])
            on_key, on_value = (
                torch.cat([on_key + other_key, own_key]),
                torch.cat([on_value + other_value, own_value]),
            )
        return on_query, on_key, on_value, None, None


def _joined(one, other, one_lse, other_lse) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, D) to both of two parts, and its log-sum-exps (N, H)."""
    if one.is_cuda:
        from grpo.model import kernels

        (N, H, D), lse, both = one.shape, one_lse.new_empty(one_lse.shape), torch.empty_like(one)
        kernels.join[(N,)](
            one,
            other,
            one_lse,
            other_lse,
            both,
            lse,
            *one_lse.stride(),
            *other_lse.stride(),
            H=H,
            D=D,
            BLOCK_H=1 << (H - 1).bit_length(),
            BLOCK_D=1 << (D - 1).bit_length(),
        )
        return both, lse
    lse = torch.logaddexp(one_lse, other_lse)
    both = (
        one * (one_lse - lse).exp()[..., None] + other * (other_lse - lse).exp()[..., None]
    )  # in the precision of the sums
    return both.to(one.dtype), lse


def _has_flash_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _attend(query, key, value, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, D) within `segments` and its log-sum-exps (N, H)."""
    if _has_flash_kernel(query):
        output, lse, *_ = aten._flash_attention_forward(
            query,
            key,
            value,
            segments.query_bounds,
            segments.key_bounds,
            max(segments.most_queries, LEAST_QUERIES),
            segments.most_keys,
            0.0,
            segments.causal,
            False,
            scale=scale,
        )
        return output, lse.transpose(0, 1)
    if query.is_cuda:
        key, value = (_for_each_query_head(x, query.shape[1]) for x in (key, value))
        output, lse, *_ = aten._efficient_attention_forward(
            query[None],
            key[None],
            value[None],
            None,
            segments.query_bounds,
            segments.key_bounds,
            segments.most_queries,
            segments.most_keys,
            0.0,
            TO_THE_TOP_LEFT if segments.causal else 0,
            True,
            scale=scale,
        )
        return output[0], lse.transpose(1, 2).reshape(-1, query.shape[1])[
            _in_rows(segments, lse.shape[2])
        ]
    grids = _grids(query, key, value, segments)
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *grids, 0.0, segments.causal, attn_mask=_padding(segments, query), scale=scale
    )
    return _packed(output, segments.query_places), _packed(lse, segments.query_places)


def _attend_backward(
    gradient, query, key, value, output, lse, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values within `segments`, given output and
    log-sum-exps of the whole rows.
    """
    if _has_flash_kernel(query):
        seed = torch.zeros(
            2, dtype=torch.uint64, device=query.device
        )  # of a dropout that there is not
        return aten._flash_attention_backward(
            gradient.contiguous(),
            query,
            key,
            value,
            output,
            lse.transpose(0, 1).contiguous(),
            segments.query_bounds,
            segments.key_bounds,
            max(segments.most_queries, LEAST_QUERIES),
            segments.most_keys,
            0.0,
            segments.causal,
            seed,
            seed[:0],
            scale=scale,
        )
    if query.is_cuda:
        heads, length = query.shape[1], -(-segments.most_queries // 32) * 32
        rows = lse.new_full((segments.count * length, heads), torch.inf)
        rows[_in_rows(segments, length)] = lse
        lse = rows.view(segments.count, length, heads).transpose(1, 2).contiguous()
        wide = (_for_each_query_head(x, heads) for x in (key, value))
        seed = torch.zeros((), dtype=torch.long, device=query.device)
        on_query, on_key, on_value, _ = aten._efficient_attention_backward(
            gradient[None].contiguous(),
            query[None],
            *(x[None] for x in wide),
            None,
            output[None],
            segments.query_bounds,
            segments.key_bounds,
            segments.most_queries,
            segments.most_keys,
            lse,
            0.0,
            seed,
            seed,
            TO_THE_TOP_LEFT if segments.causal else 0,
            False,
            scale=scale,
        )
        return on_query[0], *(
            x[0].unflatten(1, (key.shape[1], -1)).sum(2) for x in (on_key, on_value)
        )
    grids = _grids(query, key, value, segments)
    gradient, output, lse = (
        _grid(x, segments.query_places, segments.count, segments.most_queries)
        for x in (gradient, output, lse)
    )
    on_query, on_key, on_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient,
        *grids,
        output,
        lse,
        0.0,
        segments.causal,
        attn_mask=_padding(segments, query),
        scale=scale,
    )
    return (
        _packed(on_query, segments.query_places),
        _packed(on_key, segments.key_places),
        _packed(on_value, segments.key_places),
    )


def _grids(query, key, value, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _grid(query, segments.query_places, segments.count, segments.most_queries),
        _grid(key, segments.key_places, segments.count, segments.most_keys),
        _grid(value, segments.key_places, segments.count, segments.most_keys),
    )


def _grid(packed_NX: Tensor, places_N: Tensor, count: int, longest: int) -> Tensor:
    """Return (N, H, ...) as (count, H, longest, ...), zeros at padding."""
    grid = packed_NX
    if len(places_N) < count * longest:
        grid = packed_NX.new_zeros(count * longest, *packed_NX.shape[1:])
        grid[places_N] = packed_NX
    return grid.unflatten(0, (count, longest)).transpose(1, 2)


def _packed(grid: Tensor, places_N: Tensor) -> Tensor:
    rows = grid.transpose(1, 2).flatten(0, 1)
    return rows if len(places_N) == len(rows) else rows[places_N]


def _padding(segments: Segments, like: Tensor) -> Tensor | None:
    """What is added to the scores: nothing where all keys are as many, or a causal mask hides
    those behind already.
    """
    if segments.causal or not segments.ragged_keys:
        return None
    hidden = torch.arange(segments.most_keys, device=like.device) >= segments.key_lengths[:, None]
    return like.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]


def _for_each_query_head(x_NKD: Tensor, heads: int) -> Tensor:
    return x_NKD.repeat_interleave(heads // x_NKD.shape[1], 1)


def _in_rows(segments: Segments, length: int) -> Tensor:
    """Return the places of the queries in a grid of rows of `length`."""
    row, offset = (
        segments.query_places // segments.most_queries,
        segments.query_places % segments.most_queries,
    )
    return row * length + offset

"""The update's attention: a micro-batch as one row without padding, each prompt only once.

The prompts stand first, then the completions, each without its last token, which predicts nothing.
A prompt attends to itself, a completion to itself and to its prompt. The parts of a completion's
attention are merged by their log-sum-exps, which is exact (Hydragen, arXiv:2402.05099). The
backward pass of FlashAttention (arXiv:2205.14135) needs only the output and the log-sum-exp of the
whole softmax; given those of the merged one, the gradients of each part are exact as well.

On a CPU, completions of a prompt that begin alike share their beginning too. The completions form a
tree of tokens, in which each token stands once: a completion adds the tokens by which it differs
from all before it, its branch, and the branch also attends to its stem, the tokens before it. A
token that stands for several completions collects the gradients of all of them.

Three kernels compute the attention between runs of different lengths: FlashAttention on a GPU in
half precision, PyTorch's memory-efficient attention on a GPU in other precisions, and its CPU
kernel on a padded grid. None keeps the scores.

Shapes: queries (N, H, D), keys and values (N, K, D), log-sum-exps (N, H). N is the number of
queries or of keys.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo.model.policy import flat_indices, to_device

aten = torch.ops.aten

# The least length of the longest run of queries for FlashAttention. With 1, and fewer key heads
# than query heads, it relies on exactly one query in each run. Ours may have none, for a completion
# of one token. The number only bounds the kernel's grid, so a larger one changes no result.
MIN_QUERIES = 2

# Values of `custom_mask_type` in aten._efficient_attention_forward.
NO_MASK = 0
CAUSAL_FROM_TOP_LEFT = 1

# The memory-efficient kernel pads each row of log-sum-exps to a multiple of this many queries.
LSE_MULTIPLE = 32


class _Branch(NamedTuple):
    """The tokens that a completion adds to the row, e.g. ``_Branch(2, [7, 8], range(12, 15))`` for
    completion 2, which reads the tokens 7, 8, 12, 13 and 14 of the row.
    """

    completion: int
    stem: list[int]
    own: range


class Packing:
    """A micro-batch packed into one row, whose completions share their prompts.

    `tokens_N` is the row and `positions_N` the position of each token in its own sequence.
    `predictors_U` are the indices in the row that predict the completions' tokens. Without
    `shares_beginnings`, these are all tokens of the completions, in their order. Otherwise tokens
    that two completions have in common after the same beginning count once; `distinct` and
    `of_tokens` translate between the two. `stems` says which branches attend to which stems;
    `stem_queries` and `stem_keys` are indices into the tokens of all branches. Into a dictionary
    `keys`, `attend` puts the keys and values (K, N, D) of each layer.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
        *,
        shares_beginnings: bool = False,
    ):
        rows = len(completions) // len(prompts)
        prompt_lengths = [len(prompt) for prompt in prompts]
        first = self.prompt_tokens = sum(prompt_lengths)  # the completions' tokens come after these
        branches = list(_branches(completions, rows, first, shares_beginnings))

        tokens_N, positions_N, predictors = _lay_out(prompts, completions, branches)
        self._sequences = prompts, completions, branches
        self.keys: dict[int, tuple[Tensor, Tensor]] | None = None  # by layer, where they are kept
        self.tokens_N = to_device(tokens_N, device)
        self.positions_N = to_device(positions_N, device)

        # The length of the longest sequence: prompt and completion, less its last token.
        self.longest_sequence = int(positions_N.max()) + 1

        predictors_M = to_device(predictors, device)
        self._first_U: Tensor | None = None
        self._set_M: Tensor | None = None
        if shares_beginnings:
            targets = [token for completion in completions for token in completion]
            targets_M = to_device(torch.tensor(targets), device)
            first_U, set_M = _distinct_pairs(predictors_M, targets_M)
            if len(first_U) < len(set_M):
                self._first_U, self._set_M = first_U, set_M
        self.predictors_U = self.distinct(predictors_M)

        lengths = [len(branch.own) for branch in branches if branch.own or not shares_beginnings]
        by_prompt = [0] * len(prompts)
        for branch in branches:
            by_prompt[branch.completion // rows] += len(branch.own)
        self.prompt_segments = Segments(prompt_lengths, prompt_lengths, True, device)
        self.branch_segments = Segments(lengths, lengths, True, device)
        self.on_prompts = Segments(by_prompt, prompt_lengths, False, device)

        self.stems: Segments | None = None
        on_stems = [branch for branch in branches if branch.stem and branch.own]
        if on_stems:
            queries, keys = [each.own for each in on_stems], [each.stem for each in on_stems]
            self.stem_queries, self.stem_keys = (
                to_device(torch.tensor([i - first for run in runs for i in run]), device)
                for runs in (queries, keys)
            )
            self.stems = Segments([*map(len, queries)], [*map(len, keys)], False, device)

    def distinct(self, values_M: Tensor) -> Tensor:
        """Return the values of tokens of the completions (M, ...) for `predictors_U` (U, ...)."""
        return values_M if self._first_U is None else values_M.index_select(0, self._first_U)

    def of_tokens(self, values_U: Tensor) -> Tensor:
        """Return values for `predictors_U` (U, ...) for all tokens of the completions (M, ...)."""
        return values_U if self._set_M is None else values_U.index_select(0, self._set_M)

    def sequences(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yield the tokens of each sequence that is read, and their indices in the row."""
        prompts, completions, branches = self._sequences
        rows, ends = len(completions) // len(prompts), [*accumulate(map(len, prompts))]
        for completion, stem, own in branches:
            prompt, end = prompts[completion // rows], ends[completion // rows]
            tokens = (*prompt, *completions[completion][:-1])
            yield tokens, [*range(end - len(prompt), end), *stem, *own]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention (1, N, H, D) of the row, from (1, H, N, D) and (1, K, N, D)."""
        if self.keys is not None:
            self.keys[layer] = key[0].contiguous(), value[0].contiguous()  # they may be views
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return _SharedPrefixAttention.apply(query, key, value, self, scale)[None]


def _lay_out(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    branches: Sequence[_Branch],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a packing and their positions (N,), and the index of the token that
    predicts each token of the completions (M,), on the CPU.
    """
    rows = len(completions) // len(prompts)
    prompt_ends = list(accumulate(map(len, prompts)))

    tokens = [torch.tensor(prompt) for prompt in prompts]
    positions = [torch.arange(len(prompt)) for prompt in prompts]
    predictors = [torch.empty(0)] * len(completions)
    for completion, stem, own in branches:
        prompt = completion // rows
        read = slice(len(stem), len(stem) + len(own))
        tokens.append(torch.tensor(completions[completion][read], dtype=torch.long))
        positions.append(torch.arange(read.start, read.stop) + len(prompts[prompt]))

        # The prompt's last token predicts the first one, and each token the next.
        predictors[completion] = torch.tensor([prompt_ends[prompt] - 1, *stem, *own])
    return torch.cat(tokens), torch.cat(positions), torch.cat(predictors)


def _branches(
    completions: Sequence[Sequence[int]], rows: int, start: int, shares_beginnings: bool
) -> Iterator[_Branch]:
    """Yield the branches of all completions, of which each prompt has so many `rows`.

    A completion reads all of its tokens but the last. The first branch begins at `start`.
    """
    for first in range(0, len(completions), rows):
        own = list(range(first, first + rows))
        if shares_beginnings:  # in lexical order, the one just before has the most in common
            own.sort(key=lambda r: tuple(completions[r][:-1]))

        before: tuple[Sequence[int], list[int]] = [], []  # tokens, and their indices in the row
        for r in own:
            read = completions[r][:-1]
            stem = before[1][: common_length(before[0], read)] if shares_beginnings else []
            added = range(start, start + len(read) - len(stem))
            yield _Branch(r, stem, added)
            before = read, [*stem, *added]
            start = added.stop


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _distinct_pairs(predictors_M: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first of each set of equal pairs (U,), and each pair's set (M,)."""
    pairs_M = predictors_M * (targets_M.max() + 1) + targets_M
    sets, set_M = pairs_M.unique(return_inverse=True)
    places_M = torch.arange(len(set_M), device=set_M.device)
    first_U = places_M.new_full((len(sets),), len(set_M))
    return first_U.scatter_reduce(0, set_M, places_M, "amin"), set_M


class _SharedPrefixAttention(torch.autograd.Function):
    """Queries (N, H, D), keys and values (N, K, D) of a `Packing` to the output (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        n = packing.prompt_tokens
        attend, _ = _kernels_for(query)
        output, lse = attend(query[:n], key[:n], value[:n], packing.prompt_segments, scale)

        # Completions of one token have nothing to read.
        if not packing.branch_segments.is_empty:
            queries = query[n:]
            own, own_lse = attend(queries, key[n:], value[n:], packing.branch_segments, scale)
            prompt, prompt_lse = attend(queries, key[:n], value[:n], packing.on_prompts, scale)
            merged, merged_lse = merge_lse(own, prompt, own_lse, prompt_lse)

            if stems := packing.stems:
                places, keys = packing.stem_queries, packing.stem_keys
                stem, stem_lse = attend(
                    queries[places], key[n:][keys], value[n:][keys], stems, scale
                )
                both, both_lse = merge_lse(merged[places], stem, merged_lse[places], stem_lse)
                merged[places], merged_lse[places] = both, both_lse

            output = torch.cat([output, merged])
            lse = torch.cat([lse, merged_lse])

        ctx.save_for_backward(query, key, value, output, lse)
        ctx.packing = packing
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        packing: Packing = ctx.packing
        n = packing.prompt_tokens
        _, attend_backward = _kernels_for(query)

        def part(
            queries: slice | Tensor, keys: slice | Tensor, segments: Segments
        ) -> tuple[Tensor, Tensor, Tensor]:
            given = query[queries], key[keys], value[keys], output[queries], lse[queries]
            return attend_backward(gradient[queries], given, segments, ctx.scale)

        prompts, branches = slice(0, n), slice(n, None)
        d_query, d_key, d_value = part(prompts, prompts, packing.prompt_segments)
        if not packing.branch_segments.is_empty:
            own_query, own_key, own_value = part(branches, branches, packing.branch_segments)
            on_query, on_key, on_value = part(branches, prompts, packing.on_prompts)
            d_query = torch.cat([d_query, own_query + on_query])
            d_key = torch.cat([d_key + on_key, own_key])
            d_value = torch.cat([d_value + on_value, own_value])

        if stems := packing.stems:
            places, keys = packing.stem_queries + n, packing.stem_keys + n
            on_query, on_key, on_value = part(places, keys, stems)
            d_query.index_add_(0, places, on_query)
            d_key.index_add_(0, keys, on_key)
            d_value.index_add_(0, keys, on_value)
        return d_query, d_key, d_value, None, None


# Attention between runs of queries and runs of keys, without padding


class Segments:
    """Which queries attend to which keys, by the lengths of the runs of both.

    The i-th run of queries attends to the i-th run of keys: to all of it or, if `is_causal`, up to
    the query's own place.
    """

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int], is_causal: bool, device: torch.device
    ):
        self.queries, self.keys = queries, keys
        self.is_causal, self.device = is_causal, device

        self.count = len(queries)
        self.is_empty = not sum(queries)
        self.max_queries = max(queries, default=0)
        self.max_keys = max(keys, default=0)
        # Where each run begins, and where the last one ends.
        self.query_bounds, self.key_bounds = (
            to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
            for lengths in (queries, keys)
        )

    def runs(self, least: int = 0) -> tuple[Tensor, Tensor, int, int]:
        """Return the bounds, and the lengths of the longest runs; that of queries at `least`."""
        return self.query_bounds, self.key_bounds, max(self.max_queries, least), self.max_keys

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


def _kernels_for(query: Tensor) -> tuple[Callable, Callable]:
    """Return two functions for queries of this kind: `attend` returns the attention (N, H, D)
    within segments and its log-sum-exps (N, H), `attend_backward` the gradients of queries, keys
    and values from that of the output.

    The latter takes queries, keys, values, output and log-sum-exps as one tuple. The last two may
    be those of a softmax over more keys. The gradients are then exactly the share of the given
    keys.
    """
    if not query.is_cuda:
        return _padded, _padded_backward
    if query.dtype in (torch.float16, torch.bfloat16):
        return _flash, _flash_backward
    return _efficient, _efficient_backward


def merge_lse(
    one: Tensor, other: Tensor, one_lse: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, D) to both of two parts, and its log-sum-exps (N, H)."""
    lse = torch.logaddexp(one_lse, other_lse)
    # The products are in the precision of the log-sum-exps, float32 at least.
    merged = one * (one_lse - lse).exp()[..., None] + other * (other_lse - lse).exp()[..., None]
    return merged.to(one.dtype), lse


# FlashAttention, on a GPU in half precision


def _flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    output, lse_HN, *_ = aten._flash_attention_forward(
        query,
        key,
        value,
        *segments.runs(MIN_QUERIES),
        0.0,  # dropout
        segments.is_causal,
        False,  # no debug mask
        scale=scale,
    )
    return output, lse_HN.transpose(0, 1)


def _flash_backward(
    gradient: Tensor, attention: tuple[Tensor, ...], segments: Segments, scale: float
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
        *segments.runs(MIN_QUERIES),
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
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    H = query.shape[1]
    key, value = (_repeat_heads(x, H) for x in (key, value))
    output, lse, *_ = aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        None,  # no bias
        *segments.runs(),
        0.0,  # dropout
        CAUSAL_FROM_TOP_LEFT if segments.is_causal else NO_MASK,
        True,  # with log-sum-exps
        scale=scale,
    )

    # The log-sum-exps come as (runs, H, queries, padded).
    indices = _query_indices_in(segments, lse.shape[2])
    return output[0], lse.transpose(1, 2).reshape(-1, H)[indices]


def _efficient_backward(
    gradient: Tensor, attention: tuple[Tensor, ...], segments: Segments, scale: float
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
        *segments.runs(),
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


def _query_indices_in(segments: Segments, length: int) -> Tensor:
    """Return the indices of the queries in a flattened grid of rows of `length` tokens."""
    row = segments.query_indices // segments.max_queries
    offset = segments.query_indices % segments.max_queries
    return row * length + offset


# PyTorch's CPU kernel, on a padded grid


def _padded(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    count, query_N, key_N = segments.count, segments.query_indices, segments.key_indices
    query = _grid(query, query_N, count, segments.max_queries)
    key, value = (_grid(x, key_N, count, segments.max_keys) for x in (key, value))
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        0.0,  # dropout
        segments.is_causal,
        attn_mask=_padding_mask(segments, query),
        scale=scale,
    )
    return _pack(output, query_N), _pack(lse, query_N)


def _padded_backward(
    gradient: Tensor, attention: tuple[Tensor, ...], segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse = attention
    count, query_N, key_N = segments.count, segments.query_indices, segments.key_indices
    gradient, query, output, lse = (
        _grid(x, query_N, count, segments.max_queries) for x in (gradient, query, output, lse)
    )
    key, value = (_grid(x, key_N, count, segments.max_keys) for x in (key, value))
    d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient,
        query,
        key,
        value,
        output,
        lse,
        0.0,  # dropout
        segments.is_causal,
        attn_mask=_padding_mask(segments, query),
        scale=scale,
    )
    return _pack(d_query, query_N), _pack(d_key, key_N), _pack(d_value, key_N)


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


def _padding_mask(segments: Segments, like: Tensor) -> Tensor | None:
    """Return what is added to the scores, -inf at padded keys; None where nothing needs hiding.

    A causal mask hides padded keys already, because they come after all queries.
    """
    if segments.is_causal or min(segments.keys) == segments.max_keys:
        return None
    lengths = segments.key_bounds.diff()
    is_padding = torch.arange(segments.max_keys, device=like.device) >= lengths[:, None]
    return like.new_zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)[:, None, None]

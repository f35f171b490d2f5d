"""The update's attention: a micro-batch as one row without padding, each prompt only once.

The prompts stand first, then the completions, each without its last token, which predicts nothing.
A prompt attends to itself, a completion to itself and to its prompt. The parts of a completion's
attention are merged by their log-sum-exps, which is exact (Hydragen, arXiv:2402.05099). The
backward pass of FlashAttention (arXiv:2205.14135) needs only the output and the log-sum-exp of the
whole softmax; given those of the merged one, the gradients of each part are exact as well.

On a CPU, completions of a prompt that begin alike share their beginning too. The completions form a
tree of tokens, in which each token stands once: a completion adds the tokens by which it differs
from all before it, its branch, and the branch also attends to its stem, the tokens before it. Where
most of a group answers right, that leaves a tenth of the tokens. The gradient is the same, because
a token that stands for several completions collects the gradients of all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo.fast.varlen import (
    Attention,
    VarlenSegments,
    attend,
    attend_backward,
    merge_lse,
)
from grpo.model.policy import to_device


@dataclass(frozen=True)
class _Branch:
    """The tokens that a completion adds to the row, e.g. ``_Branch(completion=2, stem=[7, 8],
    start=12, length=3)`` for a completion that reads the tokens 7, 8, 12, 13 and 14 of the row.
    """

    completion: int
    stem: list[int]
    start: int
    length: int

    @property
    def path(self) -> list[int]:
        """The indices of all tokens that the completion reads, in order."""
        return self.stem + list(range(self.start, self.start + self.length))


class Packing:
    """A micro-batch packed into one row, whose completions share their prompts.

    `tokens_N` is the row and `positions_N` the position of each token in its own sequence.
    `predictors_U` are the indices in the row that predict the completions' tokens. Without
    `shares_beginnings`, these are all tokens of the completions, in their order. Otherwise tokens
    that two completions have in common after the same beginning count once; `distinct` and
    `of_tokens` translate between the two. `stems` says which branches attend to which stems;
    `stem_queries` and `stem_keys` are indices into the tokens of all branches.

    It is made from token ids: as many completions for each prompt, in the order of the prompts. A
    model computes its attention by it (see `prefix_cache.attention`).
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
        first = sum(prompt_lengths)
        branches = list(_branches(completions, rows, first, shares_beginnings))

        tokens_N, positions_N, predictors = _lay_out(prompts, completions, branches)
        self.tokens_N = to_device(tokens_N, device)
        self.positions_N = to_device(positions_N, device)
        self.prompt_tokens = first  # the completions' tokens come after these

        # The length of the longest sequence: prompt and completion, less its last token.
        self.longest_sequence = max(
            prompt_lengths[r // rows] + len(completion) - 1
            for r, completion in enumerate(completions)
        )

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

        # Prompts attend to themselves, branches to themselves, to their stems and to their prompts.
        lengths = [branch.length for branch in branches if branch.length or not shares_beginnings]
        by_prompt = [0] * len(prompts)
        for branch in branches:
            by_prompt[branch.completion // rows] += branch.length
        on_stems = [branch for branch in branches if branch.stem and branch.length]
        self.prompt_segments = VarlenSegments(prompt_lengths, prompt_lengths, True, device)
        self.branch_segments = VarlenSegments(lengths, lengths, True, device)
        self.on_prompts = VarlenSegments(by_prompt, prompt_lengths, False, device)
        self.stems: VarlenSegments | None = None
        if on_stems:
            queries = [range(each.start, each.start + each.length) for each in on_stems]
            self.stem_queries = _indices(queries, first, device)
            self.stem_keys = _indices([each.stem for each in on_stems], first, device)
            self.stems = VarlenSegments(
                list(map(len, queries)), [len(each.stem) for each in on_stems], False, device
            )

    def distinct(self, values_M: Tensor) -> Tensor:
        """Return the values of tokens of the completions (M, ...) for `predictors_U` (U, ...)."""
        return values_M if self._first_U is None else values_M.index_select(0, self._first_U)

    def of_tokens(self, values_U: Tensor) -> Tensor:
        """Return values for `predictors_U` (U, ...) for all tokens of the completions (M, ...)."""
        return values_U if self._set_M is None else values_U.index_select(0, self._set_M)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention (1, N, H, D) of the row, from (1, H, N, D) and (1, K, N, D)."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return _SharedPrefixAttention.apply(query, key, value, self, scale)[None]


def _lay_out(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    branches: Sequence[_Branch],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row of a packing, all prompts and then all branches, on the CPU.

    That is its tokens and their positions (N,), and the index of the token that predicts each token
    of the completions (M,).
    """
    rows = len(completions) // len(prompts)
    prompt_lengths = [len(prompt) for prompt in prompts]
    prompt_ends = list(accumulate(prompt_lengths))

    tokens = [torch.tensor(prompt) for prompt in prompts]
    positions = [torch.arange(length) for length in prompt_lengths]
    predictors = [torch.empty(0)] * len(completions)
    for branch in branches:
        prompt = branch.completion // rows
        begin = len(branch.stem)
        end = begin + branch.length
        tokens.append(torch.tensor(completions[branch.completion][begin:end], dtype=torch.long))
        positions.append(torch.arange(begin, end) + prompt_lengths[prompt])

        # The prompt's last token predicts the first one, and each token the next.
        before = torch.tensor([prompt_ends[prompt] - 1, *branch.stem])
        own = torch.arange(branch.start, branch.start + branch.length)
        predictors[branch.completion] = torch.cat([before, own])
    return torch.cat(tokens), torch.cat(positions), torch.cat(predictors)


def _branches(
    completions: Sequence[Sequence[int]], rows: int, start: int, shares_beginnings: bool
) -> Iterator[_Branch]:
    """Yield the branches of all completions, of which each prompt has so many `rows`.

    A completion reads all of its tokens but the last. The first branch begins at `start`. In
    lexical order, no earlier completion has more in common with one than the one just before it.
    """
    for first in range(0, len(completions), rows):
        own = list(range(first, first + rows))
        if shares_beginnings:
            own.sort(key=lambda r: tuple(completions[r][:-1]))

        before: _Branch | None = None
        for r in own:
            read = completions[r][:-1]
            stem: list[int] = []
            if shares_beginnings and before is not None:
                stem = before.path[: common_length(completions[before.completion][:-1], read)]
            before = _Branch(r, stem, start, len(read) - len(stem))
            yield before
            start += before.length


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


def _indices(runs: Sequence[Sequence[int]], first: int, device: torch.device) -> Tensor:
    """Return the indices of all runs, counted from `first`, as a tensor on the device."""
    return to_device(torch.tensor([i - first for run in runs for i in run]), device)


class _SharedPrefixAttention(torch.autograd.Function):
    """Queries (N, H, D), keys and values (N, K, D) of a `Packing` to the output (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        n = packing.prompt_tokens
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

        def part(
            queries: slice | Tensor, keys: slice | Tensor, segments: VarlenSegments
        ) -> tuple[Tensor, Tensor, Tensor]:
            attention = Attention(
                query[queries], key[keys], value[keys], output[queries], lse[queries]
            )
            return attend_backward(gradient[queries], attention, segments, ctx.scale)

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

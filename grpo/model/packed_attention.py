"""The update's attention: a micro-batch as one row without padding, each prompt only once.

The prompts stand first, then the completions, each without its last token, which predicts nothing.
A prompt attends to itself, a completion to itself and to its prompt. The two parts of a
completion's attention are merged by their log-sum-exps, which is exact (Hydragen,
arXiv:2402.05099). The backward pass of FlashAttention (arXiv:2205.14135) needs only the output and
the log-sum-exp of the whole softmax; given those of the merged one, the gradients of each part are
exact as well.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo.model.varlen_attention import (
    Attention,
    VarlenSegments,
    attend,
    attend_backward,
    merge_lse,
    to_device,
)


class Packing:
    """A micro-batch packed into one row, whose completions share their prompts.

    `tokens_N` is the row and `positions_N` the position of each token in its own sequence.
    `predictors_M` are the indices in the row that predict the completions' tokens, in their order.

    It is made from token ids: as many completions for each prompt, in the order of the prompts. A
    model computes its attention by it (see `interfaces.SharedAttention`).
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        rows = len(completions) // len(prompts)
        prompt_lengths = [len(prompt) for prompt in prompts]
        read_lengths = [len(completion) - 1 for completion in completions]
        prompt_ends = list(accumulate(prompt_lengths))

        tokens = [torch.tensor(prompt) for prompt in prompts]
        positions = [torch.arange(length) for length in prompt_lengths]
        predictors = []
        start = prompt_ends[-1]
        longest = max(prompt_lengths)
        for r, completion in enumerate(completions):
            prompt_length = prompt_lengths[r // rows]
            length = prompt_length + read_lengths[r]
            end = start + read_lengths[r]
            tokens.append(torch.tensor(completion[:-1], dtype=torch.long))
            positions.append(torch.arange(prompt_length, length))

            # The prompt's last token predicts the first one, and each token the next.
            last_of_prompt = prompt_ends[r // rows] - 1
            predictors += [torch.tensor([last_of_prompt]), torch.arange(start, end)]
            start = end
            longest = max(longest, length)

        self.tokens_N = to_device(torch.cat(tokens), device)
        self.positions_N = to_device(torch.cat(positions), device)
        self.predictors_M = to_device(torch.cat(predictors), device)
        self.prompt_tokens = prompt_ends[-1]  # the completions' tokens come after these
        self.longest = longest

        # Prompts attend to themselves, completions to themselves and to their prompts.
        self.prompts = VarlenSegments(prompt_lengths, prompt_lengths, True, device)
        self.completions = VarlenSegments(read_lengths, read_lengths, True, device)
        read_by_prompt = [sum(read_lengths[i : i + rows]) for i in range(0, len(completions), rows)]
        self.on_prompts = VarlenSegments(read_by_prompt, prompt_lengths, False, device)

    def longest_sequence(self, new_tokens: int) -> int:
        """Return the length of the longest sequence: prompt and completion, less its last token."""
        return self.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention (1, N, H, D) of the row, from (1, H, N, D) and (1, K, N, D)."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return _SharedPrefixAttention.apply(query, key, value, self, scale)[None]


class PaddedBatch:
    """The same for a model that cannot share prompts (see `model.fallback`).

    `tokens_RT` are the completions, padded on the right; `mask_RT` is False at padding; `prompts`
    are token ids.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        self.prompts = prompts
        tokens_RT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(completion) for completion in completions], batch_first=True
        )
        lengths_R = torch.tensor([len(completion) for completion in completions])
        mask_RT = torch.arange(tokens_RT.shape[1]) < lengths_R[:, None]
        self.tokens_RT = to_device(tokens_RT, device)
        self.mask_RT = to_device(mask_RT, device)


class _SharedPrefixAttention(torch.autograd.Function):
    """Queries (N, H, D), keys and values (N, K, D) of a `Packing` to the output (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        n = packing.prompt_tokens
        output, lse = attend(query[:n], key[:n], value[:n], packing.prompts, scale)

        # Completions of one token have nothing to read.
        if not packing.completions.is_empty:
            own, own_lse = attend(query[n:], key[n:], value[n:], packing.completions, scale)
            prompt, prompt_lse = attend(query[n:], key[:n], value[:n], packing.on_prompts, scale)
            merged, merged_lse = merge_lse(own, prompt, own_lse, prompt_lse)
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
        prompts, completions = slice(0, packing.prompt_tokens), slice(packing.prompt_tokens, None)

        def part(
            queries: slice, keys: slice, segments: VarlenSegments
        ) -> tuple[Tensor, Tensor, Tensor]:
            attention = Attention(
                query[queries], key[keys], value[keys], output[queries], lse[queries]
            )
            return attend_backward(gradient[queries], attention, segments, ctx.scale)

        d_query, d_key, d_value = part(prompts, prompts, packing.prompts)
        if not packing.completions.is_empty:
            own_query, own_key, own_value = part(completions, completions, packing.completions)
            on_query, on_key, on_value = part(completions, prompts, packing.on_prompts)
            d_query = torch.cat([d_query, own_query + on_query])
            d_key = torch.cat([d_key + on_key, own_key])
            d_value = torch.cat([d_value + on_value, own_value])
        return d_query, d_key, d_value, None, None

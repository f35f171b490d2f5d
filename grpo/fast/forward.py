"""Two ways to run a model faster than its own forward pass, called paths, in update and rollout.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, with prompts shared between completions (`grpo.fast.prefix_cache` in the
  rollout, `grpo.fast.packing` in the update).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.fast.llama import FastLlama
from grpo.fast.packing import Packing, common_length
from grpo.fast.prefix_cache import PrefixCache
from grpo.model.policy import Batch, PlainForward, Policy

# On a CPU, prompts share their beginning if that saves at least so many tokens, and if the masks of
# their attention have no more scores than this for each head.
MIN_SAVED = 256
MAX_SCORES = 1 << 24


class FastForward(PlainForward):
    """Runs a policy's model by one of the paths: by `llama`, or else by itself.

    A rollout makes a cache by `prefill`; `extend` appends tokens to all rows, and `cache.reorder`
    drops, copies and shortens rows.
    """

    def __init__(self, policy: Policy, llama: FastLlama | None):
        super().__init__(policy)
        self.llama = llama

    # The update

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Batch:
        """Return a micro-batch, whose completions share their prompts.

        On a CPU they share their beginnings, too.
        """
        device = self.policy.device
        return Packing(prompts, completions, device, shares_beginnings=device.type == "cpu")

    def predict(self, batch: Any) -> Tensor:
        """Return the hidden states that predict the distinct tokens of a micro-batch (U, E)."""
        if self.llama and self.llama.use_lora:
            self.llama.refresh()
        hidden_1NE = self.hidden_states(batch.tokens_N[None], batch.positions_N[None], batch)
        return hidden_1NE[0].index_select(0, batch.predictors_U)

    def checkpoint_gradients(self) -> None:
        """From now on, compute activations again in the backward pass."""
        if self.llama:
            self.llama.gradient_checkpointing = True
        else:
            super().checkpoint_gradients()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Within this context, the model runs without its adapter."""
        if self.llama is None:
            with super().without_adapter():
                yield
            return
        self.llama.use_lora = False
        try:
            yield
        finally:
            self.llama.use_lora = True

    def hidden_states(self, tokens_BT: Tensor, position_ids: Tensor, shared: Any) -> Tensor:
        """Return the last hidden states (B, T, E); `shared` computes the attention."""
        if self.llama:
            return self.llama(tokens_BT, position_ids, shared)
        output = self.policy.inner(
            input_ids=tokens_BT, use_cache=False, position_ids=position_ids, shared=shared
        )
        return output.last_hidden_state

    # The rollout

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, PrefixCache]:
        """Run each prompt once; on a CPU, what all of them begin with only once.

        Returns the hidden states of the prompts' last tokens (P, E), and the cache to `extend`.
        """
        if self.llama:
            self.llama.refresh()

        if self.policy.device.type == "cpu":
            common = common_beginning(prompts)
            longest = max(map(len, prompts))
            saved = common * (len(prompts) - 1)
            scores = len(prompts) * (longest - common) * longest
            if saved >= MIN_SAVED and scores <= MAX_SCORES:
                return self._after_beginning(prompts, common)
        return self._whole(prompts)

    def extend(self, tokens_RT: Tensor, cache: PrefixCache) -> Tensor:
        """Run the model on the next tokens of each row; return their hidden states (R, T, E).

        Drafts may reach beyond the context; there they are never accepted.
        """
        assert cache.filled_R is not None
        offsets_T = torch.arange(tokens_RT.shape[1], device=self.policy.device)
        positions_RT = (cache.lengths_P + cache.filled_R)[:, None] + offsets_T
        return self.hidden_states(tokens_RT, positions_RT.clamp(max=self.policy.context - 1), cache)

    def _whole(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, PrefixCache]:
        """Run each prompt from its first token to its last; return the same as `prefill`."""
        device = self.policy.device
        tokens_PL, lengths_P = (each.to(device) for each in _padded(prompts))
        cache = PrefixCache(lengths_P, tokens_PL.shape[1])
        positions_PL = torch.arange(tokens_PL.shape[1], device=device)[None].expand_as(tokens_PL)
        hidden_PLE = self.hidden_states(tokens_PL, positions_PL, cache)
        return hidden_PLE[torch.arange(len(prompts), device=device), lengths_P - 1], cache

    def _after_beginning(
        self, prompts: Sequence[tuple[int, ...]], common: int
    ) -> tuple[Tensor, PrefixCache]:
        """Run the first `common` tokens, which all prompts begin with, and then the rest of each.

        The rests are rows that continue the beginning. Returns the same as `prefill`.
        """
        tokens_PT, lengths_P = _padded([prompt[common:] for prompt in prompts])
        P, T = tokens_PT.shape

        _, beginning = self._whole([prompts[0][:common]])
        beginning.allocate(P, T)
        hidden_PTE = self.extend(tokens_PT, beginning)

        cache = PrefixCache(common + lengths_P, common + T)
        for layer, of_beginning in beginning.prompt.items():
            keys_PKLD, values_PKLD = (
                torch.cat([first.expand(P, -1, -1, -1), rest], 2)
                for first, rest in zip(of_beginning, beginning.own[layer], strict=True)
            )
            cache.prompt[layer] = keys_PKLD, values_PKLD
        return hidden_PTE[torch.arange(P), lengths_P - 1], cache


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all prompts begin with, the last token of each left out."""
    # In lexical order, the first and the last one have the least in common.
    return common_length(min(prompts)[:-1], max(prompts)[:-1])


def _padded(prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the tokens of the prompts (P, L), with zeros on the right, and their lengths (P,)."""
    tokens_PL = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    return tokens_PL, torch.tensor([len(prompt) for prompt in prompts])

"""Two ways to run a model faster than its own forward pass, called paths, in update and rollout.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, by our attention: each prompt is run once, in the rollout
  (`grpo.fast.cache`) and in the update (`grpo.fast.packing`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.fast.cache import KeyValueCache
from grpo.fast.llama import FastLlama
from grpo.fast.packing import Packing
from grpo.model.forward import Batch
from grpo.model.policy import PlainForward, Policy


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

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], room: int = 0
    ) -> tuple[Tensor, KeyValueCache]:
        """Run each prompt once.

        Returns the hidden states of the prompts' last tokens (P, E), and the cache to `extend`,
        which has a row for each prompt, with `room` for so many more tokens.
        """
        if self.llama:
            self.llama.refresh()
        device = self.policy.device
        tokens_PL = pad_sequence([torch.tensor(prompt) for prompt in prompts], True).to(device)
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
        rows_P = torch.arange(len(prompts), device=device)

        cache = KeyValueCache(len(prompts), tokens_PL.shape[1] + room, device)
        hidden_PLE = self.extend(tokens_PL, cache)
        cache.reorder(rows_P, lengths_P)
        return hidden_PLE[rows_P, lengths_P - 1], cache

    def extend(self, tokens_RT: Tensor, cache: KeyValueCache) -> Tensor:
        """Run the model on the next tokens of each row; return their hidden states (R, T, E).

        Drafts may reach beyond the context; there they are never accepted.
        """
        offsets_T = torch.arange(tokens_RT.shape[1], device=self.policy.device)
        positions_RT = cache.filled_R[:, None] + offsets_T
        return self.hidden_states(tokens_RT, positions_RT.clamp(max=self.policy.context - 1), cache)

"""Two ways to run a model faster than its own forward pass, called paths, in update and rollout.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, by our attention: each prompt is run once.

A `transformers` model passes the keyword argument `shared` on to its attention function, which is
registered at the end of this module. `shared` is a `KeyValueCache` in the rollout, and a
`grpo.fast.packing.Packing` in the update. Each has `attend`, and `longest_sequence`: the length of
the longest sequence, in tokens that are kept.

Shapes: X tokens of a row, its prompt and what follows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from data.errors import UserError
from grpo.fast.llama import FastLlama
from grpo.fast.packing import Packing
from grpo.model.forward import Batch, Model
from grpo.model.policy import PlainForward, Policy

ATTENTION_NAME = "grpo_shared_prompt"

# The buffers get this many times the rows that are needed, so that they do not grow at each step.
GROWTH = 5 / 4


class KeyValueCache:
    """Keys and values, in every layer, of rows of a prompt and what follows it.

    `filled_R` counts the valid tokens of each row; there is memory for `room` tokens of each. By
    layer, `keys_values` holds buffers (R or more, K, room, D).
    """

    def __init__(self, prompts: int, room: int, device: torch.device):
        self.room = room
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        self._fill(torch.zeros(prompts, dtype=torch.long, device=device))

    def _fill(self, filled_R: Tensor) -> None:
        self.filled_R = filled_R
        least, self.most = torch.stack(filled_R.aminmax()).tolist()
        self.is_even = least == self.most  # all rows have the same number of valid tokens
        self.longest_sequence = self.most + 1  # drafts that are not kept do not count
        self.mask_R1ZX: Tensor | None = None  # the same in all layers

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`.

        The next tokens overwrite the rest.
        """
        moved_A = (rows_R != torch.arange(len(rows_R), device=rows_R.device)).nonzero()[:, 0]
        self._fill(filled_R)
        if len(moved_A):
            for layer, buffers in self.keys_values.items():
                keys, values = (self._moved(buffer, rows_R, moved_A) for buffer in buffers)
                self.keys_values[layer] = keys, values

    def _moved(self, buffer: Tensor, rows_R: Tensor, moved_A: Tensor) -> Tensor:
        """Return a buffer in which the rows `moved_A` have been moved; it grows if it must."""
        moved = buffer[rows_R[moved_A], :, : self.most]
        if len(rows_R) > len(buffer):
            small, rows = buffer, int(len(rows_R) * GROWTH)
            buffer = small.new_zeros(rows, *small.shape[1:])
            buffer[: len(small), :, : self.most] = small[:, :, : self.most]
        buffer[moved_A, :, : self.most] = moved
        return buffer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append keys and values (R, K, T, D); return the attention (R, T, H, D) to all so far."""
        (R, H, T, D), K = query.shape, key.shape[1]
        keys, values = self._append(layer, key, value)
        if T > 1 and not self.most:  # the beginning of all rows
            output = scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=scale, enable_gqa=K != H
            )
            return output.transpose(1, 2)

        if self.mask_R1ZX is None and (T > 1 or not self.is_even):
            self.mask_R1ZX = self._mask(query, H // K)
        output = scaled_dot_product_attention(
            query.reshape(R, K, -1, D), keys, values, attn_mask=self.mask_R1ZX, scale=scale
        )
        return output.view(R, H, T, D).transpose(1, 2)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values behind those of each row; return all so far (R, K, X, D)."""
        R, K, T, D = key.shape
        if layer not in self.keys_values:
            shape = R, K, self.room, D
            self.keys_values[layer] = key.new_zeros(shape), key.new_zeros(shape)

        end = self.most + T
        for buffer, new in zip(self.keys_values[layer], (key, value)):
            if self.is_even:
                buffer[:R, :, self.most : end] = new
            else:
                rows_R1 = torch.arange(R, device=new.device)[:, None]
                buffer[rows_R1, :, self._places(T)] = new.transpose(1, 2)
        keys, values = self.keys_values[layer]
        return keys[:R, :, :end], values[:R, :, :end]

    def _places(self, T: int) -> Tensor:
        """Return the places of the next T tokens of each row (R, T)."""
        return self.filled_R[:, None] + torch.arange(T, device=self.filled_R.device)

    def _mask(self, query: Tensor, Q: int) -> Tensor:
        """Return what is added to the scores: -inf for the tokens ahead of each query."""
        T = query.shape[2]
        keys_X = torch.arange(self.most + T, device=query.device)
        is_ahead_RTX = keys_X > self._places(T)[:, :, None]
        mask_RTX = query.new_zeros(is_ahead_RTX.shape).masked_fill_(is_ahead_RTX, -torch.inf)
        return mask_RTX.repeat(1, Q, 1)[:, None]


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


# Arguments that some architectures pass to every attention function although plain causal
# attention does not need them. Any other argument that is not None would change the result, as
# learned sinks (`s_aux`) and soft caps do.
HARMLESS = frozenset(
    {
        "position_ids",  # rotary positions have been applied already
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def causal_mask(
    *, local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> int | None:
    """Return what stands in for the mask of a layer, which is causal; `attention` needs none.

    It is the size of a sliding window or of a chunk, None for full attention. This is the mask
    function of `transformers.AttentionMaskInterface`. Not every architecture passes its window to
    its attention function, but each asks here for its mask. Raises UserError for a mask that is not
    causal.
    """
    if use_vmap or "allow_is_bidirectional_skip" in others:
        raise UserError("--model: its attention uses a mask of its own, which is not causal")
    return local_size


def attention(
    module: Model,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    shared: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention (B, T, H, D) of a layer, and None in place of its weights.

    This is the attention function of `transformers.AttentionInterface`: plain causal attention.
    Nothing that would change it is ignored. Raises UserError for a mask, dropout, attention that is
    not causal, arguments that are not known to be HARMLESS, and a sliding window shorter than the
    longest sequence.
    """
    unsupported = [
        name for name, value in others.items() if value is not None and name not in HARMLESS
    ]

    if isinstance(attention_mask, int):
        sliding_window = min(attention_mask, sliding_window or attention_mask)
    elif attention_mask is not None:
        unsupported.append("attention_mask")

    if dropout:
        unsupported.append("dropout")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        unsupported.append("is_causal=False")
    if unsupported:
        raise UserError(
            f"--model: {type(module).__name__} needs {', '.join(sorted(unsupported))}, which "
            "attention over shared prompts does not support"
        )

    length = shared.longest_sequence
    if sliding_window and length > sliding_window:
        raise UserError(
            f"--model: its attention window is {sliding_window} tokens, but prompt and completion "
            f"have {length}; give shorter problems, or a model with full attention"
        )

    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return shared.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, causal_mask)

"""The rollout's attention: keys and values of a prompt are kept once for all its completions.

A `transformers` model passes the keyword argument `shared` on to its attention function, which is
registered at the end of this module. `shared` is a `PrefixCache` in the rollout, and a
`grpo.fast.packing.Packing` in the update. Each has `attend`, and `longest_sequence`: the length of
the longest sequence, in tokens that are kept.

In the rollout one softmax runs over the scores of prompt and own tokens, so the result is that of
plain attention up to rounding. Hydragen (Juravsky et al. 2024, arXiv:2402.05099) merges two
softmaxes instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from data.errors import UserError
from grpo.model.check import Model

ATTENTION_NAME = "grpo_shared_prompt"

# A buffer of keys grows at least by this factor, so that it does not grow at each step.
GROWTH = 5 / 4


class PrefixCache:
    """Keys and values, in every layer, of P prompts and of the rows that follow them.

    The cache of a rollout (see `FastForward`). `lengths_P` are the true lengths of the right-padded
    prompts in tokens; after `allocate` there is one for each row. Row r continues prompt
    `prompt_R[r]`.

    The rows of a prompt have W slots side by side, so that one matrix product multiplies all of
    them with its keys. `slots` (R * K,) is the slot of each key head of each row. `slot_owner`
    (P * K * W,) is the inverse; empty slots hold an arbitrary head. `bias_P1L` is -inf at the
    padding of the prompts, else 0.
    """

    def __init__(self, lengths_P: Tensor, padded_length: int):
        self.lengths_P = lengths_P
        self.padding_PL = torch.arange(padded_length, device=lengths_P.device) >= lengths_P[:, None]

        # By layer: keys and values of the prompts (P, K, L, D), and of the rows' own tokens in
        # buffers (R or more, K, room, D).
        self.prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}

        self.room = 0
        self.filled_R: Tensor | None = None  # valid tokens of each row; None during the prefill
        self.max_filled = 0
        self.longest = padded_length  # tokens of the longest sequence, its prompt included
        self.is_even = True  # all rows have the same number of valid tokens

        # The same in all layers of a step: see `_next`.
        self.next: tuple[Tensor, Tensor | None] | None = None

    def allocate(self, rows: int, room: int) -> None:
        """End the prefill: give every prompt the same number of rows, with `room` tokens each.

        The rows are in the order of the prompts.
        """
        prompts_P = torch.arange(len(self.lengths_P), device=self.lengths_P.device)
        self._assign_slots(prompts_P.repeat_interleave(rows // len(prompts_P)))
        self.lengths_P = self.lengths_P[self.prompt_R]
        self.filled_R = torch.zeros_like(self.prompt_R)
        self.room = room
        self.next = None

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`.

        The next tokens overwrite the rest. Prompts without rows are dropped.
        """
        assert self.filled_R is not None
        moved_A = (rows_R != torch.arange(len(rows_R), device=rows_R.device)).nonzero()[:, 0]
        lengths_R = self.lengths_P[rows_R] + filled_R
        low, high, self.longest = torch.stack([*filled_R.aminmax(), lengths_R.max()]).tolist()
        self.max_filled = high
        self.is_even = low == high

        if len(moved_A) or len(rows_R) < len(self.filled_R):
            for layer, (keys, values) in self.own.items():
                self.own[layer] = (
                    self._reordered(keys, rows_R, moved_A),
                    self._reordered(values, rows_R, moved_A),
                )
            self._drop_prompts(rows_R)
            self.lengths_P = self.lengths_P[rows_R]

        self.filled_R = filled_R
        self.next = None

    def _reordered(self, buffer: Tensor, rows_R: Tensor, moved_A: Tensor) -> Tensor:
        """Return a buffer in which the rows `moved_A` have been moved; it grows if it must."""
        moved = buffer[rows_R[moved_A], :, : self.max_filled]
        if len(rows_R) > len(buffer):
            small = buffer
            rows = max(len(rows_R), int(len(small) * GROWTH))
            buffer = small.new_zeros(rows, *small.shape[1:])
            buffer[: len(small), :, : self.max_filled] = small[:, :, : self.max_filled]
        buffer[moved_A, :, : self.max_filled] = moved
        return buffer

    def _drop_prompts(self, rows_R: Tensor) -> None:
        """Drop the prompts that no row of `rows_R` continues, and reassign the slots."""
        prompts_P, prompt_R = self.prompt_R[rows_R].unique(return_inverse=True)
        if len(prompts_P) < len(self.padding_PL):
            self.padding_PL = self.padding_PL[prompts_P]
            for layer, (keys, values) in self.prompt.items():
                self.prompt[layer] = keys[prompts_P], values[prompts_P]
        self._assign_slots(prompt_R)

    def _assign_slots(self, prompt_R: Tensor) -> None:
        """Give the rows of each prompt slots side by side, for each key head separately."""
        keys_PKLD, _ = next(iter(self.prompt.values()))
        P, K, L, _ = keys_PKLD.shape
        prompts_P = torch.arange(P, device=prompt_R.device)

        # The column of a row counts the rows of its prompt before it.
        is_of_RP = prompt_R[:, None] == prompts_P
        column_R = is_of_RP.cumsum(0).gather(1, prompt_R[:, None])[:, 0] - 1
        W = int(column_R.max()) + 1

        heads_K = torch.arange(K, device=prompt_R.device)
        slots_RK = (prompt_R[:, None] * K + heads_K) * W + column_R[:, None]
        slots = slots_RK.view(-1)
        slot_owner = slots.new_zeros(P * K * W)
        slot_owner[slots] = torch.arange(len(slots), device=prompt_R.device)

        self.prompt_R = prompt_R
        self.slots = slots
        self.slot_owner = slot_owner
        self.slots_per_prompt = W
        self.bias_P1L = keys_PKLD.new_zeros(P, 1, L).masked_fill_(
            self.padding_PL[:, None], -torch.inf
        )

    @property
    def longest_sequence(self) -> int:
        """The length of the longest sequence with its next token.

        Drafted tokens behind that one do not count: what a completion's budget has no room for is
        not kept.
        """
        return self.longest + (self.filled_R is not None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append keys and values (R, K, T, D); return the attention (R, T, H, D) to all so far.

        The queries are (R, H, T, D). During the prefill the tokens are those of the prompts.
        """
        if self.filled_R is None:
            return self._attend_prompt(layer, query, key, value, scale)

        self._append(layer, key, value)
        return self._attend_all(layer, query * scale)

    def _attend_prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Keep the prompts' keys and values; return their attention (P, L, H, D)."""
        # Contiguous, else each product copies them.
        self.prompt[layer] = key.contiguous(), value.contiguous()
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return output.transpose(1, 2)

    def _append(self, layer: int, key_RKTD: Tensor, value_RKTD: Tensor) -> None:
        """Write keys and values behind those of each row."""
        R, K, T, D = key_RKTD.shape
        if layer not in self.own:
            shape = R, K, self.room, D
            self.own[layer] = key_RKTD.new_zeros(shape), key_RKTD.new_zeros(shape)

        places_RT, _ = self._next(T)
        for buffer, new in zip(self.own[layer], (key_RKTD, value_RKTD)):
            if self.is_even:
                buffer[:R, :, self.max_filled : self.max_filled + T] = new
            else:
                rows_R1 = torch.arange(R, device=new.device)[:, None]
                buffer[rows_R1, :, places_RT] = new.transpose(1, 2)

    def _next(self, T: int) -> tuple[Tensor, Tensor | None]:
        """Return the places of the next T tokens (R, T), and which keys are ahead of each.

        The latter (R, T, S) is None if no key is ahead of any token. Both are computed once for all
        layers.
        """
        if self.next is None or self.next[0].shape[1] != T:
            assert self.filled_R is not None
            places_RT = self.filled_R[:, None] + torch.arange(T, device=self.filled_R.device)
            is_ahead_RTS = None
            if T > 1 or not self.is_even:
                places_S = torch.arange(self.max_filled + T, device=places_RT.device)
                is_ahead_RTS = places_S > places_RT[:, :, None]
            self.next = places_RT, is_ahead_RTS
        return self.next

    def _attend_all(self, layer: int, query_RHTD: Tensor) -> Tensor:
        """Return the attention by one softmax over the scores of prompt and own tokens."""
        prompt_key_PKLD, prompt_value_PKLD = self.prompt[layer]
        R, H, T, D = query_RHTD.shape
        K, L = prompt_key_PKLD.shape[1:3]
        Q, S = H // K, self.max_filled + T
        key_RKSD, value_RKSD = (buffer[:R, :, :S] for buffer in self.own[layer])
        query_RKZD = query_RHTD.reshape(R, K, Q * T, D)

        # Scores: those of the prompt for all rows of a prompt at once.
        on_prompt = self._to_slots(query_RKZD) @ prompt_key_PKLD.transpose(2, 3)
        on_prompt = self._from_slots(on_prompt.add_(self.bias_P1L[:, None]))
        on_own = query_RKZD @ key_RKSD.transpose(2, 3)
        _, is_ahead_RTS = self._next(T)
        if is_ahead_RTS is not None:
            on_own.view(R, K, Q, T, S).masked_fill_(is_ahead_RTS[:, None, None], -torch.inf)

        # One softmax over both parts, in float32 at least.
        wide = torch.promote_types(query_RHTD.dtype, torch.float32)
        weights_RKZX = torch.cat([on_prompt, on_own], -1).softmax(-1, dtype=wide)
        weights_RKZX = weights_RKZX.to(query_RHTD.dtype)

        from_prompt = self._from_slots(self._to_slots(weights_RKZX[..., :L]) @ prompt_value_PKLD)
        output = from_prompt + weights_RKZX[..., L:] @ value_RKSD
        return output.view(R, H, T, D).transpose(1, 2)

    def _to_slots(self, x_RKZA: Tensor) -> Tensor:
        """Return the rows of each prompt side by side (P, K, W * Z, A)."""
        R, K, Z, A = x_RKZA.shape
        heads = x_RKZA.reshape(R * K, Z, A).index_select(0, self.slot_owner)
        return heads.view(-1, K, self.slots_per_prompt * Z, A)

    def _from_slots(self, x: Tensor) -> Tensor:
        """Return slots (P, K, W * Z, A) as rows (R, K, Z, A)."""
        P, K, WZ, A = x.shape
        W = self.slots_per_prompt
        heads = x.view(P * K * W, -1, A).index_select(0, self.slots)
        return heads.view(-1, K, WZ // W, A)


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

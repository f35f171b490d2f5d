"""Attention over shared prompts: keys and values of a prompt are held once, however many
completions read them.

What stands behind a `transformers` model's attention is handed to it as the keyword argument
`shared`, which it passes on to the attention function registered here: a `PrefixCache` in the
rollout, which keeps keys and values, a `model.packed_attention.Packing` in the update.

In the rollout one softmax runs over the scores of both parts, so the result is that of plain
attention up to rounding; cf. Hydragen (Juravsky et al. 2024, arXiv:2402.05099), which joins two
softmaxes instead. On a CPU the many scores of long rows would cost more than they save: those rows
take PyTorch's attention over prompt and own tokens as one sequence.

Shapes: P prompts, R rows (row r goes on from prompt `prompt_R[r]`), W the most rows of one prompt,
L prompt tokens, S kept tokens of a row, T new tokens, H query heads, K key heads, Q = H / K, D
head size; M = Q * T queries of a key head, X = L + S keys.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from tasks.base import UserError

NAME = "grpo_shared_prompt"
MANY = 1 << 13  # scores of a row's head from which it is long: T * (L + S)


class PrefixCache:
    """Keys and values of `P` prompts and of the rows that go on from them, for every layer.

    Right-padded prompts: `lengths_P` are their true lengths in tokens; from `allocate` on there is
    one for each row. Verbs: prefill (by running the model on the prompts), `allocate` rows for a
    rollout, append (by running the model on some tokens a row), `keep` what was right.
    """

    def __init__(self, lengths_P: torch.Tensor, padded_length: int):
        self.lengths_P = lengths_P
        self.padding_PL = torch.arange(padded_length, device=lengths_P.device) >= lengths_P[:, None]
        self.prompt: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # layer: keys and values (P, K, L, D)
        self.own: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # layer: buffers (R or more, K, room, D)
        self.room = 0
        self.filled_R: torch.Tensor | None = (
            None  # tokens of each row that are kept; None: the prompts are being read
        )
        self.most, self.is_even = 0, True  # the greatest of them, and whether all are alike
        self.next: tuple[torch.Tensor, torch.Tensor | None] | None = None  # see _next
        self.mask_R1MX: torch.Tensor | None = (
            None  # of these next tokens, where it is wanted: what each of Q * T queries sees
        )

    def allocate(self, rows: int, room: int):
        """End the prefill; begin `rows` rows, as many for each prompt, in order, with room for
        `room` tokens each.
        """
        prompts = torch.arange(len(self.lengths_P), device=self.lengths_P.device)
        self._seat(prompts.repeat_interleave(rows // len(prompts)))
        self.lengths_P = self.lengths_P[self.prompt_R]
        self.filled_R, self.room, self.next = torch.zeros_like(self.prompt_R), room, None

    def keep(self, rows_R: torch.Tensor, filled_R: torch.Tensor):
        """Let row i be the first `filled_R[i]` tokens of what was row `rows_R[i]`; the next ones
        overwrite the rest.
        """
        moved_N = (rows_R != torch.arange(len(rows_R), device=rows_R.device)).nonzero()[:, 0]
        low, high = filled_R.aminmax()
        self.most, self.is_even = int(high), bool(low == high)
        if len(moved_N) or len(rows_R) < len(self.filled_R):
            for layer, buffers in self.own.items():
                self.own[layer] = tuple(self._moved(buffer, rows_R, moved_N) for buffer in buffers)
            prompts, prompt_R = self.prompt_R[rows_R].unique(return_inverse=True)
            if len(prompts) < len(self.padding_PL):
                self.padding_PL = self.padding_PL[prompts]
                self.prompt = {
                    layer: (keys[prompts], values[prompts])
                    for layer, (keys, values) in self.prompt.items()
                }
            self._seat(prompt_R)
            self.lengths_P = self.lengths_P[rows_R]
        self.filled_R, self.next = filled_R, None

    def _moved(self, buffer, rows_R, moved_N):
        moved = buffer[rows_R[moved_N], :, : self.most]
        if len(rows_R) > len(buffer):
            small, buffer = (
                buffer,
                buffer.new_zeros(max(len(rows_R), len(buffer) * 5 // 4), *buffer.shape[1:]),
            )
            buffer[: len(small), :, : self.most] = small[:, :, : self.most]
        buffer[moved_N, :, : self.most] = moved
        return buffer

    def _seat(self, prompt_R: torch.Tensor):
        """Give the rows of each prompt seats side by side, (P, W) in all, for each key head of a
        layer apart.
        """
        keys_PKLD, _ = next(iter(self.prompt.values()))
        P, K, L, _ = keys_PKLD.shape
        prompts_P = torch.arange(P, device=prompt_R.device)
        is_of_RP = prompt_R[:, None] == prompts_P
        column_R = is_of_RP.cumsum(0).gather(1, prompt_R[:, None])[:, 0] - 1
        self.prompt_R, self.width = prompt_R, int(column_R.max()) + 1
        self.has_one_each = torch.equal(
            prompt_R, prompts_P
        )  # each prompt has one row: seats as they stand
        heads = torch.arange(K, device=prompt_R.device)
        self.seats = ((prompt_R[:, None] * K + heads) * self.width + column_R[:, None]).view(
            -1
        )  # of the heads of all rows
        self.sitters = self.seats.new_zeros(
            P * K * self.width
        )  # the other way round; on an empty seat just any head
        self.sitters[self.seats] = torch.arange(len(self.seats), device=prompt_R.device)
        self.bias_P1L = keys_PKLD.new_zeros(P, 1, L).masked_fill_(
            self.padding_PL[:, None], -torch.inf
        )

    def reach(self, new: int) -> int:
        """Return how many tokens the longest sequence has, `new` ones included."""
        return self.padding_PL.shape[1] + (self.most + new if self.filled_R is not None else 0)

    def attend(self, layer: int, query_RHTD, key_RKTD, value_RKTD, scale: float) -> torch.Tensor:
        """Take in the tokens' keys and values; return their attention (R, T, H, D)."""
        if self.filled_R is None:
            self.prompt[layer] = (
                key_RKTD.contiguous(),
                value_RKTD.contiguous(),
            )  # else each product copies them
            output = scaled_dot_product_attention(
                query_RHTD,
                key_RKTD,
                value_RKTD,
                is_causal=True,
                scale=scale,
                enable_gqa=key_RKTD.shape[1] != query_RHTD.shape[1],
            )
            return output.transpose(1, 2)
        keys, values, ahead_RTS = self._append(layer, key_RKTD, value_RKTD)
        is_long = (
            ahead_RTS is not None
            and len(ahead_RTS[0]) * (self.bias_P1L.shape[2] + keys.shape[2]) >= MANY
        )
        attend = self._attend_whole if is_long and not query_RHTD.is_cuda else self._attend_both
        return attend(query_RHTD * scale, *self.prompt[layer], keys, values, ahead_RTS)

    def _append(self, layer, key_RKTD, value_RKTD):
        """Return the keys and values so far (R, K, S, D) each, and which of them are ahead of a
        query, or None where none is.
        """
        R, K, T, D = key_RKTD.shape
        if layer not in self.own:
            self.own[layer] = (
                key_RKTD.new_zeros(R, K, self.room, D),
                key_RKTD.new_zeros(R, K, self.room, D),
            )
        places_RT, ahead_RTS = self._next(T)
        for buffer, new in zip(self.own[layer], (key_RKTD, value_RKTD)):
            if self.is_even:
                buffer[:R, :, self.most : self.most + T] = new
            else:
                buffer[torch.arange(R, device=new.device)[:, None], :, places_RT] = new.transpose(
                    1, 2
                )
        return *(buffer[:R, :, : self.most + T] for buffer in self.own[layer]), ahead_RTS

    def _next(self, T: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the places of the next T tokens (R, T), and which keys are ahead of them (R, T,
        S) or None; for all layers.
        """
        if self.next is None or self.next[0].shape[1] != T:
            places_RT = self.filled_R[:, None] + torch.arange(T, device=self.filled_R.device)
            is_ahead = T > 1 or not self.is_even
            self.next = (
                places_RT,
                torch.arange(self.most + T, device=places_RT.device) > places_RT[:, :, None]
                if is_ahead
                else None,
            )
            self.mask_R1MX = None
        return self.next

    def _attend_both(
        self, query_RHTD, prompt_key_PKLD, prompt_value_PKLD, key_RKSD, value_RKSD, ahead_RTS
    ):
        R, H, T, D = query_RHTD.shape
        P, K, L, _ = prompt_key_PKLD.shape
        Q, S = H // K, key_RKSD.shape[2]
        query = query_RHTD.reshape(R, K, Q * T, D)
        on_prompt = self._seated(query) @ prompt_key_PKLD.transpose(2, 3)
        on_prompt = self._unseated(on_prompt.add_(self.bias_P1L[:, None]))
        on_own = query @ key_RKSD.transpose(2, 3)
        if ahead_RTS is not None:
            on_own.view(R, K, Q, T, S).masked_fill_(ahead_RTS[:, None, None], -torch.inf)
        weights = (
            torch.cat([on_prompt, on_own], -1)
            .softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
            .to(query.dtype)
        )
        output = (
            self._unseated(self._seated(weights[..., :L]) @ prompt_value_PKLD)
            + weights[..., L:] @ value_RKSD
        )
        return output.view(R, H, T, D).transpose(1, 2)

    def _attend_whole(
        self, query_RHTD, prompt_key_PKLD, prompt_value_PKLD, key_RKSD, value_RKSD, ahead_RTS
    ):
        """The same by PyTorch's attention, which keeps no scores: each row's prompt and own tokens
        as one sequence.
        """
        R, H, T, D = query_RHTD.shape
        K = key_RKSD.shape[1]
        if self.mask_R1MX is None:
            unseen_RTX = torch.cat(
                [self.padding_PL[self.prompt_R, None].expand(-1, T, -1), ahead_RTS], 2
            )
            mask_RTX = query_RHTD.new_zeros(unseen_RTX.shape).masked_fill_(unseen_RTX, -torch.inf)
            self.mask_R1MX = mask_RTX.repeat(1, H // K, 1)[:, None]
        keys, values = (
            torch.cat([shared if self.has_one_each else shared[self.prompt_R], own], 2)
            for shared, own in ((prompt_key_PKLD, key_RKSD), (prompt_value_PKLD, value_RKSD))
        )
        output = scaled_dot_product_attention(
            query_RHTD.reshape(R, K, -1, D), keys, values, attn_mask=self.mask_R1MX, scale=1.0
        )
        return output.view(R, H, T, D).transpose(1, 2)

    def _seated(self, x_RKMX: torch.Tensor) -> torch.Tensor:
        """Return the rows of each prompt side by side (P, K, W * M, X), so that they meet its keys
        in one matrix product.
        """
        R, K, M, X = x_RKMX.shape
        return (
            x_RKMX
            if self.has_one_each
            else x_RKMX.reshape(R * K, M, X)
            .index_select(0, self.sitters)
            .view(-1, K, self.width * M, X)
        )

    def _unseated(self, x_PKNX: torch.Tensor) -> torch.Tensor:
        P, K, N, X = x_PKNX.shape
        return (
            x_PKNX
            if self.has_one_each
            else x_PKNX.view(P * K * self.width, -1, X)
            .index_select(0, self.seats)
            .view(-1, K, N // self.width, X)
        )


# What some architectures hand to every attention function although plain causal attention does not
# need it. Anything else that is not None would change the result, as learned sinks (`s_aux`) and
# soft caps do.
HARMLESS = frozenset(
    {
        "position_ids",  # the rotation has been applied already
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


@dataclass(frozen=True)
class LocalMask:
    """In place of a mask: a layer's attention is causal and reaches back over `size` tokens at
    most (a window or a chunk).
    """

    size: int


def mask_of(*, local_size: int | None = None, use_vmap: bool = False, **others) -> LocalMask | None:
    """The mask function of `transformers.AttentionMaskInterface`; returns None for a causal mask,
    which `attention` needs none for.

    Not every architecture hands its window to its attention function; each asks here for its mask.
    Raises UserError for one that is not causal.
    """
    if use_vmap or "allow_is_bidirectional_skip" in others:
        raise UserError("--model: its attention has a mask of its own, that is not causal")
    return None if local_size is None else LocalMask(local_size)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    shared,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others,
):
    """The attention function of `transformers.AttentionInterface`; returns (output (B, T, H, D),
    None).

    It is plain causal attention, and nothing that changes it is ignored: raises UserError for a
    mask, dropout, attention that is not causal, arguments that are not known to be HARMLESS, and a
    sliding window that the tokens outgrow.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if isinstance(attention_mask, LocalMask):
        sliding_window = min(attention_mask.size, sliding_window or attention_mask.size)
    elif attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unknown.append("is_causal=False")
    if unknown:
        raise UserError(
            f"--model: {type(module).__name__} wants {', '.join(sorted(unknown))}, which attention "
            "over shared prompts does not have"
        )

    length = shared.reach(query.shape[2])
    if sliding_window and length > sliding_window:
        raise UserError(
            f"--model: its attention slides over {sliding_window} tokens, and prompt and "
            f"completion have {length}; "
            "give fewer --words, or a model with full attention"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return shared.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_of)

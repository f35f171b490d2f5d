"""Attention over shared prompts: keys and values of a prompt are held once, however many completions read them.

What stands behind a `transformers` model's attention is handed to it as the keyword argument `shared`, which it passes on to the
attention function registered here: a `SharedPrompt` in the rollout, which keeps keys and values, a `learn.packing.Packing` in the
update.

In the rollout one softmax runs over the scores of both parts, so the result is that of plain attention up to rounding; cf.
Hydragen (Juravsky et al. 2024, arXiv:2402.05099), which joins two softmaxes instead.

Shapes: P prompts, G completions of each, R = P * G rows (row r belongs to prompt r // G), L prompt tokens, T completion
tokens, H query heads, K key heads, D head size.
"""
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tasks.base import UserError

NAME = "grpo_shared_prompt"


class SharedPrompt:
    """Keys and values of `P` prompts and of the completions that follow them, for every layer.

    Right-padded prompts: `lengths_P` are their true lengths in tokens. Verbs: prefill (by running the model on the prompts),
    `allot` buffers for a rollout, append (by running the model on some tokens a row), `keep` those that were right, `retire`
    finished rows.
    """

    def __init__(self, lengths_P: torch.Tensor, padded_length: int):
        self.lengths_P = lengths_P
        self.padding_PL = torch.arange(padded_length, device=lengths_P.device) >= lengths_P[:, None]
        self.prompt: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: keys and values (P, K, L, D)
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: buffers (R, K, room, D)
        self.room = 0
        self.filled_R: torch.Tensor | None = None  # tokens of each row that are kept; None: the prompts are being read
        self.most, self.is_even = 0, True  # the greatest of them, and whether all are alike

    def allot(self, rows: int, room: int):
        """End the prefill; make room for `room` tokens in each of `rows` rows."""
        self.filled_R, self.room = torch.zeros(rows, dtype=torch.long, device=self.lengths_P.device), room

    def keep(self, tokens_R: torch.Tensor):
        """Keep that many of the tokens that were appended to each row; the next ones overwrite the rest."""
        self.filled_R = self.filled_R + tokens_R
        low, high = self.filled_R.aminmax()
        self.most, self.is_even = int(high), bool(low == high)

    def retire(self, prompts: torch.Tensor, rows: torch.Tensor):
        """Keep only the prompts and rows of these indices, in this order."""
        self.lengths_P, self.padding_PL, self.filled_R = self.lengths_P[prompts], self.padding_PL[prompts], self.filled_R[rows]
        self.prompt = {layer: (keys[prompts], values[prompts]) for layer, (keys, values) in self.prompt.items()}
        for layer, buffers in self.own.items():
            kept = tuple(buffer.new_zeros(len(rows), *buffer.shape[1:]) for buffer in buffers)
            for new, old in zip(kept, buffers):
                new[:, :, :self.most] = old[rows, :, :self.most]
            self.own[layer] = kept

    def reach(self, new: int) -> int:
        """Return how many tokens the longest sequence has, `new` ones included."""
        return self.padding_PL.shape[1] + (self.most + new if self.filled_R is not None else 0)

    def attend(self, layer: int, query_RHTD, key_RKTD, value_RKTD, scale: float) -> torch.Tensor:
        """Take in the tokens' keys and values; return their attention (R, T, H, D)."""
        if self.filled_R is None:
            self.prompt[layer] = (key_RKTD, value_RKTD)
            output = scaled_dot_product_attention(query_RHTD, key_RKTD, value_RKTD, is_causal=True, scale=scale,
                                                  enable_gqa=key_RKTD.shape[1] != query_RHTD.shape[1])
            return output.transpose(1, 2)
        keys, values, ahead_RTS = self._append(layer, key_RKTD, value_RKTD)
        return _two_part_attention(query_RHTD * scale, self.prompt[layer], self.padding_PL, keys, values, ahead_RTS)

    def _append(self, layer, key_RKTD, value_RKTD):
        """Return the keys and values so far (R, K, S, D) each, and which of them are ahead of a query, or None where none is."""
        R, K, T, D = key_RKTD.shape
        if layer not in self.own:
            self.own[layer] = (key_RKTD.new_zeros(R, K, self.room, D), key_RKTD.new_zeros(R, K, self.room, D))
        places_RT = self.filled_R[:, None] + torch.arange(T, device=key_RKTD.device)
        for buffer, new in zip(self.own[layer], (key_RKTD, value_RKTD)):
            if self.is_even:
                buffer[:, :, self.most:self.most + T] = new
            else:
                buffer[torch.arange(R, device=new.device)[:, None], :, places_RT] = new.transpose(1, 2)
        S = self.most + T
        ahead_RTS = None
        if T > 1 or not self.is_even:
            ahead_RTS = torch.arange(S, device=key_RKTD.device) > places_RT[:, :, None]
        return *(buffer[:, :, :S] for buffer in self.own[layer]), ahead_RTS


def attention(module, query, key, value, attention_mask, *, scaling, shared, sliding_window: int | None = None, **_):
    """The attention function of `transformers.AttentionInterface`; returns (output (B, T, H, D), None).

    Raises UserError where the model has a sliding window that the tokens outgrow: it is not applied here.
    """
    length = shared.reach(query.shape[2])
    if sliding_window and length > sliding_window:
        raise UserError(f"--model: its attention slides over {sliding_window} tokens, and prompt and completion have {length}; "
                        "give fewer --words, or a model with full attention")
    return shared.attend(module.layer_idx, query, key, value, scaling), None


def _two_part_attention(query_RHTD, prompt, padding_PL, key_RKSD, value_RKSD, ahead_RTS):
    prompt_key_PKLD, prompt_value_PKLD = prompt
    R, H, T, D = query_RHTD.shape
    P, K, L, _ = prompt_key_PKLD.shape
    G, Q, S = R // P, H // K, key_RKSD.shape[2]
    query = query_RHTD.view(P, G, K, Q, T, D)
    # all completions of a prompt read its keys in one matrix product
    on_prompt = query.transpose(1, 2).reshape(P, K, G * Q * T, D) @ prompt_key_PKLD.transpose(2, 3)
    on_prompt = on_prompt.masked_fill(padding_PL[:, None, None, :], -torch.inf)
    on_prompt = on_prompt.view(P, K, G, Q * T, L).transpose(1, 2)
    on_own = query.reshape(R, K, Q * T, D) @ key_RKSD.transpose(2, 3)
    if ahead_RTS is not None:
        on_own = on_own.view(R, K, Q, T, S).masked_fill(ahead_RTS[:, None, None], -torch.inf)
    on_own = on_own.view(P, G, K, Q * T, S)
    weights = torch.cat([on_prompt, on_own], -1).softmax(
        -1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    from_prompt = weights[..., :L].transpose(1, 2).reshape(P, K, G * Q * T, L) @ prompt_value_PKLD
    from_own = weights[..., L:].reshape(R, K, Q * T, S) @ value_RKSD
    output = from_prompt.view(P, K, G, Q, T, D).transpose(1, 2) + from_own.view(P, G, K, Q, T, D)
    return output.reshape(R, H, T, D).transpose(1, 2)


AttentionInterface.register(NAME, attention)

"""Attention over shared prompts: keys and values of a prompt are held once, however many completions read them.

`SharedPrompt` is handed to a `transformers` model as the keyword argument `shared`; the model passes it on to the attention
function registered here, which keeps the keys and values in it. The same function serves the rollout (one token
a step, appended to buffers) and the update (whole completions, with gradients flowing into the prompt's keys).

One softmax runs over the scores of both parts, so the result is that of plain attention up to rounding; cf. Hydragen
(Juravsky et al. 2024, arXiv:2402.05099), which joins two softmaxes instead.

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

    Right-padded prompts: `lengths_P` are their true lengths in tokens. Verbs: `prefill` (by running the model on the
    prompts), `allot` buffers for a rollout, `append` (by running the model on one token a row), `retire` finished rows.
    """

    def __init__(self, lengths_P: torch.Tensor, padded_length: int):
        self.lengths_P = lengths_P
        self.padding_PL = torch.arange(padded_length, device=lengths_P.device) >= lengths_P[:, None]
        self.prompt: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: keys and values (P, K, L, D)
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: buffers (R, K, room, D)
        self.filled, self.room, self.prefilled = 0, 0, False

    def allot(self, room: int):
        """End the prefill; make room for `room` tokens a row (0: completions come whole, as in the update)."""
        self.prefilled, self.room = True, room

    def append(self, layer: int, key_RK1D: torch.Tensor, value_RK1D: torch.Tensor):
        """Store one token a row; return this layer's keys and values so far, (R, K, filled + 1, D) each."""
        if layer not in self.own:
            R, K, _, D = key_RK1D.shape
            self.own[layer] = (key_RK1D.new_empty(R, K, self.room, D), value_RK1D.new_empty(R, K, self.room, D))
        keys, values = self.own[layer]
        keys[:, :, self.filled] = key_RK1D[:, :, 0]
        values[:, :, self.filled] = value_RK1D[:, :, 0]
        return keys[:, :, :self.filled + 1], values[:, :, :self.filled + 1]

    def retire(self, prompts: torch.Tensor, rows: torch.Tensor):
        """Keep only the prompts and rows of these indices, in this order."""
        self.lengths_P, self.padding_PL = self.lengths_P[prompts], self.padding_PL[prompts]
        self.prompt = {layer: (keys[prompts], values[prompts]) for layer, (keys, values) in self.prompt.items()}
        for layer, buffers in self.own.items():
            kept = tuple(buffer.new_empty(len(rows), *buffer.shape[1:]) for buffer in buffers)
            for new, old in zip(kept, buffers):
                new[:, :, :self.filled] = old[rows, :, :self.filled]
            self.own[layer] = kept


def attention(module, query, key, value, attention_mask, *, scaling, shared: SharedPrompt, sliding_window: int | None = None,
              **_):
    """The attention function of `transformers.AttentionInterface`; returns (output (B, T, H, D), None).

    Raises UserError where the model has a sliding window that the tokens outgrow: it is not applied here.
    """
    layer = module.layer_idx
    length = shared.padding_PL.shape[1] + shared.filled + (query.shape[2] if shared.prefilled else 0)
    if sliding_window and length > sliding_window:
        raise UserError(f"--model: its attention slides over {sliding_window} tokens, and prompt and completion have {length}; "
                        "give fewer --words, or a model with full attention")
    if not shared.prefilled:
        shared.prompt[layer] = (key, value)
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                              enable_gqa=key.shape[1] != query.shape[1])
        return output.transpose(1, 2), None
    causal = None
    if shared.room:
        key, value = shared.append(layer, key, value)
    else:
        T = query.shape[2]
        causal = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1)
    return _two_part_attention(query, shared, layer, key, value, scaling, causal), None


def _two_part_attention(query_RHTD, shared, layer, key_RKSD, value_RKSD, scaling, causal_TS):
    prompt_key_PKLD, prompt_value_PKLD = shared.prompt[layer]
    R, H, T, D = query_RHTD.shape
    P, K, L, _ = prompt_key_PKLD.shape
    G, Q, S = R // P, H // K, key_RKSD.shape[2]
    query = (query_RHTD * scaling).view(P, G, K, Q, T, D)
    # all completions of a prompt read its keys in one matrix product
    on_prompt = query.transpose(1, 2).reshape(P, K, G * Q * T, D) @ prompt_key_PKLD.transpose(2, 3)
    on_prompt = on_prompt.masked_fill(shared.padding_PL[:, None, None, :], -torch.inf)
    on_prompt = on_prompt.view(P, K, G, Q * T, L).transpose(1, 2)
    on_own = query.reshape(R, K, Q * T, D) @ key_RKSD.transpose(2, 3)
    if causal_TS is not None:
        on_own = on_own.view(R, K, Q, T, S).masked_fill(causal_TS, -torch.inf)
    on_own = on_own.view(P, G, K, Q * T, S)
    weights = torch.cat([on_prompt, on_own], -1).softmax(
        -1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    from_prompt = weights[..., :L].transpose(1, 2).reshape(P, K, G * Q * T, L) @ prompt_value_PKLD
    from_own = weights[..., L:].reshape(R, K, Q * T, S) @ value_RKSD
    output = from_prompt.view(P, K, G, Q, T, D).transpose(1, 2) + from_own.view(P, G, K, Q, T, D)
    return output.reshape(R, H, T, D).transpose(1, 2)


AttentionInterface.register(NAME, attention)

"""Two ways to run a model faster than its own forward pass, and the choice between them.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, with prompts shared between completions. A `transformers` model passes the
  keyword argument `shared` on to its attention function, which is registered here.

In both, `shared` computes the attention: a `PrefixCache` in the rollout, a `Packing` in the update.

Some layers keep a state other than keys and values. So each of these paths runs the test sequences
of `grpo.model.check`, both as the rollout and as the update would run them, and the fastest path
whose log-probabilities are the model's own is taken; if there is none, its own forward pass.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.data.errors import UserError, lacks_memory
from grpo.fast.decoder import FastDecoder
from grpo.fast.llama import FastLlama, build_fast_llama
from grpo.fast.merged_linear import gradient_products, has_fast_bf16_matmul
from grpo.fast.packing import Packing
from grpo.model.check import (
    Model,
    Probe,
    cause_of,
    context_of,
    distance,
    is_rounding,
    probe_adapters,
    update_distance,
)
from grpo.model.policy import Batch, PlainForward, Policy
from grpo.model.rows import decoding

ATTENTION_NAME = "grpo_shared_prompt"


# The attention of a rollout, and of a `transformers` model


class PrefixCache:
    """Keys and values, in every layer, of P right-padded prompts and of the rows that follow them.

    `lengths_P` are the true lengths of the prompts, after `allocate` one for each row. Row r
    continues prompt `prompt_R[r]`.

    The rows of a prompt have W slots side by side, so that one matrix product multiplies all of
    them with its keys. `slots` (R * K,) is the slot of each key head of each row. `slot_owner`
    (P * K * W,) is the inverse; empty slots hold an arbitrary head. The bias is -inf at the padding
    of the prompts, else 0, for each of their key heads (P * K, 1, L).
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

        self.next: tuple[Tensor, Tensor | None] | None = None  # the same in all layers of a step

    def allocate(self, rows: int, room: int) -> None:
        """End the prefill: give every prompt the same number of rows, with `room` tokens each."""
        prompts_P = torch.arange(len(self.lengths_P), device=self.lengths_P.device)
        self._assign_slots(prompts_P.repeat_interleave(rows // len(prompts_P)))
        self.lengths_P = self.lengths_P[self.prompt_R]
        self.filled_R = torch.zeros_like(self.prompt_R)
        self.room = room
        self.next = None

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`."""
        assert self.filled_R is not None
        moved_A = (rows_R != torch.arange(len(rows_R), device=rows_R.device)).nonzero()[:, 0]
        lengths_R = self.lengths_P[rows_R] + filled_R
        low, high, self.longest = torch.stack([*filled_R.aminmax(), lengths_R.max()]).tolist()
        self.max_filled = high
        self.is_even = low == high

        if len(moved_A) or len(rows_R) < len(self.filled_R):
            for layer, (keys, values) in self.own.items():
                keys = self._reordered(keys, rows_R, moved_A)
                self.own[layer] = keys, self._reordered(values, rows_R, moved_A)
            self.lengths_P = self.lengths_P[rows_R]

            # Prompts without rows are dropped.
            prompts_P, prompt_R = self.prompt_R[rows_R].unique(return_inverse=True)
            if len(prompts_P) < len(self.padding_PL):
                self.padding_PL = self.padding_PL[prompts_P]
                for layer, (keys, values) in self.prompt.items():
                    self.prompt[layer] = keys[prompts_P], values[prompts_P]
            self._assign_slots(prompt_R)

        self.filled_R = filled_R
        self.next = None

    def _reordered(self, buffer: Tensor, rows_R: Tensor, moved_A: Tensor) -> Tensor:
        """Return a buffer in which the rows `moved_A` have been moved; it grows if it must."""
        moved = buffer[rows_R[moved_A], :, : self.max_filled]
        if len(rows_R) > len(buffer):
            small = buffer
            rows = max(len(rows_R), len(small) * 5 // 4)  # so that it does not grow at each step
            buffer = small.new_zeros(rows, *small.shape[1:])
            buffer[: len(small), :, : self.max_filled] = small[:, :, : self.max_filled]
        buffer[moved_A, :, : self.max_filled] = moved
        return buffer

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
        self.slots = slots_RK.view(-1)
        self.slot_owner = self.slots.new_zeros(P * K * W)
        self.slot_owner[self.slots] = torch.arange(len(self.slots), device=prompt_R.device)

        self.prompt_R = prompt_R
        self.slots_per_prompt = W
        bias_PKL = keys_PKLD.new_zeros(P, K, L).masked_fill_(self.padding_PL[:, None], -torch.inf)
        self.bias = bias_PKL.view(P * K, 1, L)

    @property
    def longest_sequence(self) -> int:
        """The length of the longest sequence with its next token; drafts behind it do not count."""
        return self.longest + (self.filled_R is not None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append keys and values (R, K, T, D); return the attention (R, T, H, D) to all so far.

        The queries are (R, H, T, D). During the prefill the tokens are those of the prompts.
        """
        if self.filled_R is not None:
            own = self._append(layer, key, value)
            _, is_ahead_RTS = self._next(query.shape[2])
            return self._attend_own(layer, query * scale, own, is_ahead_RTS)

        # Contiguous, else each product copies them.
        self.prompt[layer] = key.contiguous(), value.contiguous()
        is_grouped = key.shape[1] != query.shape[1]
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        return output.transpose(1, 2)

    def _append(self, layer: int, key_RKTD: Tensor, value_RKTD: Tensor) -> list[Tensor]:
        """Write keys and values behind those of each row; return all of the rows (R, K, S, D)."""
        R, K, T, D = key_RKTD.shape
        if layer not in self.own:
            shape = R, K, self.room, D
            self.own[layer] = key_RKTD.new_zeros(shape), key_RKTD.new_zeros(shape)

        places_RT, _ = self._next(T)
        own = [buffer[:R, :, : self.max_filled + T] for buffer in self.own[layer]]
        for buffer, new in zip(own, (key_RKTD, value_RKTD)):
            if self.is_even:
                buffer[:, :, -T:] = new
            else:
                rows_R1 = torch.arange(R, device=new.device)[:, None]
                buffer[rows_R1, :, places_RT] = new.transpose(1, 2)
        return own

    def _next(self, T: int) -> tuple[Tensor, Tensor | None]:
        """Return the places of the next T tokens (R, T), and which keys are ahead of each (R, T, S)
        or None if none is. Both are computed once for all layers.
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

    def _attend_own(
        self, layer: int, query_RHTD: Tensor, own: list[Tensor], is_ahead_RTS: Tensor | None
    ) -> Tensor:
        """Return the attention by one softmax over the scores of prompt and own tokens.

        Hydragen (arXiv:2402.05099) merges two softmaxes instead. All products are `bmm`, which a
        host launches with fewer operations than `@`: heads are one dimension, X = R * K.
        """
        R, H, T, D = query_RHTD.shape
        key_RKSD, value_RKSD = own
        K, S = key_RKSD.shape[1:3]
        prompt_key, prompt_value = (x.flatten(0, 1) for x in self.prompt[layer])
        L = prompt_key.shape[1]
        query_XZD = query_RHTD.reshape(R * K, H // K * T, D)

        # Scores: those of the prompt for all rows of a prompt at once.
        slots = torch.baddbmm(self.bias, self._to_slots(query_XZD), prompt_key.transpose(1, 2))
        on_prompt_XZL = self._from_slots(slots)
        on_own_XZS = torch.bmm(query_XZD, key_RKSD.flatten(0, 1).transpose(1, 2))
        if is_ahead_RTS is not None:
            on_own = on_own_XZS.view(R, K, H // K, T, S)
            on_own.masked_fill_(is_ahead_RTS[:, None, None], -torch.inf)

        # One softmax over both parts, in float32 at least.
        wide = torch.float32 if query_RHTD.dtype.itemsize < 4 else query_RHTD.dtype
        weights = torch.cat([on_prompt_XZL, on_own_XZS], -1).softmax(-1, dtype=wide)
        weights = weights.to(query_RHTD.dtype)

        slots = torch.bmm(self._to_slots(weights[..., :L]), prompt_value)
        from_prompt_XZD = self._from_slots(slots)
        output = torch.baddbmm(from_prompt_XZD, weights[..., L:], value_RKSD.flatten(0, 1))
        return output.view(R, H, T, D).transpose(1, 2)

    def _to_slots(self, x_XZA: Tensor) -> Tensor:
        """Return the rows of each prompt side by side (P * K, W * Z, A)."""
        Z, A = x_XZA.shape[1:]
        heads = x_XZA.index_select(0, self.slot_owner)
        return heads.view(-1, self.slots_per_prompt * Z, A)

    def _from_slots(self, x: Tensor) -> Tensor:
        """Return slots (P * K, W * Z, A) as rows (R * K, Z, A)."""
        PK, WZ, A = x.shape
        W = self.slots_per_prompt
        return x.view(PK * W, WZ // W, A).index_select(0, self.slots)


class ReadSequences:
    """What a pass of the update has computed, for prompts that begin as the sequences it read: the
    keys and values in its `packing`, and the hidden states (N, E).
    """

    def __init__(self, packing: Packing, hidden_NE: Tensor):
        self.packing, self.hidden_NE = packing, hidden_NE
        self.sequences = list(packing.sequences())

    def places(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the indices of a prompt's tokens in the row, none if no sequence begins so."""
        length = len(prompt)
        for tokens, places in self.sequences:
            # The last token first: all prompts of a task begin alike.
            if tokens[length - 1 : length] == prompt[-1:] and tokens[:length] == prompt:
                return places[:length]
        return []

    def prefill(self, places: Sequence[Sequence[int]]) -> tuple[Tensor, PrefixCache]:
        """Return the hidden states of the last tokens (P, E) and a cache of prompts at `places`."""
        places_PL, lengths_P = (each.to(self.hidden_NE.device) for each in _padded(places))
        cache = PrefixCache(lengths_P, places_PL.shape[1])
        for layer, (key_KND, value_KND) in (self.packing.keys or {}).items():
            heads_K1 = torch.arange(len(key_KND), device=places_PL.device)[:, None]
            at = heads_K1, places_PL[:, None]
            cache.prompt[layer] = key_KND[at], value_KND[at]
        return self.hidden_NE[places_PL.gather(1, lengths_P[:, None] - 1)[:, 0]], cache


# Arguments that plain causal attention does not need: rotary positions have been applied already.
# Any other that is not None would change the result, as learned sinks (`s_aux`) and soft caps do.
HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions"})


def causal_mask(
    *, local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> int | None:
    """Return the size of a layer's sliding window or chunk, None for full attention, as its mask.

    This is the mask function of `transformers.AttentionMaskInterface`. Not every architecture
    passes its window to its attention function, but each asks here for its mask.
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
    Raises UserError for all that would change it: a mask, dropout, unknown arguments, and a window
    shorter than the longest sequence.
    """
    # A mask that is a number is the window that `causal_mask` returned.
    mask_window = attention_mask if isinstance(attention_mask, int) else None
    if mask_window is None:
        others["attention_mask"] = attention_mask
    others["dropout"] = dropout or None
    unsupported = [
        name for name, value in others.items() if value is not None and name not in HARMLESS
    ]
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unsupported.append("is_causal=False")
    if unsupported:
        raise UserError(
            f"--model: {type(module).__name__} needs {', '.join(sorted(unsupported))}, which "
            "attention over shared prompts does not support"
        )

    length = shared.longest_sequence
    window = min(filter(None, (mask_window, sliding_window)), default=length)
    if length > window:
        raise UserError(
            f"--model: its attention window is {window} tokens, but prompt and completion "
            f"have {length}; give shorter problems, or a model with full attention"
        )

    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return shared.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, causal_mask)


# The two ways


class FastForward(PlainForward):
    """Runs a policy's model by one of the paths: by `llama`, or else by itself."""

    def __init__(self, policy: Policy, llama: FastLlama | None):
        super().__init__(policy)
        self.llama = llama
        self.kept: list[ReadSequences] = []
        self.is_keeping = False

    # The update

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Batch:
        """Return a micro-batch, whose completions share their prompts, on a CPU beginnings too."""
        device = self.policy.device
        return Packing(prompts, completions, device, shares_beginnings=device.type == "cpu")

    def predict(self, batch: Any) -> Tensor:
        """Return the hidden states that predict the distinct tokens of a micro-batch (U, E)."""
        if self.llama:
            self.llama.refresh()
        tokens = len(batch.tokens_N) + sum(len(each.hidden_NE) for each in self.kept)
        keeps = self.is_keeping and tokens <= self.policy.tokens_to_keep
        batch.keys = {} if keeps else None
        hidden_1NE = self.hidden_states(batch.tokens_N[None], batch.positions_N[None], batch)
        if keeps:
            self.kept.append(ReadSequences(batch, hidden_1NE[0]))
        return hidden_1NE[0].index_select(0, batch.predictors_U)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within this context, in which no weight may change, `predict` keeps what it reads. A
        prompt that begins as one of these sequences is not read again by `prefill`.
        """
        self.is_keeping = True
        try:
            yield
        finally:
            self.is_keeping = False
            self.forget()

    def forget(self) -> None:
        """Forget what was kept."""
        self.kept = []

    def checkpoint_gradients(self) -> None:
        """From now on, compute activations again in the backward pass."""
        if self.llama:
            self.llama.gradient_checkpointing = True
        else:
            super().checkpoint_gradients()

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
        """Run each prompt once, unless a pass that was kept has read it.

        Returns the hidden states of the prompts' last tokens (P, E), and the cache to `extend`. A
        prompt is padded to the longest of those in its pass; if it is run, to at most twice its
        length.
        """
        if self.llama:
            self.llama.refresh()

        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self.policy.device)
        cache = PrefixCache(lengths_P, max(map(len, prompts)))
        hidden: dict[int, Tensor] = {}  # of the last token, by prompt
        for part, hidden_PE, own in self._passes(prompts):
            if len(part) == len(prompts):
                return hidden_PE, own
            hidden |= zip(part, hidden_PE)
            for layer, tensors in own.prompt.items():
                if layer not in cache.prompt:
                    _, K, _, D = tensors[0].shape
                    shape = len(prompts), K, cache.longest, D
                    cache.prompt[layer] = tensors[0].new_zeros(shape), tensors[1].new_zeros(shape)
                for whole, of_part in zip(cache.prompt[layer], tensors):
                    whole[part, :, : of_part.shape[2]] = of_part
        return torch.stack([hidden[p] for p in range(len(prompts))]), cache

    def _passes(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[int], Tensor, PrefixCache]]:
        """Yield the numbers of some prompts, in order, and what `prefill` returns for these."""
        new = dict(enumerate(prompts))
        for read in self.kept:
            places = {p: found for p, prompt in new.items() if (found := read.places(prompt))}
            new = {p: prompt for p, prompt in new.items() if p not in places}
            if places:
                yield [*places], *read.prefill([*places.values()])
        for part in _of_like_length(new):
            yield part, *self._together([new[p] for p in part])

    def extend(self, tokens_RT: Tensor, cache: PrefixCache) -> Tensor:
        """Run the model on the next tokens of each row; return their hidden states (R, T, E)."""
        assert cache.filled_R is not None
        offsets_T = torch.arange(tokens_RT.shape[1], device=self.policy.device)
        positions_RT = (cache.lengths_P + cache.filled_R)[:, None] + offsets_T
        # Drafts may reach beyond the context; there they are never accepted.
        return self.hidden_states(tokens_RT, positions_RT.clamp(max=self.policy.context - 1), cache)

    def _together(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, PrefixCache]:
        """Return the same as `prefill`, by one pass over all prompts."""
        device = self.policy.device
        tokens_PL, lengths_P = (each.to(device) for each in _padded(prompts))
        cache = PrefixCache(lengths_P, tokens_PL.shape[1])
        positions_PL = torch.arange(tokens_PL.shape[1], device=device)[None].expand_as(tokens_PL)
        hidden_PLE = self.hidden_states(tokens_PL, positions_PL, cache)
        return hidden_PLE[torch.arange(len(prompts), device=device), lengths_P - 1], cache


def _of_like_length(prompts: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Return which prompts run together, each part in order: no one twice as long as another."""
    parts: list[list[int]] = []
    for p in sorted(prompts, key=lambda p: -len(prompts[p])):
        if not parts or 2 * len(prompts[p]) < len(prompts[parts[-1][0]]):
            parts.append([])
        parts[-1].append(p)
    return [sorted(part) for part in parts]


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the tokens of the prompts (P, L), with zeros on the right, and their lengths (P,)."""
    tokens_PL = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    return tokens_PL, torch.tensor([len(prompt) for prompt in prompts])


# The choice

# The forward passes of a rollout, as (completions, sources, filled, length, accepted): `length` new
# tokens for each of these completions. Row i was row `sources[i]` of the pass before, and
# `filled[i]` of its tokens are cached. The first `accepted[i]` of its new tokens are right.
# Completions diverge, drafts are accepted in part, and completion 2 ends.
ROLLOUT = (
    ((0, 2), (0, 1), (0, 0), 1, (1, 1)),
    ((0, 1, 2, 3), (0, 0, 1, 1), (1, 1, 1, 1), 3, (3, 2, 1, 3)),
    ((0, 1, 2, 3), (0, 1, 2, 3), (4, 3, 2, 4), 2, (2, 2, 2, 1)),
    ((0, 3, 1), (0, 3, 1), (6, 5, 5), 1, (1, 1, 1)),
)


@torch.no_grad()
def accelerate(policy: Policy, may_round: bool = False) -> None:
    """Give `policy` the fastest forward pass that agrees with its model, and the decoder for it.

    If the gradients `may_round`, their float32 products on a CPU may be in bfloat16.
    """
    probe, policy.probe = policy.probe, None
    with probe_adapters(policy.causal):
        forward = _forward(policy, "fast", probe) or _forward(policy, "shared", probe)

    if forward is None:
        with suppress(ValueError):  # a part of the model may support no other attention
            policy.causal.set_attn_implementation(probe.attention)
        return

    policy.path = "fast" if forward.llama else "shared"
    policy.forward = forward
    policy.decoder = FastDecoder(policy)
    policy.limit_context(*context_of(policy.causal.config, supports_windows=False))
    if policy.device.type == "cuda":
        from grpo.fast import update_kernels  # they need Triton, which only comes with CUDA

        policy.kernels = update_kernels
    elif may_round and policy.dtype == torch.float32 and has_fast_bf16_matmul():
        policy.gradient_products = gradient_products
        for layer in forward.llama.linears if forward.llama else ():
            layer.gradient_products = gradient_products


def _forward(policy: Policy, path: str, probe: Probe) -> FastForward | None:
    """Return the forward pass of this path, or None if the model has none that agrees with it."""
    model = policy.causal
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        llama = build_fast_llama(model) if path == "fast" else None
        forward = FastForward(policy, llama)
        is_possible = llama if path == "fast" else attends_once(policy, forward, probe)
        if not is_possible:
            return None

        in_rollout = rollout_distance(policy, forward, probe)
        in_update = update_distance(policy, forward, probe)
        difference = torch.tensor([in_rollout, in_update]).max().item()  # NaN if either is
    except Exception as error:  # an architecture may raise anything: try the next path
        if lacks_memory(error):
            raise
        problem = f"it cannot be run this way ({cause_of(error)})"
    else:
        if is_rounding(policy, difference, probe):
            return forward
        problem = f"its log-probabilities differ from ours by {difference:.1g}"

    if path == "fast":
        warnings.warn(
            f"the fast forward pass disagrees with the model and is not used: {problem}",
            stacklevel=3,
        )
    return None


def attends_once(policy: Policy, forward: FastForward, probe: Probe) -> bool:
    """Return whether each layer calls our attention exactly once, and the model has no convolution.

    A layer with a state of another kind (recurrent, or of a convolution) fails this test. While its
    weights are small, the comparison of log-probabilities can miss it.
    """
    called: list[int] = []
    packing: Any = forward.pack(probe.prompts, probe.completions)
    attend = packing.attend

    def noting(layer: int, *tensors: Any) -> Tensor:
        called.append(layer)
        return attend(layer, *tensors)

    packing.attend = noting
    forward.predict(packing)

    modules = list(policy.inner.modules())
    numbers = (getattr(module, "layer_idx", None) for module in modules)
    layers = {number for number in numbers if isinstance(number, int)}
    has_convolution = any(isinstance(module, nn.Conv1d) for module in modules)
    return sorted(called) == sorted(layers) and not has_convolution


def rollout_distance(policy: Policy, forward: FastForward, probe: Probe) -> float:
    """Return the distance of a rollout's log-probabilities from those expected; see ROLLOUT."""
    expected, device = probe.expected, policy.device
    hidden_PE, cache = forward.prefill(probe.prompts)
    cache.allocate(len(probe.prompts), max(map(len, probe.completions)) + 2)

    # Both completions of a prompt begin with the same token, so the first of each pair will do.
    found = [hidden_PE]
    wanted = [expected[0][0], expected[2][0]]

    with decoding(policy.causal, len(probe.completions)):
        for rows, sources, filled, length, accepted in ROLLOUT:
            cache.reorder(torch.tensor(sources, device=device), torch.tensor(filled, device=device))
            tokens_RT = torch.zeros(len(rows), length, dtype=torch.long)
            for row, (c, begin, count) in enumerate(zip(rows, filled, accepted)):
                tokens_RT[row, :count] = torch.tensor(probe.completions[c][begin : begin + count])
                wanted += expected[c][begin + 1 : begin + 1 + count]

            hidden_RTE = forward.extend(tokens_RT.to(device), cache)
            found += [hidden_RTE[row, :count] for row, count in enumerate(accepted)]

    return distance(policy, policy.logits(torch.cat(found)), torch.stack(wanted))

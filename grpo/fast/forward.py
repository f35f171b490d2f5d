"""Three ways to run a model, called paths; the fastest comes first.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, with prompts shared between completions (`grpo.fast.prefix_cache` in the
  rollout, `grpo.fast.packing` in the update);
- *plain*: the model's over whole sequences, for models that do not pass attention arguments on.

Shapes: P prompts, L tokens of the longest, T of its rest after the common beginning, K key heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.fast.llama import FastLlama
from grpo.fast.packing import Packing, common_length
from grpo.fast.prefix_cache import PrefixCache, SharedAttention
from grpo.model.forward import Batch
from grpo.model.policy import PlainForward, Policy

Path = Literal["fast", "shared", "plain"]

# On a CPU, prompts share their beginning if that saves at least so many tokens, and if the masks of
# their attention have no more scores than this for each head.
MIN_SAVED = 256
MAX_SCORES = 1 << 24


class TokenCache:
    """The tokens of P prompts, and of the rows that follow them: a `PrefixCache` without keys.

    Every token is run again at each step. Before `allocate` a cache remembers nothing that is
    appended. After it each row has a copy of its prompt.
    """

    def __init__(self, lengths_P: Tensor, tokens_PL: Tensor):
        self.lengths_P = lengths_P
        self.tokens_PL = tokens_PL
        self.filled_R: Tensor | None = None
        self.own_RS: Tensor | None = None  # the rows' own tokens

    def allocate(self, rows: int, room: int) -> None:
        """Give every prompt the same number of rows, in order, with `room` tokens each."""
        each = rows // len(self.lengths_P)
        self.lengths_P = self.lengths_P.repeat_interleave(each)
        self.tokens_PL = self.tokens_PL.repeat_interleave(each, 0)
        self.filled_R = self.lengths_P.new_zeros(rows)
        self.own_RS = self.lengths_P.new_zeros(rows, room)

    def append(self, tokens_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens to each row.

        Returns the whole sequences (R, X), padded on the right, and the indices (R, T) of the new
        tokens in them.
        """
        assert self.filled_R is not None and self.own_RS is not None
        offsets_RT = torch.arange(tokens_RT.shape[1], device=tokens_RT.device)
        offsets_RT = offsets_RT + self.filled_R[:, None]
        self.own_RS = self.own_RS.scatter(1, offsets_RT, tokens_RT)
        new_RS = self.own_RS[:, : int(offsets_RT.max()) + 1]

        # Write the rows' tokens over the padding behind each prompt.
        lengths_R1 = self.lengths_P[:, None]
        whole_RX = torch.nn.functional.pad(self.tokens_PL, (0, new_RS.shape[1]))
        indices_RS = lengths_R1 + torch.arange(new_RS.shape[1], device=tokens_RT.device)
        return whole_RX.scatter(1, indices_RS, new_RS), lengths_R1 + offsets_RT

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`."""
        assert self.own_RS is not None
        self.lengths_P, self.tokens_PL = self.lengths_P[rows_R], self.tokens_PL[rows_R]
        self.own_RS, self.filled_R = self.own_RS[rows_R], filled_R


class FastForward(PlainForward):
    """Runs a policy's model by one of the paths, in update and rollout.

    A rollout makes a cache by `prefill`; `cache.allocate` gives each completion a row, `extend`
    appends tokens to all rows, and `cache.reorder` drops, copies and shortens rows. `llama` is the
    forward pass of the fast path.
    """

    def __init__(self, policy: Policy, path: Path, llama: FastLlama | None = None):
        super().__init__(policy)
        self.path = path
        self.llama = llama

    # The update

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Batch:
        """Return a micro-batch, whose completions share their prompts.

        On a CPU they share their beginnings, too.
        """
        if self.path == "plain":
            return super().pack(prompts, completions)
        device = self.policy.device
        return Packing(prompts, completions, device, shares_beginnings=device.type == "cpu")

    def predict(self, batch: Any) -> Tensor:
        """Return the hidden states that predict the distinct tokens of a micro-batch (U, E)."""
        if self.path == "plain":
            return super().predict(batch)
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

    def hidden_states(
        self, tokens_BT: Tensor, position_ids: Tensor, shared: SharedAttention
    ) -> Tensor:
        """Return the last hidden states (B, T, E), scaled so that `head` gives the model's logits.

        `shared` computes the attention.
        """
        if self.llama:
            return self.llama(tokens_BT, position_ids, shared)
        policy = self.policy
        output = policy.inner(
            input_ids=tokens_BT, use_cache=False, position_ids=position_ids, shared=shared
        )
        hidden = output.last_hidden_state
        return hidden if policy.logit_scale == 1.0 else policy.logit_scale * hidden

    # The rollout

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Any]:
        """Run each prompt once; on a CPU, what all of them begin with only once.

        Returns the hidden states of the prompts' last tokens (P, E), and the cache to `extend`.
        """
        if self.llama:
            self.llama.refresh()

        if self.policy.device.type == "cpu" and self.path != "plain":
            common = common_beginning(prompts)
            longest = max(map(len, prompts))
            saved = common * (len(prompts) - 1)
            scores = len(prompts) * (longest - common) * longest
            if saved >= MIN_SAVED and scores <= MAX_SCORES:
                return self._after_beginning(prompts, common)
        return self._whole(prompts)

    def extend(self, tokens_RT: Tensor, cache: Any) -> Tensor:
        """Run the model on the next tokens of each row; return their hidden states (R, T, E).

        Drafts may reach beyond the context; there they are never accepted.
        """
        last = self.policy.context - 1
        if isinstance(cache, TokenCache):
            whole_RX, indices_RT = cache.append(tokens_RT)
            hidden_RXE = self.policy.hidden_states(whole_RX[:, : last + 1])
            indices_RT = indices_RT.clamp(max=hidden_RXE.shape[1] - 1)
            return hidden_RXE.gather(1, indices_RT[:, :, None].expand(-1, -1, hidden_RXE.shape[2]))

        offsets_T = torch.arange(tokens_RT.shape[1], device=self.policy.device)
        positions_RT = (cache.lengths_P + cache.filled_R)[:, None] + offsets_T
        return self.hidden_states(tokens_RT, positions_RT.clamp(max=last), cache)

    def _whole(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Any]:
        """Run each prompt from its first token to its last; return the same as `prefill`."""
        device = self.policy.device
        tokens, lengths = _padded(prompts)
        tokens_PL, lengths_P = tokens.to(device), lengths.to(device)
        P, L = tokens_PL.shape

        cache: TokenCache | PrefixCache
        if self.path == "plain":
            cache = TokenCache(lengths_P, tokens_PL)
            hidden_PLE = self.policy.hidden_states(tokens_PL)
        else:
            cache = PrefixCache(lengths_P, L)
            positions_PL = torch.arange(L, device=device)[None].expand_as(tokens_PL)
            hidden_PLE = self.hidden_states(tokens_PL, positions_PL, cache)
        return hidden_PLE[torch.arange(P, device=device), lengths_P - 1], cache

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

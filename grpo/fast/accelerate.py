"""Two ways to run a model faster than its own forward pass, and the choice between them.

- *fast*: our own forward pass (`grpo.fast.llama`);
- *shared*: the model's, with prompts shared between completions (`grpo.fast.prefix_cache` in the
  rollout, `grpo.fast.packing` in the update).

Some layers keep a state other than keys and values, and some attention functions take arguments
that change the result. So each of these paths runs the test sequences of `grpo.model.check`, both
as the rollout and as the update would run them, and the fastest path whose log-probabilities are
the model's own is taken; if there is none, the model's own forward pass.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo.fast.decoder import FastDecoder
from grpo.fast.llama import FastLlama, build_fast_llama
from grpo.fast.merged_linear import gradient_products, has_fast_bf16_matmul
from grpo.fast.packing import Packing, common_length
from grpo.fast.prefix_cache import ATTENTION_NAME, PrefixCache
from grpo.model.check import (
    Probe,
    cause_of,
    context_of,
    distance,
    has_low_precision,
    is_rounding,
    logprobs_of,
    probe_adapters,
    update_distance,
)
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


# The choice

# The forward passes of a rollout, as (completions, sources, filled, length, accepted): `length` new
# tokens for each of these completions. Row i was row `sources[i]` of the pass before, and
# `filled[i]` of its tokens are cached. The first `accepted[i]` of its new tokens are right; the
# others are rejected drafts. At first each prompt has one row. Then its completions diverge, drafts
# are accepted in part, and completion 2 ends, so that its row is dropped.
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
    own_attention = policy.causal.config._attn_implementation
    probe, policy.probe = policy.probe, None
    with probe_adapters(policy.causal):
        forward = _forward(policy, "fast", probe) or _forward(policy, "shared", probe)

    if forward is None:
        with suppress(ValueError):  # a part of the model may support no other attention
            policy.causal.set_attn_implementation(own_attention)
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
        if path == "fast" and llama is None:
            return None
        forward = FastForward(policy, llama)
        if path == "shared" and not attends_once(policy, forward, probe):
            return None

        in_rollout = rollout_distance(policy, forward, probe)
        in_update = update_distance(policy, forward, probe)
        difference = torch.tensor([in_rollout, in_update]).max().item()  # NaN if either is
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an architecture may raise anything: try the next path
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

    for rows, sources, filled, length, accepted in ROLLOUT:
        cache.reorder(torch.tensor(sources, device=device), torch.tensor(filled, device=device))
        tokens_RT = torch.zeros(len(rows), length, dtype=torch.long)
        for row, (c, begin, count) in enumerate(zip(rows, filled, accepted)):
            tokens_RT[row, :count] = torch.tensor(probe.completions[c][begin : begin + count])
            wanted += expected[c][begin + 1 : begin + 1 + count]

        hidden_RTE = forward.extend(tokens_RT.to(device), cache)
        found += [hidden_RTE[row, :count] for row, count in enumerate(accepted)]

    logprobs = logprobs_of(policy.logits(torch.cat(found)))
    return distance(logprobs, torch.stack(wanted), has_low_precision(policy.causal))

"""How a rollout reads its rows: every token again, or one token a step with the model's own cache.

Rows are the completions that are being written, C of them; those that end are dropped. `logits`
(C, V) are those of their next tokens.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from grpo.data.errors import lacks_memory
from grpo.model.check import Model, Probe, distance, is_rounding, own_rounding, probe_adapters

GROUPED_IS_FASTER = ("cpu",)  # devices

# The most rows whose experts multiply by token. On an H200, in the shapes of gpt-oss-20b and of
# Qwen3-30B-A3B, four layers: 8.1 and 7.7 ms a token with 8 rows (grouped 13.2 and 9.1), but 116 and
# 45 ms with 256 (8.8 and 9.3), and 48 and 18 GiB more, because each row copies its experts.
FEW_ROWS = 8


@contextmanager
def decoding(model: Model, rows: int) -> Iterator[None]:
    """Within this context, on a GPU, experts of a few rows multiply as in `generate` of
    `transformers`: a product for each token, not for each expert ("grouped_mm").
    """
    before = model.get_experts_implementation()
    is_few = rows <= FEW_ROWS and model.device.type not in GROUPED_IS_FASTER
    is_changed = is_few and "grouped_mm" in before.values()
    if is_changed:
        by_token = {
            name: "batched_mm" if way == "grouped_mm" else way for name, way in before.items()
        }
        model.set_experts_implementation(by_token)
    try:
        yield
    finally:
        if is_changed:
            model.set_experts_implementation(before)


class PlainRows:
    """Rows that are read from their first token at each step."""

    needs_one_length = False  # of the prompts
    decoding = nullcontext  # its inputs are long
    logits: Tensor

    def __init__(self, policy: Any, prompts: Sequence[tuple[int, ...]], group_size: int):
        self.policy = policy
        self.rows = [torch.tensor(prompt) for prompt in prompts for _ in range(group_size)]
        self._read()

    def go_on(self, stay: Tensor, tokens: Tensor) -> None:
        """Keep only the rows `stay`, and append a token to each of them."""
        self.rows = [
            torch.cat([self.rows[row], token]) for row, token in zip(stay, tokens[:, None])
        ]
        self._read()

    def _read(self) -> None:
        ends_C = torch.tensor([len(row) - 1 for row in self.rows])
        tokens_CX = pad_sequence(self.rows, batch_first=True).to(self.policy.device)
        hidden_CXE = self.policy.hidden_states(tokens_CX)
        self.logits = self.policy.logits(hidden_CXE[torch.arange(len(ends_C)), ends_C, None])[:, 0]


class CachedRows:
    """Rows whose tokens are in the model's own cache. Each prompt is read once for its group.

    The model prepares its inputs as it does for `generate`. Shorter prompts are padded on the left.
    """

    needs_one_length = False
    logits: Tensor

    def __init__(self, policy: Any, prompts: Sequence[tuple[int, ...]], group_size: int):
        self.model, self.device = policy.causal, policy.device
        longest = max(map(len, prompts))
        lengths_P = torch.tensor([len(prompt) for prompt in prompts])
        mask_PL = (torch.arange(longest) >= longest - lengths_P[:, None]).long()
        # The padding is an ordinary token: a model that does not ignore it shall fail the check.
        tokens = [prompt[:1] * (longest - len(prompt)) + prompt for prompt in prompts]

        self.inputs: dict[str, Any] = {"input_ids": torch.tensor(tokens)}
        taken = inspect.signature(self.model.forward).parameters
        if "position_ids" in taken:
            self.inputs["position_ids"] = (mask_PL.cumsum(1) - 1).clamp(min=0)
        if not mask_PL.all():
            self.inputs["attention_mask"] = mask_PL
        self.inputs = {name: tensor.to(self.device) for name, tensor in self.inputs.items()}
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

        self._read(is_first_iteration=True)
        prompt_C = torch.arange(len(prompts), device=self.device).repeat_interleave(group_size)
        self.inputs = _rows_of(self.inputs, prompt_C)
        self.logits = self.logits[prompt_C]

    def decoding(self) -> AbstractContextManager[None]:
        """Return the context for `go_on`."""
        return decoding(self.model, len(self.logits))

    def go_on(self, stay: Tensor, tokens: Tensor) -> None:
        """Keep only the rows `stay`, and append a token to each of them."""
        if len(stay) < len(self.logits):
            self.inputs = _rows_of(self.inputs, stay.to(self.device))

        self.inputs["input_ids"] = tokens[:, None].to(self.device)
        if (positions := self.inputs.get("position_ids")) is not None:
            self.inputs["position_ids"] = positions[:, -1:] + 1
        if (mask := self.inputs.get("attention_mask")) is not None:
            self.inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        self._read()

    def _read(self, is_first_iteration: bool = False) -> None:
        prepared = self.model.prepare_inputs_for_generation(
            **self.inputs, **self.options, use_cache=True, is_first_iteration=is_first_iteration
        )
        output = self.model(**prepared)
        self.logits = output.logits[:, -1]
        # The names of the cache in attention, state-space models and RWKV.
        names = ("past_key_values", "cache_params", "state")
        found = {name: output[name] for name in names if name in output}
        if not found:
            raise NotImplementedError("the model has no cache")
        self.inputs |= found


class CachedRowsOfOneLength(CachedRows):
    """The same for a model that does not ignore padding on the left."""

    needs_one_length = True


def _rows_of(state: Any, rows: Tensor) -> Any:
    """Return these rows of all tensors in a cache, or in a part of one, which changes in place.

    `Cache.reorder_cache` forgets what some architectures keep beside keys, values and states.
    """
    if isinstance(state, Tensor):
        return state.index_select(0, rows) if state.ndim and len(state) else state
    if isinstance(state, dict):
        return {name: _rows_of(value, rows) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([_rows_of(value, rows) for value in state])
    if isinstance(state, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)):
        vars(state).update(_rows_of(vars(state), rows))
    return state


# Padding may make the distance from the model's log-probabilities this many times as large as
# rounding does. Otherwise it is not rounding alone, even if it is small because the weights are.
MORE_ROUNDING = 10


@torch.no_grad()
def use_own_cache(policy: Any, probe: Probe) -> None:
    """Let rollouts of the `policy` use its model's cache, if they then agree with the model."""
    with probe_adapters(policy.causal):
        alone = rows_distance(policy, CachedRowsOfOneLength, probe)
        if not is_rounding(policy, alone, probe):
            return
        policy.rows, policy.path = CachedRowsOfOneLength, "cached"
        padded = rows_distance(policy, CachedRows, probe)

        # Rows of one length may round as the model itself does, which then says nothing of padding,
        # and no log-probability is more precise than float32 numbers as large as log V.
        spacing = torch.finfo(torch.float32).eps * math.log(policy.vocabulary)
        rounding = max(alone, own_rounding(policy, probe), spacing)
        is_as_good = is_rounding(policy, padded, probe) and padded <= MORE_ROUNDING * rounding

    # Blocks of tokens that are counted from the padding on may be longer than the probe.
    kinds = getattr(policy.causal.config.get_text_config(decoder=True), "layer_types", None) or ()
    if is_as_good and not any("compressed" in kind for kind in kinds):
        policy.rows = CachedRows


def rows_distance(policy: Any, kind: type[CachedRows], probe: Probe) -> float:
    """Return the larger distance, of the two prompts' completions, from what is expected as the
    rows of a rollout grow; NaN if the model cannot be run this way.
    """
    try:
        found = _found(policy, kind, probe)
    except Exception as error:  # an architecture may raise anything, or have no cache
        if lacks_memory(error):
            raise
        return math.nan

    # Each prompt by itself: a distance in low precision is that of the median token.
    distances = [
        distance(policy, torch.stack(found[c] + found[c + 1]), torch.cat(probe.expected[c : c + 2]))
        for c in (0, 2)
    ]
    return torch.tensor(distances).max().item()  # NaN if either is


def _found(policy: Any, kind: type[CachedRows], probe: Probe) -> list[list[Tensor]]:
    """Return the logits that predict the tokens of each completion of the probe, and its end."""
    found: list[list[Tensor]] = [[] for _ in probe.completions]
    for live in ([0, 1], [2, 3]) if kind.needs_one_length else ([0, 1, 2, 3],):
        rows, place = kind(policy, [probe.prompts[c // 2] for c in live[::2]], 2), 0
        with rows.decoding():
            while live:
                for c, logits in zip(live, rows.logits, strict=True):
                    found[c].append(logits)
                stay = [row for row, c in enumerate(live) if place < len(probe.completions[c])]
                live = [live[row] for row in stay]
                if live:
                    tokens = torch.tensor([probe.completions[c][place] for c in live])
                    rows.go_on(torch.tensor(stay), tokens)
                place += 1
    return found

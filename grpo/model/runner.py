"""The interface of what runs a model by one of its forward paths."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from grpo.model.interfaces import Model, RolloutCache, SharedAttention
from grpo.model.llama import FastLlama
from grpo.model.packed_attention import Packing, PaddedBatch

# The ways to run a model, see `model.check`.
ForwardPath = Literal["fast", "shared", "plain"]


class Runner(Protocol):
    """Runs a model, as `grpo.model.policy.Policy` does.

    `model.check.choose_path` sets its `path`, `fast_model` and `logit_scale`.
    """

    name: str
    path: ForwardPath
    fast_model: FastLlama | None
    logit_scale: float

    @property
    def causal(self) -> Model:
        """The model without its adapters' wrapper."""

    @property
    def inner(self) -> Model:
        """The model without its output layer."""

    @property
    def head(self) -> nn.Module:
        """The output layer."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RolloutCache]:
        """Run the prompts; return the hidden states of their last tokens, and their cache."""

    def extend(self, tokens_RT: Tensor, cache: RolloutCache) -> Tensor:
        """Run the next tokens of each row; return their hidden states."""

    def hidden_states(
        self,
        tokens_BT: Tensor,
        position_ids: Tensor | None = None,
        shared: SharedAttention | None = None,
    ) -> Tensor:
        """Run the model; return its last hidden states (B, T, E)."""

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Packing | PaddedBatch:
        """Return a micro-batch."""

    def predict(self, packing: Packing | PaddedBatch) -> Tensor:
        """Run a micro-batch; return the hidden states that predict its completions' tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""

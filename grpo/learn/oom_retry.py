"""Repeat updates that run out of GPU memory with less memory and the same gradient."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from data.errors import UserError
from grpo.learn.optimizer import Optimizer
from grpo.model.policy import Policy
from grpo.records import Group


class OomRetry:
    """Runs updates, and remembers the settings that fit the GPU's memory.

    When an update runs out of memory, the micro-batches are halved until each holds a single
    completion. After that, the decoder's memory is freed before each update, and then gradient
    checkpointing is enabled, with which larger micro-batches may fit. Later updates keep these
    settings.

    `chosen` is the user's largest micro-batch in tokens, None if there is none.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer, chosen: int | None):
        self.policy = policy
        self.optimizer = optimizer
        self.chosen = chosen
        self.micro_tokens = chosen or policy.tokens_at_once  # most tokens of a micro-batch
        self.frees_decoder = False
        self.notes: list[str] = []  # lines for the console

    def run(
        self, update: Callable[[int], dict[str, Any]], groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return the result of `update(micro_tokens)`, an update on `groups`.

        Raises UserError if a single completion does not fit with gradient checkpointing, and if
        memory runs out on one of several ranks when they have begun to exchange their gradients:
        the others would not repeat the update.
        """
        if self.frees_decoder:
            self.policy.free_decoder()
        while True:
            with suppress(torch.OutOfMemoryError):
                return update(self.micro_tokens)

            if self.optimizer.has_exchanged:
                raise UserError(
                    "out of memory while the ranks exchanged their gradients or took the step; "
                    "continue with --resume and --shard, or with a lower level"
                )

            # Not while the error is handled: it keeps the tensors of the failed update.
            self.optimizer.clear()
            torch.cuda.empty_cache()
            self._save_memory(
                max(
                    len(group.prompt) + len(completion.tokens)
                    for group in groups
                    for completion in group.completions
                )
            )

    def _save_memory(self, longest: int) -> None:
        """Choose settings that take less memory; the longest completion has `longest` tokens.

        That length includes its prompt. Raises UserError if there are none.
        """
        if self.micro_tokens > longest:
            self.micro_tokens = max(longest, self.micro_tokens // 2)
            change = f"micro-batches of {self.micro_tokens:,} tokens"
        elif not self.frees_decoder and self.policy.free_decoder():
            self.frees_decoder = True
            change = "the sampler's memory is freed before each update"
        elif not self.policy.gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
            self.micro_tokens = max(longest, self.chosen or self.policy.tokens_at_once)
            change = f"gradient checkpointing, and micro-batches of {self.micro_tokens:,} tokens"
        else:
            raise UserError(
                f"out of memory in the update of a single completion of {longest} tokens; "
                "give a smaller model, a lower level, or --lora-rank 16"
            )
        self.notes.append(f"out of memory: {change} from now on (the gradient stays the same)")

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes

"""Repeat updates that run out of GPU memory with less memory and the same gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.learn.optimizer import Optimizer
from grpo.model.policy import Policy
from grpo.records import Group
from tasks.base import UserError


class OomRetry:
    """Runs updates, and remembers the settings that fit the GPU's memory.

    When an update runs out of memory, the micro-batches are halved until each holds a single
    completion. After that, gradient checkpointing is enabled. Later updates keep these settings.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer, micro_tokens: int):
        self.policy = policy
        self.optimizer = optimizer
        self.micro_tokens = micro_tokens  # most tokens of a micro-batch
        self.notes: list[str] = []  # lines for the console

    def run(
        self, update: Callable[[int], dict[str, Any]], groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return the result of `update(micro_tokens)`, an update on `groups`.

        Raises UserError if a single completion does not fit with gradient checkpointing.
        """
        while True:
            try:
                return update(self.micro_tokens)
            except torch.OutOfMemoryError as error:
                longest = max(
                    len(group.prompt) + len(completion.tokens)
                    for group in groups
                    for completion in group.completions
                )
                if self.micro_tokens <= longest and self.policy.gradient_checkpointing:
                    raise UserError(
                        f"out of memory in the update of a single completion of {longest} tokens; "
                        "give a smaller model, a lower level, or --lora-rank 16"
                    ) from error

            # Not in the except block: there the exception keeps the tensors of the failed update.
            self.optimizer.clear()
            torch.cuda.empty_cache()
            self._save_memory(longest)

    def _save_memory(self, longest: int) -> None:
        """Halve the micro-batches, or enable gradient checkpointing if they are minimal.

        They are minimal if each holds one completion of up to `longest` tokens.
        """
        if self.micro_tokens > longest:
            self.micro_tokens = max(longest, self.micro_tokens // 2)
            self.notes.append(
                f"out of memory: micro-batches of {self.micro_tokens:,} tokens from now on "
                "(the gradient stays the same)"
            )
        else:
            self.policy.enable_gradient_checkpointing()
            self.notes.append(
                "out of memory: gradient checkpointing from now on (the gradient stays the same)"
            )

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes

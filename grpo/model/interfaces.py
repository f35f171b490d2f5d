"""The interfaces between a model, its attention and the caches of a rollout."""

from typing import Any, Protocol

from torch import Tensor

# `transformers` and `peft` resolve most attributes of a model at run time, so a type checker knows
# hardly any of them.
Model = Any


class SharedAttention(Protocol):
    """Attention in which the completions of a prompt share its keys and values.

    The model hands it to each attention layer as the keyword argument `shared`. A rollout uses a
    `PrefixCache`, an update a `Packing`.
    """

    @property
    def longest_sequence(self) -> int:
        """The length of the longest sequence, in tokens that are kept."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention (B, T, H, D) of queries (B, H, T, D) to what each may see.

        `key` and `value` (B, K, T, D) belong to the same tokens as the queries.
        """


class RolloutCache(Protocol):
    """What a rollout keeps of its prompts and of the tokens that follow them.

    The life of a cache: `Policy.prefill` makes it, `allocate` gives each completion a row,
    `Policy.extend` appends tokens to all rows, and `reorder` drops, copies and shortens rows.
    `PrefixCache` keeps keys and values; `FallbackCache` keeps only the tokens.
    """

    # Tokens of each prompt; after `allocate`, of the prompt of each row.
    lengths_P: Tensor  # noqa: N815  (a shape suffix)

    # Valid tokens of each row; None before `allocate`.
    filled_R: Tensor | None  # noqa: N815  (a shape suffix)

    def allocate(self, rows: int, room: int) -> None:
        """Give every prompt the same number of rows, in order, with `room` tokens each."""

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`."""

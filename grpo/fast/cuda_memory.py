"""The memory of the decode step on a GPU: caches, the state of each row, and what rows write.

It is allocated once and stays where it is, because captured CUDA graphs refer to its addresses.

Shapes: P prompts, R rows, K key heads, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo.fast.llama import FastLlama
from grpo.fast.speculative import LENGTHS

# How many rows a captured step has: the smallest of these that suffices.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

WIDTH = LENGTHS[-1] + 1  # the most tokens of a row in one pass
MAX_TOKENS = 8192  # of a pass with drafts: their logits over a vocabulary of 128,000 take 2 GB


def bucket(rows: int) -> int:
    """Return how many rows a captured step has that is used for `rows` rows."""
    for size in BUCKETS:
        if size >= rows:
            return size
    return -(-rows // BUCKETS[-1]) * BUCKETS[-1]


@dataclass(frozen=True)
class Capacity:
    """How much room there is, e.g. ``Capacity(rows=256, prompts=16, prompt_room=128,
    row_room=192)``: `prompt_room` and `row_room` in tokens of a prompt and of a row.
    """

    rows: int
    prompts: int
    prompt_room: int
    row_room: int

    @classmethod
    def rounded(cls, rows: int, prompts: int, prompt_room: int, row_room: int) -> "Capacity":
        """Return a capacity that suffices for these, rounded up so that it can be used again."""
        return cls(bucket(rows), prompts, -(-prompt_room // 128) * 128, -(-row_room // 64) * 64)

    def suits(self, wanted: "Capacity") -> bool:
        """Return whether memory of this capacity is enough for `wanted`, and not far too much."""
        is_enough = (
            self.rows >= wanted.rows
            and self.prompts >= wanted.prompts
            and self.prompt_room >= wanted.prompt_room
            and self.row_room >= wanted.row_room
        )
        return is_enough and self.rows * self.row_room <= 4 * wanted.rows * wanted.row_room


@dataclass
class RowState:
    """What is known of each row on the device, (R,) each.

    `slot` is the row's place in cache and outputs, `budget` the most tokens it may write, `written`
    how many it has written, `live` 1 until it is finished, `start` the length of its prompt, `key`
    its sample key.
    """

    slot: Tensor
    budget: Tensor
    written: Tensor
    live: Tensor
    start: Tensor
    key: Tensor
    temperature: Tensor

    @classmethod
    def zeros(cls, rows: int, device: torch.device) -> "RowState":
        """Return a state of `rows` rows, none of them live."""
        dtypes = {"temperature": torch.float32}
        return cls(
            **{
                field.name: torch.zeros(
                    rows, dtype=dtypes.get(field.name, torch.int64), device=device
                )
                for field in fields(cls)
            }
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


class DecodeMemory:
    """The buffers of a decode step; see the attributes' comments for their shapes."""

    def __init__(self, fast: FastLlama, capacity: Capacity, device: torch.device):
        self.capacity = capacity
        rows, prompts = capacity.rows, capacity.prompts
        prompt_room, row_room = capacity.prompt_room, capacity.row_room
        dtype = fast.embedding.weight.dtype
        blocks = len(fast.blocks)

        # Keys and values (2) of each layer.
        self.row_cache = torch.zeros(
            blocks, 2, rows, fast.K, row_room, fast.D, dtype=dtype, device=device
        )
        self.prompt_cache = torch.zeros(
            blocks, 2, prompts, fast.K, prompt_room, fast.D, dtype=dtype, device=device
        )
        self.prompt_lengths = torch.zeros(prompts, dtype=torch.int32, device=device)

        # The angles of every position (positions, D / 2).
        positions = torch.arange(prompt_room + row_room, device=device)[None]
        cos, sin = fast.rotary(fast.embedding.weight[:1], positions)
        self.cos = cos[0, :, : fast.D // 2].contiguous()
        self.sin = sin[0, :, : fast.D // 2].contiguous()

        # The tokens to be fed (R, WIDTH): the last one written, then the drafted ones.
        self.state = RowState.zeros(rows, device)
        self.feed = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)

        # Tiles, i.e. neighbouring tokens that share a prompt: its number, their first token, how
        # many they are (3, tiles).
        self.tiles = torch.zeros(3, max(rows, MAX_TOKENS), dtype=torch.int32, device=device)

        # What has been written, by slot (R, row_room).
        self.out_tokens = torch.zeros(rows, row_room, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(rows, row_room, dtype=torch.float32, device=device)

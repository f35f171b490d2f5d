"""What a decoder is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeRequest:
    """A rollout: C completions, the same number for each of P prompts, in the order of the prompts.

    - `keys`, `temperatures`, `budgets` (C,), on the CPU: sample keys, temperatures (0 is greedy),
      and the most new tokens;
    - `truncate`: cuts the distribution, see `sampling.truncation`;
    - `room`: the most tokens of a completion in memory, including rejected drafts.
    """

    prompts: Sequence[tuple[int, ...]]
    keys: Tensor
    temperatures: Tensor
    budgets: Tensor
    truncate: Callable | None
    room: int

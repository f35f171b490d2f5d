"""What a decoder is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeRequest:
    """One rollout: the same number of completions of each of P prompts, C in all, in order.

    `keys` are sample keys, `temperatures` 0 for greedy, `budgets` the most new tokens: (C,) each,
    on the CPU. `truncate` cuts the distribution (`sampling.truncation`). `room` is how many tokens
    a completion takes at most in memory, rejected drafts included.
    """

    prompts: Sequence[tuple[int, ...]]
    keys: Tensor
    temperatures: Tensor
    budgets: Tensor
    truncate: Callable | None
    room: int

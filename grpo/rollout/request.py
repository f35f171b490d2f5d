"""What a rollout, and a decoder, are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

# A guess takes the text so far and returns how it may continue. Each completion has its own copy,
# so a guess may remember what it has seen.
Guess = Callable[[str], str]


@dataclass(frozen=True)
class RolloutRequest:
    """P prompts to be answered, with the same number G of completions each.

    E.g. two greedy completions of a prompt: ``RolloutRequest([(5, 8)], [[1, 2]], [0.0], [32])``.

    - `prompts` (P,): token ids;
    - `keys` (P, G): 64-bit sample keys, see `sampling.sample_key`;
    - `temperatures` (P,): one for all completions of a prompt; 0 is greedy;
    - `budgets` (P,): the most new tokens of a completion;
    - `truncate`: cuts the distribution, see `sampling.truncation`;
    - `guesses` (P,): what speculative decoding drafts from; None for no drafts.
    """

    prompts: Sequence[tuple[int, ...]]
    keys: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    budgets: Sequence[int]
    truncate: Callable | None = None
    guesses: Sequence[Guess] | None = None

    @property
    def group_size(self) -> int:
        """The number of completions of each prompt, G."""
        return len(self.keys[0])

    def of(self, prompts: slice) -> "RolloutRequest":
        """Return the request for some of the prompts."""
        return replace(
            self,
            prompts=self.prompts[prompts],
            keys=self.keys[prompts],
            temperatures=self.temperatures[prompts],
            budgets=self.budgets[prompts],
            guesses=self.guesses[prompts] if self.guesses else None,
        )


@dataclass(frozen=True)
class DecodeRequest:
    """What a decoder writes: C completions, the same number for each of P prompts, in their order.

    E.g. two completions of a prompt: ``DecodeRequest([(5, 8)], keys=tensor([1, 2]),
    temperatures=tensor([1.0, 1.0]), budgets=tensor([32, 32]), truncate=None, room=64)``.

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

"""The short sequences with which `model.check` compares two forward passes of a model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Probe:
    """Token ids of the test sequences.

    There are two prompts of different lengths. Each has two completions that begin with the same
    token.
    """

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]

    def sequence(self, c: int) -> tuple[int, ...]:
        """Return the token ids of completion `c` and its prompt."""
        return self.prompts[c // 2] + self.completions[c]


@dataclass(frozen=True)
class RolloutStep:
    """One forward pass of the rollout: `length` new tokens for each of the completions `rows`.

    Row i was row `sources[i]` of the previous step, and `filled[i]` of its tokens are cached. The
    first `accepted[i]` of its new tokens are right; the others are rejected drafts.
    """

    rows: tuple[int, ...]
    sources: tuple[int, ...]
    filled: tuple[int, ...]
    length: int
    accepted: tuple[int, ...]


# At first each prompt has one row. Then its completions diverge, drafts are accepted in part, and
# completion 2 ends, so that its row is dropped.
ROLLOUT = (
    RolloutStep(rows=(0, 2), sources=(0, 1), filled=(0, 0), length=1, accepted=(1, 1)),
    RolloutStep(
        rows=(0, 1, 2, 3),
        sources=(0, 0, 1, 1),
        filled=(1, 1, 1, 1),
        length=3,
        accepted=(3, 2, 1, 3),
    ),
    RolloutStep(
        rows=(0, 1, 2, 3),
        sources=(0, 1, 2, 3),
        filled=(4, 3, 2, 4),
        length=2,
        accepted=(2, 2, 2, 1),
    ),
    RolloutStep(rows=(0, 3, 1), sources=(0, 3, 1), filled=(6, 5, 5), length=1, accepted=(1, 1, 1)),
)


def probe_of(vocabulary: int) -> Probe:
    """Return the probe for a vocabulary of this size: random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(25)

    def random_tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    prompts = (random_tokens(11), random_tokens(6))
    completions = []
    for lengths in ((8, 6), (4, 7)):
        first = random_tokens(1)
        completions += [first + random_tokens(length - 1) for length in lengths]
    return Probe(prompts, tuple(completions))

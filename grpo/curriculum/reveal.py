"""Reveal: the completion begins with a part of the right answer, given and not sampled.

Where a policy never earns anything, all completions of a group earn the same and there is no
gradient. With most of the answer given, the rest is short enough to be right sometimes. As the
policy succeeds, less is given, down to nothing: a reverse curriculum (arXiv:2402.05808) whose share
follows success (AdaBack, arXiv:2506.18110).

Departures: AdaBack keeps a share for each problem, but our problems are new in every step, so there
is one state for each level. The share of each group is uniform between nothing and that bound: a
policy that only ever saw one remaining word learned to write that word and stop. A quarter of the
groups are given nothing; they alone count as the policy's score.
"""

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from grpo.model.policy import Policy
from grpo.records import Completion, Group
from grpo.rollout.generate import Guess
from tasks.base import is_right, key_of

ALONE = 0.25  # share of the groups that are given nothing
SUCCESS = 0.5  # share of exact answers among revealed groups at which the bound stays as it is
RATE = 0.1  # how fast the bound follows success
OVER = 0.05  # below this bound nothing is given any more


@dataclass
class Reveal:
    """How much of the right answer is given at each level. `bounds` has the largest share by level; 1 where it is new."""

    bounds: dict[int, float]

    def share(self, seed: int, step: int, index: int, level: int) -> float:
        """Return the share of the target that problem `index` of a step reveals: a pure function of the arguments and the state."""
        rng = random.Random(key_of("reveal", seed, step, index))
        is_alone, share = rng.random() < ALONE, rng.random()
        return 0.0 if is_alone else share * self.bounds.get(level, 1.0)

    def observe(self, groups: Sequence[Group]):
        """Move the bound of each level by the success of its revealed groups (first tries)."""
        exact: dict[int, list[float]] = {}
        for group in groups:
            if group.attempt == 0 and group.revealed:
                exact.setdefault(group.problem.level, []).append(fmean(map(is_right, group.scores)))

        for level, shares in exact.items():
            bound = self.bounds.get(level, 1.0) - RATE * (fmean(shares) - SUCCESS)
            self.bounds[level] = min(bound, 1.0) if bound >= OVER else 0.0

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the bound, and how the step's revealed groups did."""
        revealed = [is_right(score) for group in groups if group.revealed for score in group.scores]
        return {
            "reveal/bound": max(self.bounds.values(), default=1.0),
            "reveal/groups": sum(bool(group.revealed) for group in groups),
            **({"reveal/exact": fmean(revealed)} if revealed else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds.items())}

    def load_state_dict(self, state: dict[str, Any]):
        self.bounds = {level: bound for level, bound in state["bounds"]}


def beginning(policy: Policy, target: str, share: float) -> tuple[tuple[int, ...], str]:
    """Return the first tokens of the right answer, about `share` of them and never all, and what they write.

    The text is always a beginning of what all of them write: a token that ends inside a character
    is left out.
    """
    tokens = policy.target_tokens(target)
    whole = policy.decode(tokens)
    for n in range(int(share * len(tokens)), 0, -1):
        text = policy.decode(tokens[:n])
        if whole.startswith(text):
            return tokens[:n], text
    return (), ""


def behind(
    policy: Policy, tokens: tuple[int, ...], text: str, completion: Completion
) -> Completion:
    """Return `completion` with the text that it writes behind revealed `tokens`, whose text is `text`.

    Decoded alone, the space that it begins with would be lost by some tokenizers.
    """
    if not tokens:
        return completion
    whole = policy.decode(tokens + completion.tokens)
    return replace(completion, text=whole[len(text) :])


def continued(guess: Guess, text: str) -> Guess:
    """Return a guess for completions that go on behind the revealed `text`."""
    return _Continued(guess, text) if text else guess


class _Continued:
    def __init__(self, guess: Guess, text: str):
        self.guess = guess
        self.text = text

    def __call__(self, written: str) -> str:
        return self.guess(self.text + written)

    def __copy__(self) -> "_Continued":
        return _Continued(copy(self.guess), self.text)

"""Control experiments: training on rewards that carry no information, which must not learn."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from grpo.records import Group


def apply_control(
    groups: Sequence[Group], control: str, key: str, reward_range: tuple[float, float] | None
) -> None:
    """Remove the information from the rewards of `groups`, in place.

    "shuffled-rewards" permutes the rewards over all completions, with a generator seeded by `key`.
    "constant-reward" replaces each by the middle of the `reward_range`, or by 0.5 if that is
    unknown. "none" is an ordinary run and changes nothing. Scores keep their values and parts.
    """
    if control == "none":
        return

    rewards = [score.reward for group in groups for score in group.scores]
    if control == "shuffled-rewards":
        random.Random(f"control/{key}").shuffle(rewards)
    else:
        assert control == "constant-reward"
        rewards = [fmean(reward_range or (0.0, 1.0))] * len(rewards)

    remaining = iter(rewards)
    for group in groups:
        group.scores = [replace(score, reward=next(remaining)) for score in group.scores]

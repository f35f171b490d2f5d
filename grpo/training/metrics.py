"""The figures of a step: its time, rewards and lengths, and its summary for the curriculum."""

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from grpo.group_metrics import first_tries
from grpo.records import Group, StepSummary, truncated_share
from grpo.variance import COLLAPSED
from tasks.base import COMPONENT, Score


class StepTimer:
    """The seconds that each part of a step takes."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = defaultdict(float)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        now = time.perf_counter()
        self.laps[name] += now - self.last
        self.last = now

    def total(self) -> float:
        """Return the time since the start."""
        return time.perf_counter() - self.start

    def metrics(self) -> dict[str, float]:
        """Return the time of each part."""
        return {f"time/{name}": seconds for name, seconds in self.laps.items()}


def reward_metrics(first: Sequence[Group]) -> dict[str, float]:
    """Return means over the completions of first tries, and the rewards' standard deviation."""
    scores = [score for group in first for score in group.scores]
    return {
        "reward": fmean(score.reward for score in scores),
        "reward_std": stdev(score.reward for score in scores) if len(scores) > 1 else 0.0,
        "value": fmean(score.value for score in scores),
        "exact": fmean(score.exact for score in scores),
        **component_metrics(scores),
    }


def component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of each component of the reward: the parts that are called "reward/...".

    A completion without a component counts as 0.
    """
    names = {name for score in scores for name in score.parts if name.startswith(COMPONENT)}
    return {name: fmean(score.parts.get(name, 0.0) for score in scores) for name in sorted(names)}


def length_metrics(first: Sequence[Group]) -> dict[str, float]:
    """Return the mean length in tokens and the share of truncated completions, of first tries."""
    completions = [completion for group in first for completion in group.completions]
    return {
        "completions/mean_length": fmean(len(completion.tokens) for completion in completions),
        "completions/clipped_ratio": truncated_share(first),
    }


def speed_metrics(tokens: int, tokens_so_far: int, seconds: float) -> dict[str, Any]:
    """Return the tokens sampled and the time of a step."""
    return {
        "num_tokens": tokens_so_far,
        "tokens_per_second": tokens / seconds,
        "step_time": seconds,
    }


def step_summary(step: int, groups: Sequence[Group]) -> StepSummary:
    """Return the step as the curriculum sees it: its first tries."""
    values: dict[int, list[float]] = defaultdict(list)
    collapsed: dict[int, list[bool]] = defaultdict(list)
    # What a group is shown, it can learn from. Under `resample` only its last try says so.
    shown = {group.index for group in groups if group.action == "demonstrate"}
    for group in first_tries(groups):
        level = group.problem.level
        values[level].append(fmean(score.value for score in group.scores))
        collapsed[level].append(group.class_name in COLLAPSED and group.index not in shown)
    return StepSummary(step, dict(values), dict(collapsed))

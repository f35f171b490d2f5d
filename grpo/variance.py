"""The variance monitor: it finds the groups that carry no gradient, names the cause, and acts.

If all rewards of a group are equal, every advantage is zero and the group teaches nothing. DAPO
(arXiv:2503.14476, "dynamic sampling") filters such groups. Beyond DAPO, the monitor classifies each
group by the cause, counts the wasted tokens, and raises alarms. What keeps groups varied is the
curriculum, which draws levels where they vary, and a reward without traps. docs/failing-run.md
describes all of this for users.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from grpo.config import Config
from grpo.records import (
    CLASSES,
    WHY,
    Group,
    GroupClass,
    Resumable,
    judged_mean,
    originals,
    truncated_share,
)
from grpo.tasks.base import LARGEST, Score, component_means

# Degenerate because all rewards are equal, and not because the answers are right.
COLLAPSED: tuple[GroupClass, ...] = ("identical", "failed", "tied")

# Rewards that differ by no more than this share of the largest are equal, or by no more than LEAST:
# they differ by float32's rounding.
EQUAL = 2e-7
LEAST = 1e-9

# A group of which the reward judged a smaller share is not solved, whatever these few earn.
MOSTLY_JUDGED = 0.5

# An alarm is raised after this many steps in a row with a larger share (of a trap: at least it).
ALARM_STEPS = 5
ALARM_SHARE = 0.5

# The causes of alarms are "solved", "collapsed", TRUNCATED, and TRAP followed by the name of a
# cheap strategy that the task knows (`Score.parts["trap"]`).
TRUNCATED = "truncated"
TRAP = "trap "

REMEDIES: dict[str, str] = {
    "identical": "every completion of a group is the same text: give a lower --learning-rate, or "
    "--beta 0.02",
    "failed": "every completion gets the lowest reward: climb to the level in smaller steps "
    "(--curriculum), or choose a --reward that pays for a part of the answer",
    "tied": "different texts get the same reward: it is too coarse; choose another --reward",
    "solved": "every completion gets the highest reward: there is little left to learn at this "
    "level; a harder one teaches more",
    TRUNCATED: "give a larger --max-new-tokens, or a reward that does not rise with the length",
}
TRAP_REMEDY = (
    "climb from a lower level (--curriculum), choose a --reward that does not reward it, or raise "
    "--temperature"
)


def classify(group: Group, reward_range: tuple[float, float] | None) -> GroupClass:
    """Return the class of a scored group.

    Rewards at the top of the `reward_range` are solved, unless the budget cut a completion off, and
    those at the bottom failed; an unknown range (None) has no ends. Identical right answers are
    solved, not collapsed. Identical completions have no gradient, whatever they were paid.
    Completions that no reward judged have the mean reward of the others.
    """
    rewards = group.rewards
    lowest, highest = reward_range or (-math.inf, math.inf)
    equal = max(LEAST, EQUAL * max(map(abs, rewards)))
    is_one = len({each.tokens for each in group.completions}) == 1
    if max(rewards) - min(rewards) > equal and not is_one:
        return "varied"

    has_ended = not any(completion.is_truncated for completion in group.completions)
    is_highest = has_ended and min(rewards) >= highest - equal
    is_right = is_highest or all(score.exact for score in group.judged)
    if is_right and group.judged_share >= MOSTLY_JUDGED:
        return "solved"
    if is_one or len(set(group.texts)) == 1:
        return "identical"
    return "failed" if max(rewards) <= lowest + equal else "tied"


def common_trap(scores: Sequence[Score]) -> str | None:
    """Return the most common trap of the completions, or else the most common kind of their traps,
    if at least half of them are in it.
    """
    for label in ("trap", "trap_kind"):
        names = Counter(name for score in scores if (name := score.parts.get(label)))
        for name, count in names.most_common(1):
            if 2 * count >= len(scores):
                return name
    return None


class VarianceMonitor(Resumable):
    """Decides what happens to groups without variance, and raises alarms.

    The configuration's `on_degenerate` says what happens to such a group: "keep" (it stays in the
    denominator) or "skip" (it leaves the step).
    """

    STATE = ("wasted", "shares", "lasted", "best")

    def __init__(self, config: Config, reward_range: tuple[float, float] | None = (0.0, 1.0)):
        self.config = config
        self.reward_range = reward_range
        self.wasted = 0  # tokens of groups that were not learned from

        self.shares: deque[dict[str, float]] = deque(maxlen=ALARM_STEPS)  # of each cause, by step
        self.lasted: dict[str, int] = {}  # for how many steps each cause has lasted
        self.best = -LARGEST  # the highest reward so far

    def apply_control(self, groups: Sequence[Group], key: str) -> None:
        """Remove the information from the rewards of scored groups, for a control experiment.

        "shuffled-rewards" permutes the rewards over all completions, with a generator seeded by
        `key`. "constant-reward" replaces each by the middle of the range, or by 0.5 if that is
        unknown. Scores keep their values and parts.
        """
        rewards = [score.reward for group in groups for score in group.scores]
        if self.config.control == "shuffled-rewards":
            random.Random(f"control/{key}").shuffle(rewards)
        elif self.config.control == "constant-reward":
            rewards = [fmean(self.reward_range or (0.0, 1.0))] * len(rewards)
        else:
            return

        remaining = iter(rewards)
        for group in groups:
            group.scores = [replace(score, reward=next(remaining)) for score in group.scores]

    def classify(self, groups: Sequence[Group]) -> None:
        """Fill in the class, the trap and the action of scored groups."""
        for group in groups:
            group.class_name = classify(group, self.reward_range)
            group.trap = common_trap(group.scores)
            is_kept = group.class_name == "varied" or self.config.on_degenerate == "keep"
            group.action = "keep" if is_kept else "skip"

    def observe(self, groups: Sequence[Group], level: int | None = None) -> list[str]:
        """Take note of all groups of a step; return the alarms.

        An alarm is raised once its cause has lasted for ALARM_STEPS steps in a row, and again when
        it has lasted 2, 4, 8, ... times as long. Only groups of `level` count if there are any:
        easier levels must not hide problems of the hardest one.
        """
        self.wasted += _wasted(groups)
        sampled = originals(groups)
        sampled = [group for group in sampled if group.problem.level == level] or sampled
        now = _shares(sampled)
        self.shares.append(now)
        self.best = max([self.best, *(max(group.rewards) for group in sampled)])
        mean = {cause: fmean(step.get(cause, 0) for step in self.shares) for cause in now}

        causes = [cause for cause in now if cause.startswith(TRAP) and now[cause] >= ALARM_SHARE]
        if now["varied"] < 1 - ALARM_SHARE:
            is_solved = mean["solved"] > sum(mean[name] for name in COLLAPSED)
            causes.append("solved" if is_solved else "collapsed")
        if now[TRUNCATED] > ALARM_SHARE:
            causes.append(TRUNCATED)

        self.lasted = {cause: self.lasted.get(cause, 0) + 1 for cause in causes}
        due = [ALARM_STEPS * 2**doublings for doublings in range(30)]
        return [_alarm(cause, n, mean) for cause, n in self.lasted.items() if n in due]

    def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the metrics of a step's groups, after `observe`."""
        sampled = originals(groups)
        completions = sum(len(group.scores) for group in sampled)
        actions = Counter(group.action for group in groups)
        classes = Counter(group.class_name for group in sampled)
        expected = [x for group in sampled if (x := group.problem.expected) is not None]
        return {
            "frac_reward_zero_std": fmean(
                max(group.rewards) == min(group.rewards) for group in sampled
            ),
            "group_std": fmean(group.reward_std for group in sampled),
            "distinct_completions": fmean(len(set(group.texts)) for group in sampled),
            "groups/count": len(sampled),
            "groups/kept": actions["keep"],
            "groups/skipped": actions["skip"],
            "groups/demonstrated": actions["demonstrate"],
            "groups/windows": sum(bool(group.problem.begun) for group in sampled),
            **({"windows/expected": fmean(expected)} if expected else {}),
            **{f"groups/class/{name}": classes[name] for name in CLASSES},
            "groups/trapped": sum(group.trap is not None for group in sampled),
            **{f"traps/{name}": n / completions for name, n in _traps(sampled).most_common()},
            "levels": by_level(sampled),
            "wasted_tokens": _wasted(groups),
            "wasted_tokens_total": self.wasted,
        }


def _alarm(cause: str, steps: int, mean: dict[str, float]) -> str:
    """Return the alarm of a cause in words; `mean` has the shares of the last steps."""
    remedy = REMEDIES.get(cause, TRAP_REMEDY)
    if cause.startswith(TRAP):
        name = cause.removeprefix(TRAP)
        found = f"{mean[cause]:.0%} of the completions are in the trap '{name}':"
    elif cause == TRUNCATED:
        found = f"{mean[cause]:.0%} of the completions are truncated:"
    else:
        ranked = sorted(WHY, key=mean.__getitem__, reverse=True)
        listed = ", ".join(f"{mean[name]:.0%} {name}" for name in ranked if mean[name])
        found = f"most groups carry no gradient ({listed});"
        remedy = REMEDIES[ranked[0]]
    kind = "note" if cause == "solved" else "ALARM"
    return f"{kind}: for {steps} steps {found} {remedy}"


def _shares(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of each cause of an alarm: of a step's groups for a class, of its
    completions for truncation and for a trap.

    A group that is learned from by a copy counts as varied.
    """
    classes = Counter(
        "varied" if group.action == "demonstrate" else group.class_name for group in groups
    )
    traps = _traps(groups)
    completions = sum(len(group.scores) for group in groups)
    return {
        **{name: classes[name] / len(groups) for name in CLASSES},
        TRUNCATED: truncated_share(groups),
        **{TRAP + name: count / completions for name, count in traps.items()},
    }


def _traps(groups: Sequence[Group]) -> Counter[str]:
    names = (score.parts.get("trap") for group in groups for score in group.scores)
    return Counter(name for name in names if name)


def _wasted(groups: Sequence[Group]) -> int:
    return sum(group.tokens for group in groups if group.action not in ("keep", "demonstrate"))


def reward_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """Return means over the completions that the reward judged, and the rewards' standard
    deviation. If it judged none, `value` and `exact` are None.

    The parts of a score that are called "reward/..." are components of the reward.
    """
    every = [score for group in groups for score in group.scores]
    scores = [score for score in every if not score.abstained] or every
    return {
        "reward": fmean(score.reward for score in scores),
        "reward_std": stdev(score.reward for score in scores) if len(scores) > 1 else 0.0,
        "value": judged_mean("value", groups),
        "exact": judged_mean("exact", groups),
        **{name: mean for name, (mean,) in component_means([scores]).items()},
    }


def by_level(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each level, with the number of groups in each class and trap."""
    levels: dict[int, list[Group]] = {}
    for group in groups:
        levels.setdefault(group.problem.level, []).append(group)

    return {
        str(level): {
            "groups": len(members),
            "value": judged_mean("value", members),
            "group_std": fmean(group.reward_std for group in members),
            "class": dict(Counter(group.class_name for group in members)),
            "trap": dict(Counter(group.trap for group in members if group.trap)),
        }
        for level, members in sorted(levels.items())
    }

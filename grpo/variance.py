"""The variance monitor: it finds the groups that carry no gradient, names the cause, and acts.

If all rewards of a group are equal, every advantage is zero and the group teaches nothing. DAPO
(arXiv:2503.14476, "dynamic sampling") filters such groups. Beyond DAPO, the monitor classifies each
group by the cause, counts the wasted tokens, and raises alarms. What keeps groups varied is the
curriculum, which draws levels where they vary, and a reward without traps. docs/failing-run.md
describes all of this for users.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from grpo.config import Config
from grpo.records import (
    CLASSES,
    Action,
    Group,
    GroupClass,
    Resumable,
    first_tries,
    truncated_share,
)
from tasks.base import Score

DEGENERATE: tuple[GroupClass, ...] = CLASSES[1:]

# Degenerate because all rewards are equal, and not because the answers are right.
COLLAPSED: tuple[GroupClass, ...] = ("identical", "failed", "tied")

# Rewards that differ by no more than this are equal: they differ by rounding.
EQUAL = 1e-6

# The most times that a group is sampled again.
RETRIES = 2

# An alarm is raised after this many steps in a row with a larger share (of a trap: at least it).
ALARM_STEPS = 5
ALARM_SHARE = 0.5
RELEASE = 0.25  # the share at which an alarm is cleared

# The causes of alarms are the classes of groups, TRUNCATED, and TRAP followed by the name of a
# cheap strategy that the task knows (`Score.parts["trap"]`).
TRUNCATED = "truncated"
TRAP = "trap "
REWARD, VALUE = "reward in ", "value in "  # of a trap: what its completions have earned

REMEDIES: dict[str, str] = {
    "identical": "every completion of a group is the same text, so there is no gradient: give "
    "a lower --learning-rate, --beta 0.02 or a higher --temperature, or go back to an easier level",
    "failed": "every completion gets the lowest reward: the level is too hard; give a "
    "lower one, or climb to it by --curriculum; rows of your own (--data) need easier ones, or a "
    "reward that pays for a part of the answer",
    "tied": "different texts get the same reward: it is too coarse; choose another --reward",
    "solved": "every completion gets the highest reward: there is little left to learn at this "
    "level; a harder one teaches more",
    TRUNCATED: "give a larger --max-new-tokens, or a reward that does not rise with the length",
}
TRAP_REMEDY = (
    "climb from a lower level (--curriculum), choose a --reward that does not reward it, or raise "
    "--temperature"
)


def classify(
    scores: Sequence[Score], texts: Sequence[str], reward_range: tuple[float, float] | None
) -> GroupClass:
    """Return the class of a group, without asking what the loss leaves out.

    Rewards at the top of the `reward_range` are solved, and those at the bottom failed; an unknown
    range (None) has no ends. Identical right answers are solved, not collapsed.
    """
    rewards = [score.reward for score in scores]
    if max(rewards) - min(rewards) > EQUAL:
        return "varied"

    lowest, highest = reward_range or (-math.inf, math.inf)
    if all(score.exact for score in scores) or min(rewards) >= highest - EQUAL:
        return "solved"
    if len(set(texts)) == 1:
        return "identical"
    return "failed" if max(rewards) <= lowest + EQUAL else "tied"


def group_class(group: Group, reward_range: tuple[float, float] | None) -> GroupClass:
    """Return the class of a scored group by `classify`; one with a completion that the budget cut
    off is not solved.
    """
    if reward_range and any(completion.is_truncated for completion in group.completions):
        reward_range = reward_range[0], math.inf
    return classify(group.scores, group.texts, reward_range)


def common_trap(scores: Sequence[Score]) -> str | None:
    """Return the most common trap of the completions if at least half of them are in it."""
    traps = Counter(score.parts.get("trap") for score in scores)
    del traps[None]
    name = max(traps, key=traps.__getitem__, default=None)
    return name if 2 * traps[name] >= len(scores) else None


class VarianceMonitor(Resumable):
    """Decides what happens to groups without variance, and raises alarms.

    The configuration's `on_degenerate` says what happens to such a group: "keep" (it stays in the
    denominator), "skip" (it leaves the step) or "resample" (it is sampled again, then skipped).

    An alarm is raised once its cause has lasted for ALARM_STEPS steps in a row, and again when it
    has lasted 2, 4, 8, ... times as long. It is cleared when the share falls to RELEASE.

    Only first tries count, and of these the groups of the level that the caller names, because
    easier levels must not hide problems of the hardest one.
    """

    STATE = ("wasted", "shares", "alarms")

    def __init__(self, config: Config, reward_range: tuple[float, float] | None = (0.0, 1.0)):
        self.config = config
        self.reward_range = reward_range
        self.wasted = 0  # tokens of groups that were not learned from

        self.shares: deque[dict[str, float]] = deque(maxlen=ALARM_STEPS)  # see `_shares`, by step
        self.alarms: dict[str, int] = {}  # cause -> for how many steps it has lasted

    def classify(self, groups: Sequence[Group]) -> None:
        """Fill in the class, the trap and the action of scored groups."""
        for group in groups:
            group.class_name = group_class(group, self.reward_range)
            group.trap = common_trap(group.scores)
            group.action = self.decide(group.class_name, group.attempt)

    def decide(self, class_name: GroupClass, attempt: int) -> Action:
        """Return the action for a group of this class after try number `attempt` (from 0)."""
        way = self.config.on_degenerate
        if class_name == "varied" or way == "keep":
            return "keep"

        may_retry = way == "resample" and attempt < RETRIES
        return "resample" if may_retry and class_name != "solved" else "skip"

    def observe(self, groups: Sequence[Group], level: int | None = None) -> list[str]:
        """Take note of all groups of a step, every try; return the alarms."""
        self.wasted += _wasted(groups)
        first = first_tries(groups)
        first = [group for group in first if group.problem.level == level] or first
        shown = {group.index for group in groups if group.action == "demonstrate"}
        return self._raise_alarms(_shares(first, shown))

    def _raise_alarms(self, now: dict[str, float]) -> list[str]:
        """Return the alarms that are raised after a step with these shares."""
        self.shares.append(now)
        # A cause whose share has fallen must last anew for an alarm.
        self.alarms = {
            cause: lasted for cause, lasted in self.alarms.items() if now.get(cause, 0) > RELEASE
        }
        due = [cause for cause in self._lasting(now) if self._count_step(cause)]
        return [self._alarm(cause) for cause in due]

    def _lasting(self, now: dict[str, float]) -> list[str]:
        """Return the causes that most groups or completions have had for ALARM_STEPS steps."""
        if len(self.shares) < ALARM_STEPS:
            return []

        least = {cause: min(step.get(cause, 0) for step in self.shares) for cause in now}
        lasting = [cause for cause in now if cause.startswith(TRAP) and least[cause] >= ALARM_SHARE]
        if all(step["varied"] < 1 - ALARM_SHARE for step in self.shares):
            cause = max(DEGENERATE, key=self._mean)
            # The most common class of the last steps may have ended.
            lasting += [cause] if now[cause] > RELEASE else []
        return lasting + ([TRUNCATED] if least[TRUNCATED] > ALARM_SHARE else [])

    def _mean(self, cause: str) -> float:
        """Return the mean share of a cause in the last steps."""
        return fmean(step.get(cause, 0) for step in self.shares)

    def _alarm(self, cause: str) -> str:
        """Return the alarm of a cause in words."""
        share = self._mean(cause)
        if cause.startswith(TRAP):
            reward, value = (self._mean(name + cause) / share for name in (REWARD, VALUE))
            found = (
                f"{share:.0%} of the completions are in the trap '{cause.removeprefix(TRAP)}', "
                f"reward {reward:.2f} (score {value:.2f}):"
            )
        elif cause == TRUNCATED:
            found = f"{share:.0%} of the completions are truncated:"
        else:
            ranked = sorted(DEGENERATE, key=self._mean, reverse=True)
            shares = [(name, share) for name in ranked if (share := self._mean(name))]
            listed = ", ".join(f"{share:.0%} {name}" for name, share in shares)
            found = f"most groups carry no gradient ({listed});"

        kind = "note" if cause == "solved" else "ALARM"
        return f"{kind}: for {self.alarms[cause]} steps {found} {REMEDIES.get(cause, TRAP_REMEDY)}"

    def _count_step(self, cause: str) -> bool:
        """Count a step in which `cause` lasts, and return whether its alarm is raised now.

        That is after ALARM_STEPS steps, and then each time that it has lasted twice as long.
        """
        lasted = self.alarms.get(cause, ALARM_STEPS - 1) + 1
        self.alarms[cause] = lasted
        periods, rest = divmod(lasted, ALARM_STEPS)
        return rest == 0 and periods.bit_count() == 1

    def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the metrics of a step's groups (every try). Call it before `observe`."""
        wasted = _wasted(groups)
        return {
            "temperature": self.config.temperature,
            **group_metrics(groups),
            "wasted_tokens": wasted,
            "wasted_tokens_total": self.wasted + wasted,
        }


def _shares(groups: Sequence[Group], shown: set[int]) -> dict[str, float]:
    """Return the share of each cause of an alarm: of a step's groups for a class, of its
    completions for truncation and for a trap. What a trap has earned is summed up beside it.

    Groups whose index is in `shown` are learned from by a copy, and so count as varied.
    """
    classes = Counter("varied" if group.index in shown else group.class_name for group in groups)
    shares: dict[str, float] = {name: classes[name] / len(groups) for name in CLASSES}
    shares[TRUNCATED] = truncated_share(groups)

    scores = [score for group in groups for score in group.scores]
    sums: Counter[str] = Counter()
    for score in scores:
        if trap := score.parts.get("trap"):
            cause = TRAP + trap
            sums.update({cause: 1, REWARD + cause: score.reward, VALUE + cause: score.value})
    return shares | {name: amount / len(scores) for name, amount in sums.items()}


def _wasted(groups: Sequence[Group]) -> int:
    """Return the tokens of the groups that were not learned from."""
    return sum(group.tokens for group in groups if group.action not in ("keep", "demonstrate"))


# Upper bounds of the bins of the standard deviations of reward. The first bin holds only 0.
BOUNDS = (0, 0.01, 0.03, 0.1, 0.3)


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics of a step's `groups` (every try), under their names in metrics.jsonl."""
    first = first_tries(groups)
    completions = sum(len(group.scores) for group in first)

    actions = Counter(group.action for group in groups)
    classes = Counter(group.class_name for group in first)
    traps = Counter(
        trap for group in first for score in group.scores if (trap := score.parts.get("trap"))
    )

    return {
        "frac_reward_zero_std": fmean(max(group.rewards) == min(group.rewards) for group in first),
        "group_std": fmean(group.reward_std for group in first),
        "group_std/hist": histogram([group.reward_std for group in first]),
        "distinct_completions": fmean(len(set(group.texts)) for group in first),
        "groups/count": len(first),
        "groups/kept": actions["keep"],
        "groups/resampled": actions["resample"],
        "groups/skipped": actions["skip"],
        "groups/demonstrated": actions["demonstrate"],
        **{f"groups/class/{name}": classes[name] for name in CLASSES},
        "groups/trapped": sum(group.trap is not None for group in first),
        **{f"traps/{name}": count / completions for name, count in traps.most_common()},
        "levels": by_level(first),
    }


def histogram(stds: Sequence[float]) -> dict[str, int]:
    """Return how many of the standard deviations `stds` lie in each bin.

    >>> histogram([0.0, 0.01, 0.02, 0.5])
    {'0': 1, '0-0.01': 1, '0.01-0.03': 1, '0.03-0.1': 0, '0.1-0.3': 0, '>0.3': 1}
    """
    names = ["0", *(f"{low:g}-{high:g}" for low, high in pairwise(BOUNDS)), f">{BOUNDS[-1]:g}"]
    counts = Counter(bisect_left(BOUNDS, std) for std in stds)
    return {name: counts[number] for number, name in enumerate(names)}


def by_level(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each level: number of groups, mean score, mean standard deviation of
    reward, and the number of groups in each class and in each trap.
    """
    levels: dict[int, list[Group]] = {}
    for group in groups:
        levels.setdefault(group.problem.level, []).append(group)

    return {
        str(level): {
            "groups": len(members),
            "value": fmean(score.value for group in members for score in group.scores),
            "group_std": fmean(group.reward_std for group in members),
            "class": dict(Counter(group.class_name for group in members)),
            "trap": dict(Counter(group.trap for group in members if group.trap)),
        }
        for level, members in sorted(levels.items())
    }

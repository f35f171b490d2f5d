"""The variance monitor: it finds the groups that carry no gradient, names the cause, and acts.

If all rewards of a group are equal, every advantage is zero and the group teaches nothing. Nor does
it teach if the loss leaves out every completion that has an advantage (``truncated: mask``). DAPO
(arXiv:2503.14476, "dynamic sampling") filters such groups. Beyond DAPO, the monitor classifies each
group by the cause, answers lost diversity with a higher temperature, counts the wasted tokens, and
raises alarms. docs/failing-run.md describes all of this for users.
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

# A collapsed group has lost its diversity if at most this share of its texts is distinct. One text
# of 16 is "identical", and 4 of 16 are hardly better.
DIVERSITY = 0.25

# The most times that a group is sampled again.
RETRIES = 2

# The shares of the groups that raise the temperature and let it fall, by these factors.
TRIGGER = 0.5
RELEASE = 0.25
HEATING = 1.15
HOTTEST = 1.5
COOLING = 1.05

# Heat is judged after HEAT_STEPS hot steps. It is kept if the share of the groups that have lost
# their diversity is at most HEAT_WORKS times that of the cold steps, and the reward is no lower.
HEAT_STEPS = 20
HEAT_WORKS = 0.75

# An alarm is raised after this many steps in a row with a larger share (of a trap: at least it).
ALARM_STEPS = 5
ALARM_SHARE = 0.5

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
    "masked": "the loss leaves truncated completions out, and no other has an advantage: give a "
    "larger --max-new-tokens, or learn from truncated completions (truncated: learn)",
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


def group_class(
    group: Group, config: Config, reward_range: tuple[float, float] | None
) -> GroupClass:
    """Return the class of a scored group: that of `classify`, with two exceptions.

    A group with a completion that the budget cut off is not solved. One that varies is "masked" if
    the loss leaves out every completion that has an advantage.
    """
    if reward_range and any(completion.is_truncated for completion in group.completions):
        reward_range = reward_range[0], math.inf
    name = classify(group.scores, group.texts, reward_range)
    is_masked = name == "varied" and config.truncated == "mask" and _is_masked(group, config)
    return "masked" if is_masked else name


def _is_masked(group: Group, config: Config) -> bool:
    """Return whether every completion with an advantage is truncated.

    The advantages are taken from the mean of all rewards, those of truncated completions included.
    """
    from grpo.learn.advantages import advantages  # imports torch, which takes seconds

    (values,) = advantages([group.rewards], scale="none")
    return not any(
        # A completion that earned the mean may have tokens with an advantage of their own.
        (value or config.credit == "alignment") and not completion.is_truncated
        for value, completion in zip(values, group.completions, strict=True)
    )


def common_trap(scores: Sequence[Score]) -> str | None:
    """Return the most common trap of the completions if at least half of them are in it."""
    traps = Counter(score.parts.get("trap") for score in scores)
    del traps[None]
    name = max(traps, key=traps.__getitem__, default=None)
    return name if 2 * traps[name] >= len(scores) else None


def lost_diversity(group: Group) -> bool:
    """Return whether a collapsed group repeats itself, which a higher temperature can cure.

    At most a share DIVERSITY of its texts, or one text, is distinct.
    """
    distinct = len(set(group.texts))
    return group.class_name in COLLAPSED and distinct <= max(1, DIVERSITY * len(group.texts))


class VarianceMonitor(Resumable):
    """Decides what happens to groups without variance, sets the temperature, and raises alarms.

    The configuration's `on_degenerate` says what happens to such a group: "keep" (it stays in the
    denominator), "skip" (it leaves the step) or "resample" (it is sampled again, then skipped).

    The temperature answers lost diversity and never incompetence. Heat that changes nothing in
    HEAT_STEPS steps, or costs reward, is given up: the temperature stays at the base until the
    level changes, or until only RELEASE of the groups have lost their diversity in as many steps.

    An alarm is raised once its cause has lasted for ALARM_STEPS steps in a row, and again when it
    has lasted 2, 4, 8, ... times as long. It is cleared when the share falls to RELEASE.

    Only first tries count, and of these the groups of the level that the caller names, because
    replayed easier levels must not hide problems of the current one.
    """

    STATE = ("temperature", "wasted", "hot", "cold", "gave_up_heat", "level", "shares", "alarms")

    def __init__(self, config: Config, reward_range: tuple[float, float] | None = (0.0, 1.0)):
        self.config = config
        self.reward_range = reward_range
        self.base = self.temperature = config.temperature
        self.ceiling = config.temperature * HOTTEST
        self.wasted = 0  # tokens of groups that were not learned from

        # The share of groups that have lost their diversity and the mean reward, of the last steps
        # at this level that were sampled with heat and without.
        self.hot: deque[list[float]] = deque(maxlen=HEAT_STEPS)
        self.cold: deque[list[float]] = deque(maxlen=HEAT_STEPS)
        self.gave_up_heat = False
        self.level: int | None = None

        self.shares: deque[dict[str, float]] = deque(maxlen=ALARM_STEPS)  # see `_shares`, by step
        self.alarms: dict[str, int] = {}  # cause -> for how many steps it has lasted

    def classify(self, groups: Sequence[Group]) -> None:
        """Fill in the class, the trap and the action of scored groups."""
        for group in groups:
            group.class_name = group_class(group, self.config, self.reward_range)
            group.trap = common_trap(group.scores)
            group.action = self.decide(group.class_name, group.attempt)

    def decide(self, class_name: GroupClass, attempt: int) -> Action:
        """Return the action for a group of this class after try number `attempt` (from 0)."""
        way = self.config.on_degenerate
        if class_name == "varied" or way == "keep":
            return "keep"

        may_retry = way == "resample" and attempt < RETRIES
        return "resample" if may_retry and class_name != "solved" else "skip"

    def retry_temperature(self, group: Group) -> float:
        """Return the temperature at which `group` is sampled again.

        It rises with each try if the group has lost its diversity; otherwise, and where heat was
        given up, it is the base.
        """
        if self.gave_up_heat or not lost_diversity(group):
            return self.base
        return min(self.temperature * HEATING ** (group.attempt + 1), self.ceiling)

    def observe(self, groups: Sequence[Group], level: int | None = None) -> list[str]:
        """Take note of all groups of a step, every try; return the lines for the console."""
        self.wasted += _wasted(groups)
        first = first_tries(groups)
        first = [group for group in first if group.problem.level == level] or first

        if level != self.level:  # figures of two levels cannot be compared
            self.level = level
            self.temperature = self.base
            self.hot.clear()
            self.cold.clear()
            self.gave_up_heat = False

        shown = {group.index for group in groups if group.action == "demonstrate"}
        return self._adjust_temperature(first) + self._raise_alarms(_shares(first, shown))

    def _adjust_temperature(self, groups: Sequence[Group]) -> list[str]:
        """Set the temperature of the next step; return a line if it has changed."""
        lost = fmean(lost_diversity(group) for group in groups)
        failing = fmean(
            group.class_name in COLLAPSED and not lost_diversity(group) for group in groups
        )
        before = self.temperature
        steps = self.hot if before > self.base else self.cold
        steps.append([lost, fmean(reward for group in groups for reward in group.rewards)])

        may_rise = self.config.on_degenerate != "keep" and not self.gave_up_heat
        if why := self._failure_of_heat():
            self.temperature = self.base
        elif may_rise and lost >= TRIGGER:
            self.temperature = min(before * HEATING, self.ceiling)
            why = f"{lost:.0%} of the groups lost their diversity"
        elif failing >= TRIGGER:
            self.temperature = self.base
            why = f"{failing:.0%} of the groups have different texts and equal rewards"
        elif lost <= RELEASE:
            self.temperature = max(before / COOLING, self.base)
            why = f"only {lost:.0%} of the groups lost their diversity"

        if self.temperature == before:
            return []
        return [f"temperature {before:.3f} → {self.temperature:.3f}: {why}"]

    def _failure_of_heat(self) -> str:
        """Judge the heat if that is due; return why it is given up, "" if it is not."""
        if len(self.cold) == HEAT_STEPS and _means(self.cold)[0] <= RELEASE:
            self.gave_up_heat = False
        if len(self.hot) < HEAT_STEPS:
            return ""

        (lost, reward), (lost_before, reward_before) = _means(self.hot), _means(self.cold)
        self.hot.clear()
        if lost > HEAT_WORKS * lost_before:
            why = f"changed nothing: {lost_before:.0%} → {lost:.0%} of the groups lost diversity"
        elif reward < reward_before:
            why = f"cost reward: {reward_before:.3f} → {reward:.3f}"
        else:
            return ""

        self.gave_up_heat = True
        self.cold.clear()
        return f"{HEAT_STEPS} steps of heat {why}"

    def _raise_alarms(self, now: dict[str, float]) -> list[str]:
        """Return the alarms that are raised after a step with these shares."""
        self.shares.append(now)
        # A cause whose share has fallen must last anew for an alarm.
        self.alarms = {
            cause: lasted for cause, lasted in self.alarms.items() if now.get(cause, 0) > RELEASE
        }
        due = [cause for cause in self._lasting(now) if self._count_step(cause)]
        # The alarm of masked groups names truncation as well, and what follows from it.
        hidden = {TRUNCATED} if "masked" in self.alarms else set()
        return [self._alarm(cause) for cause in due if cause not in hidden]

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
            "temperature": self.temperature,
            **group_metrics(groups),
            "wasted_tokens": wasted,
            "wasted_tokens_total": self.wasted + wasted,
        }


def _means(steps: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the means of both figures of `steps`."""
    lost, rewards = zip(*steps, strict=True)
    return fmean(lost), fmean(rewards)


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

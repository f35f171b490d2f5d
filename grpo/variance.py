"""The variance monitor: it finds the groups that carry no gradient, names the cause, and acts.

If all rewards of a group are equal, every advantage is zero and the group teaches nothing. Nor does
a group teach if the loss leaves out every completion that has an advantage (``truncated: mask``).
When most groups are like that, training stands still. DAPO (arXiv:2503.14476, "dynamic sampling")
filters such groups and samples more prompts. Beyond DAPO, the monitor

- classifies each group by the cause;
- raises the temperature when groups have lost their diversity;
- counts the tokens wasted on groups that were not learned from;
- raises alarms, also for a policy that collapses into a trap while its rewards still vary. A trap
  is a cheap strategy that the task has a name for (`Score.parts["trap"]`).

docs/degenerate-groups.md describes all of this for users.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from grpo.records import CLASSES, Action, Group, GroupClass, first_tries, truncated_share
from tasks.base import Score

DEGENERATE: tuple[GroupClass, ...] = CLASSES[1:]

# Degenerate because all rewards are equal, and not because the answers are right.
COLLAPSED: tuple[GroupClass, ...] = ("identical", "failed", "tied")

# Rewards that differ by no more than this are equal: they differ by rounding.
EQUAL = 1e-6

# A collapsed group has lost its diversity if at most this share of its texts is distinct. One text
# of 16 is "identical", and 4 of 16 are hardly better.
DIVERSITY = 0.25

# Heat is judged after HEAT_STEPS hot steps. It is kept if the share of the groups that have lost
# their diversity is at most HEAT_WORKS times that of the cold steps, and the reward is no lower.
HEAT_STEPS = 20
HEAT_WORKS = 0.75

# The causes of alarms are the classes of groups, TRUNCATED, and TRAP followed by the trap's name.
TRUNCATED = "truncated"
TRAP = "trap "

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
    """Return the class of a group.

    A group is "varied" if its rewards differ by more than rounding. Otherwise the first of these
    applies:

    - "solved": all answers are right, or all rewards are at the top of the `reward_range`;
    - "identical": all texts are the same;
    - "failed": all rewards are at the bottom of the range;
    - "tied": different texts have the same reward.

    So identical right answers are solved, not collapsed. An unknown range (None) has no ends.
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


@dataclass(frozen=True)
class ClassRule:
    """Which groups carry a gradient, e.g. ``ClassRule(masks_truncated=True)``.

    With `masks_truncated` the loss leaves truncated completions out (``truncated: mask``). With
    `credits_tokens` each token has its own advantage (--credit alignment).
    """

    masks_truncated: bool = False
    credits_tokens: bool = False


def group_class(
    group: Group, rule: ClassRule, reward_range: tuple[float, float] | None
) -> GroupClass:
    """Return the class of a scored group.

    It is that of `classify`, except that a group whose rewards vary is "masked" if the loss leaves
    out every completion that has an advantage, and that a group with a completion that the budget
    cut off is not solved.
    """
    if reward_range and any(completion.is_truncated for completion in group.completions):
        reward_range = reward_range[0], math.inf
    name = classify(group.scores, group.texts, reward_range)
    return "masked" if name == "varied" and _is_masked(group, rule) else name


def _is_masked(group: Group, rule: ClassRule) -> bool:
    """Return whether the loss leaves out every completion of a varied group with an advantage.

    The advantages are taken from the mean of all rewards, those of truncated completions included.
    So one completion that is left can teach; and those left teach nothing if they earned the mean.
    """
    if not rule.masks_truncated:
        return False

    from grpo.learn.advantages import advantages  # imports torch, which takes seconds

    (values,) = advantages([group.rewards], scale="none")
    return not any(
        # A completion that earned the mean may have tokens with an advantage of their own.
        (value or rule.credits_tokens) and not completion.is_truncated
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


@dataclass(frozen=True)
class VarianceSettings:
    """How the monitor treats groups without variance.

    Fields without a default are settings of `grpo.config.Config`.

    - `on_degenerate`: what happens to such a group: "keep" (it stays in the denominator), "skip"
      (it leaves the step) or "resample" (it is sampled again at most `retries` times, then
      skipped);
    - `rule`: which groups carry a gradient;
    - `temperature`: the base. It is multiplied by `temperature_factor`, up to `temperature_ceiling`
      times the base, and divided by `cooling` on its way back;
    - `trigger`, `release`: the shares of the groups that raise the temperature and let it fall;
    - `alarm_steps`, `alarm_share`: an alarm is raised after `alarm_steps` steps in a row with a
      share above `alarm_share` (for a trap: of at least that share).
    """

    on_degenerate: str
    temperature: float
    rule: ClassRule
    retries: int
    temperature_factor: float
    temperature_ceiling: float
    cooling: float = 1.05
    trigger: float = 0.5
    release: float = 0.25
    alarm_share: float = 0.5
    alarm_steps: int = 5

    def __post_init__(self) -> None:
        assert self.on_degenerate in ("keep", "skip", "resample")
        assert 0 <= self.release < self.trigger <= 1


class TrapFigures(NamedTuple):
    """A trap in one step: the share of the completions in it, their mean reward and mean score."""

    share: float
    reward: float
    value: float


NO_TRAP = TrapFigures(0.0, 0.0, 0.0)


class VarianceMonitor:
    """Decides what happens to groups without variance, sets the temperature, and raises alarms.

    The temperature answers lost diversity and never incompetence:

    | share of the groups | temperature |
    |---|---|
    | `trigger` or more have lost their diversity | is raised, except under "keep" |
    | `trigger` or more have collapsed with diverse texts | returns to the base at once |
    | `release` or fewer have lost their diversity | falls towards the base |

    Heat that changes nothing in HEAT_STEPS steps, or costs reward, is given up: the temperature
    stays at the base until the level changes, or until only `release` of the groups or fewer have
    lost their diversity in the mean of as many steps.

    Each cause has its own alarm: most groups carry no gradient (the cause is their most common
    class), most completions are in the same trap, or most completions are truncated. The alarm is
    raised once its cause has lasted for `alarm_steps` steps in a row, and again when it has lasted
    2, 4, 8, ... times as long. It is cleared when the share falls to `release`. That of truncation
    is not raised beside that of masked groups, which has the same cause. That of solved groups is a
    note.

    Only first tries count, and a group that is learned from with the right answer shown counts as
    varied. If the caller names a level, only groups of that level count, because replayed easier
    levels must not hide problems of the current one.
    """

    def __init__(self, settings: VarianceSettings):
        self.settings = settings
        self.temperature = settings.temperature
        self.wasted = 0  # tokens of groups that were not learned from

        # The share of groups that have lost their diversity and the mean reward, of the last steps
        # at this level that were sampled with heat and without.
        self.hot: deque[tuple[float, float]] = deque(maxlen=HEAT_STEPS)
        self.cold: deque[tuple[float, float]] = deque(maxlen=HEAT_STEPS)
        self.gave_up_heat = False
        self.level: int | None = None

        # Of the last steps: the share of the groups in each class; the figures of each trap; the
        # share of truncated completions.
        self.classes: deque[dict[str, float]] = deque(maxlen=settings.alarm_steps)
        self.traps: deque[dict[str, TrapFigures]] = deque(maxlen=settings.alarm_steps)
        self.truncated: deque[float] = deque(maxlen=settings.alarm_steps)

        self.alarms: dict[str, int] = {}  # cause -> for how many steps it has lasted
        self.collapse: list[str] = []  # alarms of the last step that `on_alarm: stop` obeys

    def classify(self, groups: Sequence[Group], reward_range: tuple[float, float] | None) -> None:
        """Fill in the class, the trap and the action of scored groups."""
        for group in groups:
            group.class_name = group_class(group, self.settings.rule, reward_range)
            group.trap = common_trap(group.scores)
            group.action = self.decide(group.class_name, group.attempt)

    def decide(self, class_name: GroupClass, attempt: int) -> Action:
        """Return the action for a group of this class after try number `attempt` (from 0)."""
        settings = self.settings
        if class_name == "varied" or settings.on_degenerate == "keep":
            return "keep"

        may_retry = settings.on_degenerate == "resample" and attempt < settings.retries
        return "resample" if may_retry and class_name != "solved" else "skip"

    def retry_temperature(self, group: Group) -> float:
        """Return the temperature at which `group` is sampled again.

        It rises with each try if the group has lost its diversity; otherwise, and where heat was
        given up, it is the base.
        """
        settings = self.settings
        if self.gave_up_heat or not lost_diversity(group):
            return settings.temperature

        raised = self.temperature * settings.temperature_factor ** (group.attempt + 1)
        return min(raised, self._ceiling)

    def observe(self, groups: Sequence[Group], level: int | None = None) -> list[str]:
        """Take note of all groups of a step, every try; return the lines for the console."""
        self.wasted += _wasted(groups)
        first = first_tries(groups)
        first = [group for group in first if group.problem.level == level] or first
        shown = {group.index for group in groups if group.action == "demonstrate"}

        if level != self.level:  # figures of two levels cannot be compared
            self.level = level
            self.temperature = self.settings.temperature
            self.hot.clear()
            self.cold.clear()
            self.gave_up_heat = False

        changed = self._adjust_temperature(first)
        collapse = self._watch_traps(first)
        collapsed, others = self._watch_classes(first, shown)
        self.collapse = collapse + collapsed
        return changed + self.collapse + others + self._watch_truncation(first)

    @property
    def _ceiling(self) -> float:
        """The highest temperature."""
        return self.settings.temperature * self.settings.temperature_ceiling

    def _adjust_temperature(self, groups: Sequence[Group]) -> list[str]:
        """Set the temperature of the next step; return a line if it has changed."""
        settings = self.settings
        lost = fmean(lost_diversity(group) for group in groups)
        failing = fmean(
            group.class_name in COLLAPSED and not lost_diversity(group) for group in groups
        )
        before = self.temperature
        steps = self.hot if before > settings.temperature else self.cold
        steps.append((lost, fmean(reward for group in groups for reward in group.rewards)))

        may_rise = settings.on_degenerate != "keep" and not self.gave_up_heat
        if why := self._failure_of_heat():
            self.temperature = settings.temperature
        elif may_rise and lost >= settings.trigger:
            self.temperature = min(before * settings.temperature_factor, self._ceiling)
            why = f"{lost:.0%} of the groups lost their diversity"
        elif failing >= settings.trigger:
            self.temperature = settings.temperature
            why = f"{failing:.0%} of the groups have different texts and equal rewards"
        elif lost <= settings.release:
            self.temperature = max(before / settings.cooling, settings.temperature)
            why = f"only {lost:.0%} of the groups lost their diversity"

        if self.temperature == before:
            return []
        return [f"temperature {before:.3f} → {self.temperature:.3f}: {why}"]

    def _failure_of_heat(self) -> str:
        """Judge the heat if that is due; return why it is given up, "" if it is not."""
        if len(self.cold) == HEAT_STEPS and _means(self.cold)[0] <= self.settings.release:
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

    def _watch_classes(
        self, groups: Sequence[Group], shown: Container[int]
    ) -> tuple[list[str], list[str]]:
        """Return the alarms about collapsed groups, and those about others without gradient.

        Groups whose index is in `shown` are learned from by a copy, and so count as varied.
        """
        counts = Counter("varied" if group.index in shown else group.class_name for group in groups)
        shares: dict[str, float] = {name: counts[name] / len(groups) for name in CLASSES}
        self.classes.append(shares)
        for name in CLASSES:
            self._clear(name, shares[name])

        without_gradient = [1 - step["varied"] for step in self.classes]
        is_full = len(self.classes) == self.settings.alarm_steps
        if not is_full or min(without_gradient) <= self.settings.alarm_share:
            return [], []

        means = {name: fmean(step[name] for step in self.classes) for name in DEGENERATE}
        cause = max(means, key=means.__getitem__)
        # The most common class of the last steps may have ended, or been reported already.
        if shares[cause] <= self.settings.release or not self._count_step(cause):
            return [], []

        ranked = sorted(means, key=means.__getitem__, reverse=True)
        listed = ", ".join(f"{means[name]:.0%} {name}" for name in ranked if means[name])
        line = (
            f"{'note' if cause == 'solved' else 'ALARM'}: for {self.alarms[cause]} steps most "
            f"groups carry no gradient "
            f"({listed}); {REMEDIES[cause]}"
        )
        return ([line], []) if cause in COLLAPSED else ([], [line])

    def _watch_traps(self, groups: Sequence[Group]) -> list[str]:
        """Return the alarms about traps, of which each has its own."""
        step = _trap_figures([score for group in groups for score in group.scores])
        self.traps.append(step)
        for cause in [cause for cause in self.alarms if cause.startswith(TRAP)]:
            self._clear(cause, step.get(cause.removeprefix(TRAP), NO_TRAP).share)

        lines = []
        for name in step:
            past = [traps.get(name, NO_TRAP) for traps in self.traps]
            is_full = len(past) == self.settings.alarm_steps
            has_lasted = is_full and min(each.share for each in past) >= self.settings.alarm_share
            if has_lasted and self._count_step(TRAP + name):
                shares = [each.share for each in past]
                reward = fmean((each.reward for each in past), shares)
                value = fmean((each.value for each in past), shares)
                lines.append(
                    f"ALARM: for {self.alarms[TRAP + name]} steps {fmean(shares):.0%} of the "
                    f"completions are in the trap '{name}', reward {reward:.2f} "
                    f"(score {value:.2f}): {TRAP_REMEDY}"
                )
        return lines

    def _watch_truncation(self, groups: Sequence[Group]) -> list[str]:
        """Return the alarm about truncated completions, if it is raised."""
        share = truncated_share(groups)
        self.truncated.append(share)
        self._clear(TRUNCATED, share)

        is_full = len(self.truncated) == self.settings.alarm_steps
        has_lasted = is_full and min(self.truncated) > self.settings.alarm_share
        # The alarm of masked groups names truncation as well, and what follows from it.
        if not has_lasted or not self._count_step(TRUNCATED) or "masked" in self.alarms:
            return []
        return [
            f"ALARM: for {self.alarms[TRUNCATED]} steps {fmean(self.truncated):.0%} of the "
            f"completions are truncated: {REMEDIES[TRUNCATED]}"
        ]

    def _count_step(self, cause: str) -> bool:
        """Count a step in which `cause` lasts, and return whether its alarm is raised now.

        That is after `alarm_steps` steps, and then each time that it has lasted twice as long.
        """
        alarm_steps = self.settings.alarm_steps
        lasted = self.alarms.get(cause, alarm_steps - 1) + 1
        self.alarms[cause] = lasted
        periods, rest = divmod(lasted, alarm_steps)
        return rest == 0 and periods.bit_count() == 1

    def _clear(self, cause: str, share: float) -> None:
        """Forget a cause whose share has fallen to `release`: it must last anew for an alarm."""
        if share <= self.settings.release:
            self.alarms.pop(cause, None)

    def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the metrics of a step's groups (every try). Call it before `observe`."""
        wasted = _wasted(groups)
        return {
            "temperature": self.temperature,
            **group_metrics(groups),
            "wasted_tokens": wasted,
            "wasted_tokens_total": self.wasted + wasted,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "temperature": self.temperature,
            "wasted": self.wasted,
            "classes": list(self.classes),
            "traps": list(self.traps),
            "truncated": list(self.truncated),
            "hot": [list(step) for step in self.hot],
            "cold": [list(step) for step in self.cold],
            "gave_up_heat": self.gave_up_heat,
            "level": self.level,
            "alarms": self.alarms,
            "collapse": self.collapse,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        alarm_steps = self.settings.alarm_steps
        self.temperature = state["temperature"]
        self.wasted = state["wasted"]
        self.classes = deque(map(dict, state["classes"]), maxlen=alarm_steps)
        traps = [
            {name: TrapFigures(*each) for name, each in step.items()} for step in state["traps"]
        ]
        self.traps = deque(traps, maxlen=alarm_steps)
        self.truncated = deque(state["truncated"], maxlen=alarm_steps)
        self.hot = deque(map(tuple, state["hot"]), maxlen=HEAT_STEPS)
        self.cold = deque(map(tuple, state["cold"]), maxlen=HEAT_STEPS)
        self.gave_up_heat = state["gave_up_heat"]
        self.level = state["level"]
        self.alarms = dict(state["alarms"])
        self.collapse = list(state["collapse"])


def _means(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the means of both figures of `steps`."""
    lost, rewards = zip(*steps, strict=True)
    return fmean(lost), fmean(rewards)


def _trap_figures(scores: Sequence[Score]) -> dict[str, TrapFigures]:
    """Return the figures of each trap that some of a step's completions are in."""
    by_trap: dict[str, list[Score]] = {}
    for score in scores:
        if name := score.parts.get("trap"):
            by_trap.setdefault(name, []).append(score)

    return {
        name: TrapFigures(
            share=len(members) / len(scores),
            reward=fmean(score.reward for score in members),
            value=fmean(score.value for score in members),
        )
        for name, members in by_trap.items()
    }


def _wasted(groups: Sequence[Group]) -> int:
    """Return the tokens of the groups that were not learned from."""
    return sum(group.tokens for group in groups if group.action not in ("keep", "demonstrate"))


# Upper bounds of the histogram's bins. The first bin holds only 0.
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

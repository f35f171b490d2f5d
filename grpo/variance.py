"""The variance monitor: which groups carry no gradient, why, and what is done about it.

A group whose rewards are all equal has advantage zero throughout, so it teaches nothing; when most
groups are so, training stands still. DAPO (arXiv:2503.14476, "dynamic sampling") filters such
groups and samples more prompts. We also name the cause, raise the temperature where groups have
lost their diversity, keep a ledger of the tokens wasted, and raise alarms. A policy can also
collapse while rewards still vary, by a trap that the task has a name for (`Score.parts["trap"]`):
that is watched as well.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo.records import Group
from grpo.spread import by_level, histogram
from tasks.base import Score

CLASSES = ("varied", "identical", "solved", "failed", "tied")
DEGENERATE = CLASSES[1:]
DIVERSITY = 0.25  # of a group's texts; 1 of 16 is "identical", 4 of 16 are hardly better
TRAP = "trap "  # prefix of the causes of alarms that are traps
TRUNCATED = "truncated"
TRUNCATED_REMEDY = "give a larger --max-new-tokens, or a reward that does not rise with the length"
COLLAPSED = ("identical", "failed", "tied")  # without variance, and without being right
REMEDIES = {
    "identical": "every completion of a group is the same text, so there is no gradient: raise "
    "--temperature, go back to a shorter level, or choose another --reward",
    "failed": "every completion gets the lowest reward: the level is too hard; start with a "
    "shorter one, or let --ramp climb",
    "tied": "different texts get the same reward: it is too coarse; choose another --reward",
    "solved": "every completion gets the highest reward: the level is too easy; ask for more words",
}
TRAP_REMEDY = (
    "start at a shorter level (--ramp), choose a --reward that does not reward it, or raise "
    "--temperature"
)


def classify(
    rewards: Sequence[float],
    texts: Sequence[str],
    *,
    threshold: float = 1e-6,
    reward_range: tuple[float, float] | None = (0.0, 1.0),
) -> str:
    """Return the class of a group: "varied", or why its rewards span no more than `threshold` (0:
    are exactly equal).

    In this order: "solved" (all at the top of the `reward_range`), "identical" (one text, not
    right), "failed" (all at the floor), "tied" (different texts, one reward). Identical right
    answers are solved, not collapsed. Where the range is unknown (None) there is no top and no
    floor, so no group is solved or failed.
    """
    if max(rewards) - min(rewards) > threshold:
        return "varied"

    floor, top = reward_range or (-math.inf, math.inf)
    if min(rewards) >= top - threshold:
        return "solved"
    if len(set(texts)) == 1:
        return "identical"
    return "failed" if max(rewards) <= floor + threshold else "tied"


def common_trap(scores: Sequence[Score]) -> str | None:
    """Return the trap that most of the scored completions are in, if half of them or more are."""
    traps = Counter(score.parts.get("trap") for score in scores)
    del traps[None]
    name = max(traps, key=traps.__getitem__, default=None)
    return name if 2 * traps[name] >= len(scores) else None


def lost_diversity(group: Group) -> bool:
    """Return whether a group without variance repeats itself: that is what a temperature can cure.

    At most DIVERSITY of its texts are distinct, one at least, and they are not right.
    """
    distinct = len(set(group.texts))
    return group.verdict in COLLAPSED and distinct <= max(1, DIVERSITY * len(group.texts))


class VarianceMonitor:
    """Decides what happens to groups without variance, sets the temperature, and raises alarms.

    `policy` is what happens to a degenerate group: "keep" (it stays in the denominator), "skip" (it
    leaves the step) or "resample" (it is drawn again at most `retries` times, then skipped).

    Temperature, except under "keep". Heat answers lost diversity, never incompetence:

    | share of the groups | temperature |
    |---|---|
    | `trigger` or more have lost their diversity | times `heat`, up to `ceiling` times the base |
    | `trigger` or more fail or tie with different texts | back to the base at once |
    | `release` or fewer have lost their diversity | divided by `cool`, down to the base |

    Alarms, one for each cause: most groups carry no gradient (the cause is the most common class),
    most completions are in one and the same trap, most completions are truncated. An alarm is
    raised when its cause has held in `alarm_steps` steps in a row (a share of `alarm_share`),
    again when it has lasted 2, 4, 8, ... times as long, and is cleared when the share falls to
    `release`.

    Only first tries count, and, where the caller names a level, only groups of that level: replayed
    easier levels must not hide what happens at the current one.
    """

    def __init__(
        self,
        policy: str,
        *,
        temperature: float,
        threshold: float = 1e-6,
        retries: int = 2,
        heat: float = 1.15,
        ceiling: float = 1.5,
        cool: float = 1.05,
        trigger: float = 0.5,
        release: float = 0.25,
        alarm_share: float = 0.5,
        alarm_steps: int = 5,
    ):
        assert policy in ("keep", "skip", "resample") and 0 <= release < trigger <= 1
        self.policy = policy
        self.base = temperature
        self.threshold = threshold
        self.retries = retries
        self.heat = heat
        self.ceiling = ceiling
        self.cool = cool
        self.trigger = trigger
        self.release = release
        self.alarm_share = alarm_share
        self.alarm_steps = alarm_steps

        self.temperature = temperature
        self.wasted = 0  # tokens of groups that were not learned from
        # Of the last steps: the share of the groups by class, of the completions by trap (with mean
        # reward and mean value), and of truncated completions.
        self.classes: deque[dict[str, float]] = deque(maxlen=alarm_steps)
        self.traps: deque[dict[str, list[float]]] = deque(maxlen=alarm_steps)
        self.truncated: deque[float] = deque(maxlen=alarm_steps)
        self.alarms: dict[str, int] = {}  # cause -> for how many steps it has lasted
        self.collapse: list[str] = []  # alarms of the last step that `on_alarm: stop` obeys

    def decide(self, verdict: str, attempt: int) -> str:
        """Return "keep", "skip" or "resample" for a group of class `verdict`, drawn for the time
        number `attempt` (from 0).
        """
        if verdict == "varied" or self.policy == "keep":
            return "keep"
        again = self.policy == "resample" and verdict != "solved" and attempt < self.retries
        return "resample" if again else "skip"

    def retry_temperature(self, group: Group) -> float:
        """Return the temperature at which `group`, which is to be resampled, is drawn again.

        Hotter with each try where it has lost its diversity; otherwise the base temperature.
        """
        if not lost_diversity(group):
            return self.base
        return min(self.temperature * self.heat ** (group.attempt + 1), self.base * self.ceiling)

    def observe(self, groups: Sequence[Group], level: int | None = None) -> list[str]:
        """Take note of every group of a step, all tries; return the lines for the console."""
        self.wasted += _wasted(groups)
        first = [group for group in groups if group.attempt == 0]
        first = [group for group in first if group.problem.level == level] or first

        changed = self._adjust_temperature(first)
        collapse = self._watch_traps(first)
        solved, degenerate = self._watch_classes(first)
        self.collapse = collapse + degenerate
        return changed + self.collapse + solved + self._watch_truncation(first)

    def _adjust_temperature(self, groups: Sequence[Group]) -> list[str]:
        lost = fmean(lost_diversity(group) for group in groups)
        failing = fmean(
            group.verdict in COLLAPSED and not lost_diversity(group) for group in groups
        )

        before = self.temperature
        if self.policy != "keep" and lost >= self.trigger:
            self.temperature = min(before * self.heat, self.base * self.ceiling)
            why = f"{lost:.0%} of the groups lost their diversity"
        elif failing >= self.trigger:
            self.temperature = self.base
            why = f"{failing:.0%} of the groups have different texts and equal rewards"
        elif lost <= self.release:
            self.temperature = max(before / self.cool, self.base)
            why = f"{1 - lost:.0%} of the groups have diverse texts"

        if self.temperature == before:
            return []
        return [f"temperature {before:.3f} → {self.temperature:.3f}: {why}"]

    def _watch_classes(self, groups: Sequence[Group]) -> tuple[list[str], list[str]]:
        """Return the alarms of groups without gradient: that of solved groups, and the others."""
        counts = Counter(group.verdict for group in groups)
        shares = {name: counts[name] / len(groups) for name in CLASSES}
        self.classes.append(shares)
        for name in CLASSES:
            self._clear(name, shares[name])

        without_gradient = [1 - step["varied"] for step in self.classes]
        if len(self.classes) < self.alarm_steps or min(without_gradient) <= self.alarm_share:
            return [], []

        means = {name: fmean(step[name] for step in self.classes) for name in DEGENERATE}
        cause = max(means, key=means.__getitem__)
        if shares[cause] <= self.release or not self._is_due(cause):  # it is over, or was said
            return [], []
        ranked = sorted(means, key=means.__getitem__, reverse=True)
        listed = ", ".join(f"{means[name]:.0%} {name}" for name in ranked if means[name])
        line = (
            f"ALARM: for {self.alarms[cause]} steps most groups carry no gradient "
            f"({listed}); {REMEDIES[cause]}"
        )
        return ([line], []) if cause == "solved" else ([], [line])

    def _watch_traps(self, groups: Sequence[Group]) -> list[str]:
        scores = [score for group in groups for score in group.scores]
        inside: dict[str, list[Score]] = {}
        for score in scores:
            if name := score.parts.get("trap"):
                inside.setdefault(name, []).append(score)
        step = {
            name: [
                len(members) / len(scores),
                fmean(score.reward for score in members),
                fmean(score.value for score in members),
            ]
            for name, members in inside.items()
        }
        self.traps.append(step)
        for cause in [cause for cause in self.alarms if cause.startswith(TRAP)]:
            self._clear(cause, step.get(cause.removeprefix(TRAP), [0.0])[0])

        lines = []
        for name in step:
            past = [traps.get(name, [0.0, 0.0, 0.0]) for traps in self.traps]
            held = len(past) == self.alarm_steps and min(past)[0] >= self.alarm_share
            if held and self._is_due(TRAP + name):
                shares, rewards, values = zip(*past)
                lines.append(
                    f"ALARM: for {self.alarms[TRAP + name]} steps {fmean(shares):.0%} of the "
                    f"completions are in the trap '{name}', reward {fmean(rewards, shares):.2f} "
                    f"(score {fmean(values, shares):.2f}): {TRAP_REMEDY}"
                )
        return lines

    def _watch_truncation(self, groups: Sequence[Group]) -> list[str]:
        share = fmean(c.finish == "length" for group in groups for c in group.completions)
        self.truncated.append(share)
        self._clear(TRUNCATED, share)

        held = len(self.truncated) == self.alarm_steps and min(self.truncated) > self.alarm_share
        if not held or not self._is_due(TRUNCATED):
            return []
        return [
            f"ALARM: for {self.alarms[TRUNCATED]} steps {fmean(self.truncated):.0%} of the "
            f"completions are truncated: {TRUNCATED_REMEDY}"
        ]

    def _is_due(self, cause: str) -> bool:
        """Count a step in which `cause` holds; return whether its alarm is raised now.

        It is due after `alarm_steps` steps and then each time that it has lasted twice as long.
        """
        lasted = self.alarms.get(cause, self.alarm_steps - 1) + 1
        self.alarms[cause] = lasted
        periods, rest = divmod(lasted, self.alarm_steps)
        return rest == 0 and periods.bit_count() == 1

    def _clear(self, cause: str, share: float) -> None:
        if share <= self.release:
            self.alarms.pop(cause, None)

    def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the step's counts and spreads; classes, spreads and traps are of first tries, so
        heat does not flatter them.
        """
        first = [group for group in groups if group.attempt == 0]
        traps = Counter(
            trap for group in first for score in group.scores if (trap := score.parts.get("trap"))
        )
        completions = sum(len(group.scores) for group in first)
        counts, actions = (
            Counter(group.verdict for group in first),
            Counter(group.action for group in groups),
        )
        return {
            "temperature": self.temperature,
            "frac_reward_zero_std": fmean(
                max(group.rewards) == min(group.rewards) for group in first
            ),
            "group_std": fmean(group.spread for group in first),
            "group_std/hist": histogram([group.spread for group in first]),
            "distinct_completions": fmean(
                len({c.text for c in group.completions}) for group in first
            ),
            "groups/count": len(first),
            "groups/kept": actions["keep"],
            "groups/resampled": actions["resample"],
            "groups/skipped": actions["skip"],
            **{f"groups/class/{name}": counts[name] for name in CLASSES},
            "groups/trapped": sum(group.trap is not None for group in first),
            **{f"traps/{name}": count / completions for name, count in traps.most_common()},
            "levels": by_level(first),
            "wasted_tokens": _wasted(groups),
            "wasted_tokens_total": self.wasted + _wasted(groups),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "temperature": self.temperature,
            "wasted": self.wasted,
            "classes": list(self.classes),
            "traps": list(self.traps),
            "truncated": list(self.truncated),
            "alarms": self.alarms,
            "collapse": self.collapse,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of `state_dict`."""
        self.temperature = state["temperature"]
        self.wasted = state["wasted"]
        self.classes = deque(state["classes"], maxlen=self.alarm_steps)
        self.traps = deque(state["traps"], maxlen=self.alarm_steps)
        self.truncated = deque(state["truncated"], maxlen=self.alarm_steps)
        self.alarms = dict(state["alarms"])
        self.collapse = list(state["collapse"])


def _wasted(groups: Sequence[Group]) -> int:
    return sum(group.tokens for group in groups if group.action != "keep")

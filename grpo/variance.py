"""The variance monitor: which groups carry no gradient, why, and what is done about it.

A group whose rewards are all equal has advantage zero throughout, so it teaches nothing; when most groups are so, training
stands still. DAPO (arXiv:2503.14476, "dynamic sampling") filters such groups and samples more prompts. We also name the cause, draw
a collapsed group again at a raised temperature, keep a ledger of the tokens wasted, and raise an alarm. A policy can also collapse while
rewards still vary, by a trap that the task has a name for (`Score.parts["trap"]`): that is watched as well.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo.records import Group
from grpo.spread import by_level, histogram
from tasks.base import Score

CLASSES = ("varied", "identical", "solved", "failed", "tied")
COLLAPSED = ("identical", "failed", "tied")  # without variance, and without being right
REMEDIES = {
    "identical": "every completion of a group is the same text, so there is no gradient: raise --temperature, go back to a "
    "shorter level, or pay by another --reward",
    "failed": "every completion earns nothing: the level is too hard; start with a shorter one, or let --ramp climb",
    "tied": "different texts earn the same: the reward is too coarse; pay by another --reward",
    "solved": "every completion earns everything: the level is too easy; ask for more words",
}
TRAP_REMEDY = "start shorter (--ramp), pay by another --reward that does not pay it, or sample hotter (--temperature)"


def classify(rewards: Sequence[float], texts: Sequence[str], *, threshold: float = 1e-6) -> str:
    """Return the class of a group: "varied", or why its rewards span no more than `threshold` (0: are exactly equal).

    In this order: "solved" (all at the top, 1), "identical" (one text, not right), "failed" (all at the floor, 0), "tied"
    (different texts, one reward). Identical right answers are solved, not collapsed.
    """
    if max(rewards) - min(rewards) > threshold:
        return "varied"
    if min(rewards) >= 1 - threshold:
        return "solved"
    if len(set(texts)) == 1:
        return "identical"
    return "failed" if max(rewards) <= threshold else "tied"


def common_trap(scores: Sequence[Score]) -> str | None:
    """Return the trap that most of the scored completions are in, if half of them or more are."""
    traps = Counter(score.parts.get("trap") for score in scores)
    del traps[None]
    name = max(traps, key=traps.get, default=None)
    return name if 2 * traps[name] >= len(scores) else None


class VarianceMonitor:
    """Decides what becomes of degenerate groups, and how hot to sample.

    `policy`: "keep" (degenerate groups stay in the denominator), "skip" (they leave the step), or "resample" (they are drawn again, hotter, at
    most `retries` times, then skipped). Temperature, except under "keep": when a share of `trigger` or more of a step's groups collapsed
    (identical, failed or tied), it is raised by the factor `heat`, up to `ceiling` times the base; when `release`
    or fewer did, it returns by the factor `cool`; in between it stays. `solved` groups never raise it. `raise_temperature` does,
    when asked.

    Two alarms, each said once until it clears (at `release` or less): more than `alarm_share` of the groups degenerate, and `alarm_share` or
    more of the completions in one and the same trap, for `alarm_steps` steps in a row. First tries count.
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
        self.policy, self.base, self.threshold, self.retries = (
            policy,
            temperature,
            threshold,
            retries,
        )
        self.heat, self.ceiling, self.cool, self.trigger, self.release = (
            heat,
            ceiling,
            cool,
            trigger,
            release,
        )
        self.alarm_share, self.alarm_steps = alarm_share, alarm_steps
        self.temperature = temperature
        self.wasted = 0  # tokens of groups that were not learned from
        self.recent: deque[dict[str, int]] = deque(
            maxlen=alarm_steps
        )  # classes of the last steps with most groups degenerate
        self.alarmed = False
        self.traps: deque[dict[str, list[float]]] = deque(
            maxlen=alarm_steps
        )  # of the last steps: trap -> share, mean reward, mean value
        self.trap: str | None = None  # the one that alarm was raised for
        self.collapse: list[
            str
        ] = []  # alarms of the last step, but for that of solved groups: nothing is lost there

    def decide(self, verdict: str, attempt: int) -> str:
        """Return "keep", "skip" or "resample" for a group of class `verdict`, drawn for the time number `attempt` (from 0)."""
        if verdict == "varied" or self.policy == "keep":
            return "keep"
        again = self.policy == "resample" and verdict != "solved" and attempt < self.retries
        return "resample" if again else "skip"

    def retry_temperature(self, attempt: int) -> float:
        """Return the temperature of try number `attempt` (1, 2, ...): hotter each time, up to the ceiling."""
        return min(self.temperature * self.heat**attempt, self.base * self.ceiling)

    def observe(self, groups: Sequence[Group]) -> list[str]:
        """Take note of every group of a step, all tries; return the lines to be said."""
        self.wasted += _wasted(groups)
        counts = Counter(group.verdict for group in groups if group.attempt == 0)
        total = sum(counts.values())
        collapsed = sum(counts[name] for name in COLLAPSED) / total
        self.collapse = self._watch_traps(
            [score for group in groups if group.attempt == 0 for score in group.scores]
        )
        return (
            self._adjust(collapsed)
            + [*self.collapse]
            + self._watch_groups(counts, 1 - counts["varied"] / total)
        )

    def raise_temperature(self) -> str:
        """Raise the temperature once, under every `policy`, because the curriculum steps back; return what was done, in words."""
        before, top = self.temperature, self.base * self.ceiling
        self.temperature = min(before * self.heat, top)
        return f"temperature {before:.3f} → {self.temperature:.3f}" + (
            ", its ceiling" if self.temperature == top else ""
        )

    def _adjust(self, collapsed: float) -> list[str]:
        before, top = self.temperature, self.base * self.ceiling
        if self.policy != "keep" and collapsed >= self.trigger:
            self.temperature = min(before * self.heat, top)
        elif collapsed <= self.release:
            self.temperature = max(before / self.cool, self.base)
        if self.temperature == before:
            return []
        return [
            f"temperature {before:.3f} → {self.temperature:.3f}: {collapsed:.0%} of the groups collapsed"
        ]

    def _watch_groups(self, counts: Counter, degenerate: float) -> list[str]:
        if degenerate <= self.alarm_share:
            self.recent.clear()
            self.alarmed = self.alarmed and degenerate > self.release
            return []
        self.recent.append(dict(counts))
        if self.alarmed or len(self.recent) < self.alarm_steps:
            return []
        self.alarmed = True
        causes = Counter()
        for step in self.recent:
            causes.update(step)
        total = causes.total()
        del causes["varied"]
        cause, _ = causes.most_common(1)[0]
        shares = ", ".join(f"{count / total:.0%} {name}" for name, count in causes.most_common())
        line = f"ALARM: for {self.alarm_steps} steps most groups carry no gradient ({shares}); {REMEDIES[cause]}"
        self.collapse += [line] if cause != "solved" else []
        return [line]

    def _watch_traps(self, scores: Sequence[Score]) -> list[str]:
        inside: dict[str, list[Score]] = {}
        for score in scores:
            inside.setdefault(score.parts.get("trap"), []).append(score)
        step = {
            name: [
                len(those) / len(scores),
                fmean(score.reward for score in those),
                fmean(score.value for score in those),
            ]
            for name, those in inside.items()
            if name
        }
        self.traps.append(step)
        if self.trap and step.get(self.trap, [0])[0] <= self.release:
            self.trap = None
        lasting = [
            name
            for name in step
            if all(past.get(name, [0])[0] >= self.alarm_share for past in self.traps)
        ]
        if len(self.traps) < self.alarm_steps or not lasting or self.trap in lasting:
            return []
        self.trap = lasting[0]
        shares, rewards, values = zip(*(past[self.trap] for past in self.traps))
        return [
            f"ALARM: for {self.alarm_steps} steps {fmean(shares):.0%} of the completions are the trap '{self.trap}', paid "
            f"{fmean(rewards, shares):.2f} (score {fmean(values, shares):.2f}): {TRAP_REMEDY}"
        ]

    def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the step's counts and spreads; classes, spreads and traps are of first tries, so heat does not flatter them."""
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
        return {
            "temperature": self.temperature,
            "wasted": self.wasted,
            "recent": list(self.recent),
            "alarmed": self.alarmed,
            "traps": list(self.traps),
            "trap": self.trap,
            "collapse": self.collapse,
        }

    def load_state_dict(self, state: dict[str, Any]):
        self.temperature, self.wasted, self.alarmed = (
            state["temperature"],
            state["wasted"],
            state["alarmed"],
        )
        self.recent = deque(state["recent"], maxlen=self.alarm_steps)
        self.traps = deque(state["traps"], maxlen=self.alarm_steps)
        self.trap, self.collapse = state["trap"], state["collapse"]


def _wasted(groups: Sequence[Group]) -> int:
    return sum(group.tokens for group in groups if group.action != "keep")

"""The ladder: levels climbed one after the other, with replay, budgets, and a step back on
collapse.

A curriculum has `rungs` (its levels), `level` (the one that training is at), `ended` (why there is
nothing left to climb; "" while there is), `levels_for` a step, `observe` what came of it,
`wants_look` (at held-out problems) and a state.
"""

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from grpo.records import Decision, StepSummary
from grpo.statistics import least_n, mean_interval
from tasks.levels import LADDER

PROMOTE_AT = {
    "running": 0.9,
    "heldout": 0.97,
}  # the mark where none is asked for; the running mean lags behind
# How far below the mark the lower end of the mean's 95 % interval may lie. Whatever the scores look
# like, a policy whose true mean is below promote_at - MARGIN passes one test in 40 at most; the
# probabilities at other means are tables in runs/LOG.md. Training whose mean is within MARGIN of
# the mark is worth a look, for it lags and is noisy itself.
MARGIN = 0.05


def is_shown(mean: float, low: float, mark: float) -> bool:
    """Return whether a mean whose 95 % interval begins at `low` shows that `mark` is reached."""
    return mean >= mark and low >= mark - MARGIN


def problems_needed(mark: float) -> int:
    """Return how many problems it takes to show that `mark` is reached, if all are solved."""
    return least_n(mark - MARGIN)


def ramp_to(level: int) -> list[int]:
    """Return the rungs of the ladder below `level`, and `level`.

    >>> ramp_to(40)
    [10, 25, 40]
    """
    return [rung for rung in LADDER if rung < level] + [level]


def level_draws(seed: int, step: int, drawn: int) -> random.Random:
    """Return the generator that a step's levels are drawn with, after so many `drawn` ones."""
    return random.Random(
        hashlib.sha256(f"levels/{seed}/{step}{f'/{drawn}' if drawn else ''}".encode()).digest()
    )


class Curriculum:
    """The level of each prompt of a step. One rung is a fixed level.

    Promotion: the next rung is reached at a mean score of `promote_at` on this one, if the mean's
    95 % interval begins no more than MARGIN below. By `promote_by` "running" that is the mean over
    the groups of the last `window` steps, or of as many more as it takes to have `least_groups`; a
    group counts once, because its completions share their problem. By "heldout" it is the mean of a
    look: an evaluation on held-out problems every `promote_every` steps, once the running mean is
    within MARGIN of the mark. With `stop` the last rung is climbed likewise, and then the run has
    `ended`.

    Replay: a share `replay` of the prompts comes from earlier rungs, most from those whose last
    known score is lowest.

    Step back: when `collapse_at` or more of the current rung's groups collapse for `collapse_steps`
    steps in a row, training goes one rung back, unless that rung's budget is spent. Each step back
    from a rung doubles the evidence asked for: twice as many collapsed steps before the next step
    back, and as many steps of practice below before the rung is tried again. So a rung that stays
    out of reach is tried less and less often.

    Budget: `rung_seconds` of steps or `rung_tokens` sampled (0: none) count all the steps ever made
    on a rung. Once one is spent, training goes on to the next rung; on the last one the run has
    `ended`.
    """

    def __init__(
        self,
        rungs: list[int],
        *,
        promote_by: str = "running",
        promote_at: float = 0.9,
        window: int = 3,
        promote_every: int = 10,
        replay: float = 0.25,
        collapse_at: float = 0.9,
        collapse_steps: int = 8,
        rung_seconds: float = 0,
        rung_tokens: int = 0,
        stop: bool = False,
    ):
        assert rungs and 0 <= replay < 1 and window >= 1 and promote_by in ("running", "heldout")
        self.promote_by, self.promote_every, self.stop = promote_by, promote_every, stop
        self.rungs, self.promote_at, self.window, self.replay = (
            list(rungs),
            promote_at,
            window,
            replay,
        )
        self.collapse_at, self.collapse_steps = collapse_at, collapse_steps
        self.rung_seconds, self.rung_tokens = rung_seconds, rung_tokens
        self.rung = 0
        self.ended = ""
        # Twice what a perfect policy would need, so that a good one passes with some wrong answers.
        self.least_groups = 2 * problems_needed(promote_at)
        # Mean scores of the groups of the last steps on this rung.
        self.recent: deque[list[float]] = deque()
        self.scores: dict[int, float] = {}  # level -> its last known mean score
        self.spent = [
            [0, 0.0, 0] for _ in self.rungs
        ]  # steps, seconds (where they are limited), tokens of each rung
        self.collapsed = 0  # steps in a row
        self.stayed = 0  # steps since the last move
        self.backs = [0] * len(self.rungs)  # steps back from each rung

    @property
    def level(self) -> int:
        """The level that training is at."""
        return self.rungs[self.rung]

    @property
    def is_last(self) -> bool:
        """Whether training is at the last rung."""
        return self.rung + 1 == len(self.rungs)

    @property
    def steps_before_last(self) -> int:
        """How many steps have been made on all rungs but the last."""
        return sum(int(steps) for steps, _, _ in self.spent[:-1])

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the level of each of `count` prompts of a step, after the `drawn` ones: a pure
        function of the arguments and the state; the first has the current level.
        """
        rng, earlier = level_draws(seed, step, drawn), self.rungs[: self.rung]
        weights = [
            1.1 - self.scores.get(rung, 0.0) for rung in earlier
        ]  # no rung is forgotten, be its score 1
        replayed = [bool(earlier) and i > 0 and rng.random() < self.replay for i in range(count)]
        return [rng.choices(earlier, weights)[0] if again else self.level for again in replayed]

    def observe(self, outcome: StepSummary) -> list[Decision]:
        """Take note of a step; return what was decided: one decision or none."""
        self.scores |= {level: fmean(values) for level, values in outcome.values.items()}
        self._remember(outcome.values.get(self.level, []))
        self._count(outcome)

        share = self._collapsed_share(outcome)
        self.collapsed = self.collapsed + 1 if share >= self.collapse_at else 0
        if self._must_step_back():
            return [self._step_back(outcome.step, share)]

        return self._promote(outcome.step) or self._spend(outcome.step)

    def _remember(self, values: list[float]) -> None:
        """Add a step's groups to the window, and drop the steps that it can do without."""
        if values:
            self.recent.append(list(values))
        while (
            len(self.recent) > self.window
            and sum(map(len, self.recent)) - len(self.recent[0]) >= self.least_groups
        ):
            self.recent.popleft()

    def _count(self, outcome: StepSummary) -> None:
        """Charge a step to the budget of its rung."""
        self.stayed += 1
        steps, seconds, tokens = self.spent[self.rung]
        self.spent[self.rung] = [
            steps + 1,
            seconds + outcome.seconds * (self.rung_seconds > 0),
            tokens + outcome.tokens,
        ]

    def _collapsed_share(self, outcome: StepSummary) -> float:
        """Return the share of the current level's groups that collapsed; replayed ones do not
        count.
        """
        groups = outcome.collapsed.get(self.level)
        return fmean(groups) if groups else 0.0

    def _patience(self, rung: int) -> int:
        """Return how many steps are evidence about a rung; each step back from it doubles them."""
        return self.collapse_steps * 2 ** self.backs[rung]

    def _must_step_back(self) -> bool:
        return (
            self.rung > 0
            and self.collapsed >= self._patience(self.rung)
            and not self._is_spent(self.rung - 1)
        )

    def _step_back(self, step: int, share: float) -> Decision:
        steps = self.collapsed
        self.backs[self.rung] += 1
        why = f"{steps} steps with {self.collapse_at:.0%} of the level's groups collapsed"
        return self._move(-1, step, "collapse", why, steps=steps, share=share)

    def _may_climb(self) -> bool:
        """Return whether what follows may be tried: it is new, or was practised for below."""
        above = self.rung + 1
        if above == len(self.rungs):
            return self.stop
        return self.backs[above] == 0 or self.stayed >= self._patience(above)

    def _promote(self, step: int) -> list[Decision]:
        """Return the promotion by the running mean, if that shows the mark."""
        values = [value for groups in self.recent for value in groups]
        if (
            self.promote_by != "running"
            or len(self.recent) < self.window
            or len(values) < self.least_groups
            or not self._may_climb()
        ):
            return []

        mean = fmean(values)
        if mean < self.promote_at:  # without the interval, which takes 10 ms
            return []
        low, high = mean_interval(values)
        if not is_shown(mean, low, self.promote_at):
            return []

        steps, groups = len(self.recent), len(values)
        why = f"running mean {mean:.3f} [{low:.3f}, {high:.3f}] of {groups} groups in {steps} steps"
        return self._climb(
            step, why, mean=mean, ci_low=low, ci_high=high, groups=groups, steps=steps
        )

    def wants_look(self, step: int) -> bool:
        """Return whether the level is to be evaluated on held-out problems after `step`: a look at
        it is due, and not hopeless.
        """
        due = self.promote_by == "heldout" and step % self.promote_every == 0 and not self.ended
        if not (due and self.recent and self._may_climb()):
            return False

        # The last steps alone: a longer window lags further behind a policy that learns.
        last = [value for groups in list(self.recent)[-self.window :] for value in groups]
        return fmean(last) >= self.promote_at - MARGIN

    def judge(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        """Take note of a look at the current level (a line of eval.jsonl); return what was
        decided: going up, the end, or staying.
        """
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        self.scores[self.level] = line["mean"]
        said = (
            f"held-out mean {line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}] "
            "of "
            f"{line['n']} problems"
        )
        if is_shown(line["mean"], line["ci_low"], self.promote_at):
            return self._climb(step, said, **figures)
        asked = (
            f"{self.promote_at:g} is asked for, and an interval from "
            f"{self.promote_at - MARGIN:g} on"
        )
        if line["n"] < (needed := problems_needed(self.promote_at)):
            asked += f", which takes {needed} problems or more"
        return [Decision(step, self.level, self.level, "stay", f"{said}; {asked}", figures)]

    def _climb(self, step: int, why: str, **figures: float) -> list[Decision]:
        if not self.is_last:
            return [self._move(+1, step, "promotion", why, **figures)]
        return [self._end(step, "climbed", f"the last rung is climbed: {why}", **figures)]

    def _is_spent(self, rung: int) -> bool:
        _, seconds, tokens = self.spent[rung]
        return 0 < self.rung_seconds <= seconds or 0 < self.rung_tokens <= tokens

    def _spend(self, step: int) -> list[Decision]:
        if not self._is_spent(self.rung):
            return []
        steps, seconds, tokens = self.spent[self.rung]
        figures = {
            "steps": steps,
            "tokens": tokens,
            **({"minutes": seconds / 60} if self.rung_seconds else {}),
            "score": self.scores.get(self.level),
        }
        used = (
            [f"{seconds / 60:.1f} of {self.rung_seconds / 60:g} minutes"]
            if self.rung_seconds
            else []
        ) + [
            f"{tokens:,}{f' of {self.rung_tokens:,}' if self.rung_tokens else ''} tokens",
            f"{steps} steps",
        ]
        why = (
            f"the budget of the rung is spent: {', '.join(used)}; its last mean score is "
            f"{self.scores.get(self.level, 0):.3f}"
        )
        if not self.is_last:
            return [self._move(+1, step, "budget", why, **figures)]
        return [self._end(step, "budget", why.replace("the rung", "the last rung"), **figures)]

    def _move(self, by: int, step: int, kind: str, why: str, **figures: float | None) -> Decision:
        before = self.level
        self.rung += by
        self.recent.clear()
        self.collapsed = 0
        self.stayed = 0
        return Decision(step, before, self.level, kind, why, figures)

    def _end(self, step: int, kind: str, why: str, **figures: float | None) -> Decision:
        self.ended = why
        return Decision(step, self.level, self.level, kind, why, figures)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "rungs": list(self.rungs),
            "rung": self.rung,
            "ended": self.ended,
            "recent": [list(values) for values in self.recent],
            "scores": list(self.scores.items()),
            "spent": [list(entry) for entry in self.spent],
            "collapsed": self.collapsed,
            "stayed": self.stayed,
            "backs": list(self.backs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of `state_dict`."""
        self.rungs = list(state["rungs"])
        self.rung, self.ended, self.collapsed = state["rung"], state["ended"], state["collapsed"]
        self.stayed, self.backs = state["stayed"], list(state["backs"])
        self.recent = deque(list(values) for values in state["recent"])
        self.scores, self.spent = (
            {level: score for level, score in state["scores"]},
            [list(entry) for entry in state["spent"]],
        )

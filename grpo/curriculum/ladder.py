"""The ladder: levels climbed one after the other, with replay and steps back.

A ladder of one level is a fixed level. docs/curriculum.md describes the rules for users; the
probabilities of promotion are tables in runs/LOG.md.
"""

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.records import Decision, StepSummary
from grpo.statistics import least_n, mean_interval
from tasks.supply import LADDER

# The mean score at which a level is left, unless the user gives one. The running mean has the lower
# mark because it lags behind the policy. At 0.9, a policy whose true mean is 0.96 is promoted
# within 100 steps of 2 prompts, and one of 0.8 hardly ever (runs/LOG.md, 2026-11-23: "Intervals
# near 1, promotion, step back").
PROMOTE_AT = {"running": 0.9, "heldout": 0.97}

# From this mean score on, a level has nothing left to teach. It is higher than 0.99, because the
# mean on other problems may be lower.
SOLVED_MEAN = 0.995

# How far below the mark the mean's 95 % interval may begin. With any distribution of scores, a
# policy whose true mean is below the mark by more than this passes at most one test in 40. It is
# also how close to the mark the training mean must be before a validation check is made, because
# that mean is noisy and lags.
MARGIN = 0.05


def reaches_mark(mean: float, low: float, mark: float) -> bool:
    """Return whether a mean whose 95 % interval begins at `low` is evidence that `mark` is met."""
    return mean >= mark and low >= mark - MARGIN


def problems_needed(mark: float) -> int:
    """Return how many problems it takes to show that `mark` is met, if all of them are solved."""
    return least_n(mark - MARGIN)


def ramp_to(level: int) -> list[int]:
    """Return the levels of the built-in ladder below `level`, and `level` itself.

    >>> ramp_to(40)
    [10, 25, 40]
    """
    return [easier for easier in LADDER if easier < level] + [level]


def level_draws(seed: int, step: int, drawn: int) -> random.Random:
    """Return the generator that draws a step's levels after its first `drawn` prompts."""
    later = f"/{drawn}" if drawn else ""
    return random.Random(hashlib.sha256(f"levels/{seed}/{step}{later}".encode()).digest())


@dataclass(frozen=True)
class LadderSettings:
    """The rules of a ladder. Those without a default are settings of `grpo.config.Config`.

    Promotion: the next level is reached at a mean score of `promote_at`, if the mean's 95 %
    interval begins no more than MARGIN below. With `promote_by` "running" that is the mean over the
    groups of the last `window` steps, or of more steps if these have too few groups. A group counts
    once, because its completions share their problem. With "heldout" it is the mean of a validation
    check: an evaluation on held-out problems, made every `promote_every` steps while the running
    mean is within MARGIN of the mark. A level with too few of them is left by the running mean.
    The last level is never left.

    Replay: a share `replay` of the prompts comes from earlier levels, mostly from those whose last
    score is lowest.

    Step back: if a share `collapse_at` or more of the current level's groups collapses for
    `collapse_steps` steps in a row, training goes back one level, unless that level is solved.
    Each time doubles the evidence: twice as many collapsed steps before the
    next step back, and as many steps of practice below before the level is tried again, or until
    the one below is solved. So a level that stays out of reach is tried less and less often.
    """

    promote_by: str
    promote_at: float
    window: int
    promote_every: int
    replay: float
    # With these two, a level on which every group collapses is left after 8 steps, and tried again
    # ever more rarely: 7 moves in 200 steps, with replay or without. Before the evidence doubled,
    # there were 36 moves without replay, and with replay none at all ("Ladder and servo" in
    # runs/LOG.md, 2026-11-23: "Intervals near 1, promotion, step back").
    collapse_at: float = 0.9
    collapse_steps: int = 8

    def __post_init__(self) -> None:
        assert self.promote_by in ("running", "heldout")
        assert 0 <= self.replay < 1 and self.window >= 1

    @property
    def least_groups(self) -> int:
        """The fewest groups that the running mean is taken over.

        It is twice what a perfect policy would need, so that a good one passes with a few wrong
        answers.
        """
        return 2 * problems_needed(self.promote_at)


class Ladder:
    """Chooses the level of every prompt: it climbs `levels`, which rise, by `LadderSettings`.

    Every method depends on nothing but its arguments and the state, so a resumed run makes the same
    decisions.
    """

    def __init__(self, levels: list[int], settings: LadderSettings):
        assert levels
        self.levels = list(levels)
        self.settings = settings

        self.position = 0  # of the current level in `levels`
        self.scores: dict[int, float] = {}  # level -> its last mean score
        self.steps_back = [0] * len(self.levels)  # from each level, those to a solved one included
        self.by_training: set[int] = set()  # levels with too few held-out problems for a check
        # The steps made before the last level was reached for the first time; None until then.
        self.steps_before_last = None if len(self.levels) > 1 else 0

        # Of the current stay on the current level.
        self.recent: deque[list[float]] = deque()  # mean scores of the groups of the last steps
        self.collapsed = 0  # collapsed steps in a row
        self.stayed = 0  # steps since the last move

    @property
    def level(self) -> int:
        """The level that training is at."""
        return self.levels[self.position]

    @property
    def is_last(self) -> bool:
        """Whether training is at the last level."""
        return self.position + 1 == len(self.levels)

    @property
    def levels_to_check(self) -> list[int]:
        """The levels that are left by a validation check."""
        if self.settings.promote_by == "running":
            return []
        return [level for level in self.levels[:-1] if level not in self.by_training]

    def note_problems(self, level: int, found: int) -> str:
        """Take note of the number of held-out problems of a level; return a warning if they are too
        few to promote by, else "".
        """
        mark = self.settings.promote_at
        if found >= (needed := problems_needed(mark)):
            return ""
        self.by_training.add(level)
        return (
            f"level {level} has {found} held-out problems, and promotion at {mark:g} needs at "
            f"least {needed}: the running mean of its training scores decides instead"
        )

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the levels of `count` prompts of a step, after its first `drawn` prompts.

        The first of them is at the current level.
        """
        rng = level_draws(seed, step, drawn)
        earlier = self.levels[: self.position]
        # 1.1, so that a level is replayed now and then even if its score is 1.
        weights = [1.1 - self.scores.get(level, 0.0) for level in earlier]

        replay = self.settings.replay
        replayed = [bool(earlier) and i > 0 and rng.random() < replay for i in range(count)]
        return [rng.choices(earlier, weights)[0] if again else self.level for again in replayed]

    def observe(self, summary: StepSummary) -> list[Decision]:
        """Take note of a training step; return one decision, or none."""
        self.scores |= {level: fmean(values) for level, values in summary.values.items()}
        self._remember(summary.values.get(self.level, []))
        self.stayed += 1

        share = self._collapsed_share(summary)
        self.collapsed = self.collapsed + 1 if share >= self.settings.collapse_at else 0
        if self._must_step_back():
            return [self._step_back(summary.step, share)]

        return self._promote(summary.step)

    def _remember(self, values: list[float]) -> None:
        """Add a step's groups to the window, and drop the oldest steps that it does not need."""
        if values:
            self.recent.append(list(values))

        def without_oldest() -> int:
            return sum(map(len, self.recent)) - len(self.recent[0])

        least = self.settings.least_groups
        while len(self.recent) > self.settings.window and without_oldest() >= least:
            self.recent.popleft()

    def _collapsed_share(self, summary: StepSummary) -> float:
        """Return the share of the current level's groups that collapsed, without replayed ones."""
        groups = summary.collapsed.get(self.level)
        return fmean(groups) if groups else 0.0

    def _patience(self, position: int) -> int:
        """Return how many steps are evidence about a level; each step back from it doubles them."""
        return self.settings.collapse_steps * 2 ** self.steps_back[position]

    def _must_step_back(self) -> bool:
        return self.position > 0 and self.collapsed >= self._patience(self.position)

    def _step_back(self, step: int, share: float) -> Decision:
        """Go back a level, or stay if the level below has nothing left to teach."""
        steps = self.collapsed
        self.steps_back[self.position] += 1
        why = (
            f"at least {self.settings.collapse_at:.0%} of the level's groups collapsed in {steps} "
            "steps in a row"
        )
        below = self.position - 1
        if not self._is_solved(below):
            return self._move(-1, step, "collapse", why, steps=steps, share=share)

        self.collapsed = 0
        why += f"; level {self.levels[below]} is solved, so going back would teach nothing"
        figures = {"steps": steps, "share": share}
        return Decision(step, self.level, self.level, "collapse", why, figures)

    def _is_solved(self, position: int) -> bool:
        """Return whether a level's last mean score leaves nothing to learn."""
        return self.scores.get(self.levels[position], 0.0) >= SOLVED_MEAN

    def _may_climb(self) -> bool:
        """Return whether the next level may be tried: it is new, or was practised for below as long
        as that taught anything.
        """
        if self.is_last:
            return False
        following = self.position + 1
        is_practised = self.stayed >= self._patience(following) or self._is_solved(self.position)
        return self.steps_back[following] == 0 or is_practised

    def move_on(self, step: int, why: str) -> list[Decision]:
        """Leave a level that teaches nothing any more, unless it is the last."""
        return [] if self.is_last else [self._move(+1, step, "promotion", why)]

    def _promote(self, step: int) -> list[Decision]:
        """Return the promotion by the running mean, if that reaches the mark."""
        settings = self.settings
        values = [value for groups in self.recent for value in groups]
        is_enough = len(self.recent) >= settings.window and len(values) >= settings.least_groups
        if self.level in self.levels_to_check or not is_enough or not self._may_climb():
            return []

        mean = fmean(values)
        if mean < settings.promote_at:  # saves the interval, which takes 10 ms
            return []

        low, high = mean_interval(values)
        if not reaches_mark(mean, low, settings.promote_at):
            return []

        steps, groups = len(self.recent), len(values)
        why = f"running mean {mean:.3f} [{low:.3f}, {high:.3f}] of {groups} groups in {steps} steps"
        figures = dict(mean=mean, ci_low=low, ci_high=high, groups=groups, steps=steps)
        return [self._move(+1, step, "promotion", why, **figures)]

    def wants_validation(self, step: int) -> bool:
        """Return whether a validation check of the current level is due after `step`, and has a
        chance.
        """
        settings = self.settings
        is_due = self.level in self.levels_to_check and step % settings.promote_every == 0
        if not is_due or not self.recent or not self._may_climb():
            return False

        # Only the last steps: a longer window lags further behind a policy that learns.
        last = [value for groups in list(self.recent)[-settings.window :] for value in groups]
        return fmean(last) >= settings.promote_at - MARGIN

    def observe_validation(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        """Take note of a validation check of the current level, a line of eval.jsonl.

        Returns the decision: to climb or to stay.
        """
        mark = self.settings.promote_at
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        self.scores[self.level] = line["mean"]
        result = (
            f"held-out mean {line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}] of "
            f"{line['n']} problems"
        )
        if reaches_mark(line["mean"], line["ci_low"], mark):
            return [self._move(+1, step, "promotion", result, **figures)]

        why = (
            f"{result}; promotion needs a mean of at least {mark:g} and an interval that begins at "
            f"{mark - MARGIN:g} or above"
        )
        return [Decision(step, self.level, self.level, "stay", why, figures)]

    def _move(self, by: int, step: int, kind: str, why: str, **figures: float) -> Decision:
        before = self.level
        self.position += by
        if self.is_last and self.steps_before_last is None:
            self.steps_before_last = step
        self.recent.clear()
        self.collapsed = 0
        self.stayed = 0
        return Decision(step, before, self.level, kind, why, figures)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "levels": list(self.levels),
            "position": self.position,
            "recent": [list(values) for values in self.recent],
            "scores": list(self.scores.items()),
            "collapsed": self.collapsed,
            "stayed": self.stayed,
            "steps_back": list(self.steps_back),
            "steps_before_last": self.steps_before_last,
            "by_training": sorted(self.by_training),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.levels = list(state["levels"])
        self.position = state["position"]
        self.recent = deque(list(values) for values in state["recent"])
        self.scores = {level: score for level, score in state["scores"]}
        self.collapsed = state["collapsed"]
        self.stayed = state["stayed"]
        self.steps_back = list(state["steps_back"])
        self.steps_before_last = state["steps_before_last"]
        self.by_training = set(state["by_training"])

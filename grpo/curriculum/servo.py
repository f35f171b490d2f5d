"""The servo, `--curriculum auto`: each step trains where groups are expected to differ most, with no promotion.

A group's advantages are its rewards' deviations, so a level whose groups have no spread teaches nothing, be it mastered or out of reach; as
in prioritised level replay (arXiv:2010.03934) levels are drawn by what they promise to teach. Rewards are continuous here, so the promise is the
standard deviation of the rewards within a group, averaged over the groups seen of the level.
"""

from statistics import fmean
from typing import Any

from grpo.curriculum.ladder import level_draws
from grpo.records import Decision, Outcome

FADE = 0.95  # what a step leaves of the weight of what is known: half of it after 13 steps
MOST = (
    12.0  # groups that a level's knowledge weighs at most, so that it follows a policy that learns
)
PEAK_FADE = 0.998  # what a step leaves of the largest spread: half of it after 346 steps, because a spread worth leaving for must outlast a slow fall
EXPLORE = 0.15  # share of prompts at the next harder level
CLEARLY = 1.1  # another level must promise so much more before training moves there
FLAT = 0.02  # mean spread of a level that teaches nothing: one of 16 rewards lower by 0.08
FORGOTTEN = 0.1  # weight (in groups) of what is known no more: a full one comes to that in 93 steps


class Servo:
    """The level of each prompt of a step, by expected spread; see `grpo.curriculum.ladder` for what a curriculum is asked.

    Of each level a weighted mean of spread and score is kept, whose weight (in groups) fades. What is expected of a level is its mean spread
    and, with the weight of one group, half the largest spread of late: so much is hoped of a level that is not known any more, and
    of the next one above those that were tried. Levels beyond are not expected anything of. Most prompts are at `level`, the most
    promising one; a share `replay` is spread over easier ones that are mastered (mean score of `mastered_at` or more); a share EXPLORE
    goes to the next harder one.

    A level known to have no spread (FLAT) is left for any other, so that mastered levels do not hold
    training up. Where every level within reach is flat, training goes to the hardest mastered one:
    the next above it is probed by the share EXPLORE, and those beyond are tried again when what is
    known of them is forgotten.
    """

    ended = ""

    def __init__(self, rungs: list[int], *, replay: float = 0.25, mastered_at: float = 0.9):
        assert rungs and 0 <= replay < 1
        self.rungs, self.replay, self.mastered_at = list(rungs), replay, mastered_at
        self.level = self.rungs[0]
        self.known: dict[
            int, tuple[float, float, float]
        ] = {}  # level -> weight, mean spread, mean score
        self.peak = 0.0  # largest mean spread of late

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the level of each of `count` prompts of a step, after the `drawn` ones: a pure function of the arguments and the state."""
        rng = level_draws(seed, step, drawn)
        mastered = [rung for rung in self.rungs if rung < self.level and self.is_mastered(rung)]
        harder = [rung for rung in self.rungs if rung > self.level][:1]
        levels = []
        for _ in range(count):
            share = rng.random()
            if mastered and share < self.replay:
                levels.append(rng.choice(mastered))
            else:
                levels.append(harder[0] if harder and share >= 1 - EXPLORE else self.level)
        return levels

    def expected(self, level: int) -> float:
        """Return the standard deviation within a group that is expected at `level`."""
        weight, spread, _ = self.known.get(level, (0.0, 0.0, 0.0))
        return (weight * spread + self.peak / 2) / (weight + 1)

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Take note of a step; return the move to another level, if that promises clearly more."""
        self.known = {
            level: (weight * FADE, spread, score)
            for level, (weight, spread, score) in self.known.items()
        }
        for level in [level for level in self.rungs if outcome.spreads.get(level)]:
            weight, spread, score = self.known.get(level, (0.0, 0.0, 0.0))
            new = len(outcome.spreads[level])
            mean = lambda old, values: (weight * old + new * fmean(values)) / (weight + new)  # noqa: B023, E731
            self.known[level] = (
                min(weight + new, MOST),
                mean(spread, outcome.spreads[level]),
                mean(score, outcome.values[level]),
            )
        self.peak = max([self.peak * PEAK_FADE, *(spread for _, spread, _ in self.known.values())])
        reach = self.rungs[
            : 1 + max((self.rungs.index(level) + 1 for level in self.known), default=0)
        ]
        best = self._best(reach)
        before, promised, here = self.level, self.expected(best), self.expected(self.level)
        is_flat = self.is_flat(before)
        if best == before or (not is_flat and promised <= CLEARLY * here):
            return []

        self.level = best
        why = f"expected spread within groups {promised:.3f}, against {here:.3f}"
        if is_flat:
            score = self.known[before][2]
            why = f"the groups of level {before} have no spread (mean score {score:.3f})"
        known = [[level, *self.known[level]] for level in sorted(self.known)]
        figures = {"expected": promised, "left": here, "known": known}
        return [Decision(outcome.step, before, best, "spread", why, figures)]

    def is_flat(self, level: int) -> bool:
        """Return whether `level` is known to teach nothing: rewards within its groups are equal."""
        weight, spread, _ = self.known.get(level, (0.0, 0.0, 0.0))
        return weight >= FORGOTTEN and spread < FLAT

    def is_mastered(self, level: int) -> bool:
        return level in self.known and self.known[level][2] >= self.mastered_at

    def _best(self, reach: list[int]) -> int:
        """Return the level within `reach` to train at."""
        promising = [level for level in reach if not self.is_flat(level)]
        if promising:
            return max(promising, key=self.expected)
        return max(filter(self.is_mastered, reach), default=reach[0])

    def wants_look(self, step: int) -> bool:
        """Return False: nothing hangs on held-out problems."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {
            "rungs": list(self.rungs),
            "level": self.level,
            "peak": self.peak,
            "known": [[level, *entry] for level, entry in self.known.items()],
        }

    def load_state_dict(self, state: dict[str, Any]):
        self.rungs = list(state["rungs"])
        self.level, self.peak = state["level"], state["peak"]
        self.known = {level: tuple(entry) for level, *entry in state["known"]}

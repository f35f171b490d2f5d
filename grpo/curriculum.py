"""The curriculum: a ladder of levels, climbed on a running mean, with replay and a step back on collapse."""
import hashlib
import random
from collections import deque
from statistics import fmean
from typing import Any

from tasks.base import UserError

LADDER = (10, 25, 50, 100, 200, 500)  # words of each text


def ramp_to(level: int) -> list[int]:
    """Return the rungs of the ladder below `level`, and `level`.

    >>> ramp_to(40)
    [10, 25, 40]
    """
    return [rung for rung in LADDER if rung < level] + [level]


def parse_rungs(text: str) -> list[int]:
    """Return the rungs written as "10,25,50". Raises UserError unless they are rising positive whole numbers."""
    try:
        rungs = [int(part) for part in text.split(",")]
    except ValueError:
        rungs = []
    if not rungs or rungs[0] < 1 or any(low >= high for low, high in zip(rungs, rungs[1:])):
        raise UserError(f"--curriculum {text}: give rising numbers with commas between them, e.g. 10,25,50")
    return rungs


class Curriculum:
    """Which level each prompt of a step has. One rung is a fixed level.

    The next rung is reached at a mean score of `promote_at` on this one: by `promote_by` "running", that of the last
    `window` steps; by "heldout", that of an evaluation on held-out problems. A share `replay` of the prompts comes from
    earlier rungs. When `collapse_at` or more of the groups collapse for
    `collapse_steps` steps in a row, training goes one rung back.
    """

    def __init__(self, rungs: list[int], *, promote_by: str = "running", promote_at: float = 0.9, window: int = 3,
                 replay: float = 0.25, collapse_at: float = 0.9, collapse_steps: int = 8):
        assert rungs and 0 <= replay < 1 and window >= 1 and promote_by in ("running", "heldout")
        self.promote_by = promote_by
        self.rungs, self.promote_at, self.window, self.replay = list(rungs), promote_at, window, replay
        self.collapse_at, self.collapse_steps = collapse_at, collapse_steps
        self.rung = 0
        self.values: deque[float] = deque(maxlen=window)  # mean scores of the last steps on this rung
        self.collapsed = 0  # steps in a row

    @property
    def level(self) -> int:
        return self.rungs[self.rung]

    def levels_for(self, seed: int, step: int, count: int) -> list[int]:
        """Return the level of each of `count` prompts: a pure function of the arguments and the rung; the first has
        the current level."""
        rng = random.Random(hashlib.sha256(f"levels/{seed}/{step}".encode()).digest())
        earlier = self.rungs[:self.rung]
        replayed = [bool(earlier) and i > 0 and rng.random() < self.replay for i in range(count)]
        return [rng.choice(earlier) if again else self.level for again in replayed]

    def observe(self, step: int, values_by_level: dict[int, list[float]], collapsed_share: float) -> list[str]:
        """Take note of a step: the mean score of each group by level, and the share of groups that collapsed.

        Returns the lines to be said: promotions and steps back, with their figures.
        """
        if values_by_level.get(self.level):
            self.values.append(fmean(values_by_level[self.level]))
        self.collapsed = self.collapsed + 1 if collapsed_share >= self.collapse_at else 0
        if self.collapsed >= self.collapse_steps and self.rung > 0:
            return [self._move(-1, step, f"{self.collapsed} steps with {self.collapse_at:.0%} of the groups collapsed")]
        ready = len(self.values) == self.window and fmean(self.values) >= self.promote_at
        if self.promote_by == "running" and ready and self.rung + 1 < len(self.rungs):
            return [self._move(+1, step, f"running mean {fmean(self.values):.3f} over {self.window} steps")]
        return []

    def observe_heldout(self, step: int, level: int, mean: float, n: int) -> list[str]:
        """Take note of a held-out evaluation: mean score of `n` problems; return the line to be said, if any."""
        ready = self.promote_by == "heldout" and level == self.level and mean >= self.promote_at
        if ready and self.rung + 1 < len(self.rungs):
            return [self._move(+1, step, f"held-out mean {mean:.3f} of {n} problems")]
        return []

    def _move(self, by: int, step: int, why: str) -> str:
        before = self.level
        self.rung += by
        self.values.clear()
        self.collapsed = 0
        return f"step {step}: level {before} → {self.level}, {why}"

    def state_dict(self) -> dict[str, Any]:
        return {"rung": self.rung, "values": list(self.values), "collapsed": self.collapsed}

    def load_state_dict(self, state: dict[str, Any]):
        self.rung, self.collapsed = state["rung"], state["collapsed"]
        self.values = deque(state["values"], maxlen=self.window)

"""When a run saves a checkpoint."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

# Largest share of a run's time that all saves for a new best may take together.
SHARE = 0.05


class CheckpointRules:
    """When to save a checkpoint.

    A step is saved every `every` steps, when the reward first reaches `threshold`, and when it
    exceeds the best reward so far (of the first step, or of the last save for a new best) by more
    than `best_margin`. On a ladder, the best reward is that of the highest level reached: harder
    problems earn less.

    Saves that have a new best as their only reason are at least `spacing` steps apart, which is
    chosen from the cost of the first save (`spacing_for`); until then it is None, and no further
    save of this kind is made.
    """

    def __init__(self, every: int, threshold: float, best_margin: float):
        self.every = every
        self.threshold = threshold
        self.margin = best_margin
        self.spacing: int | None = None
        self.level: int | None = None  # of the best reward
        self.best: float | None = None
        self.passed = False
        self.last: int | None = None  # the step from which the spacing counts
        self.best_step: int | None = None  # the last one that this process saves as a new best

    def decide(self, step: int, reward: float, level: int) -> list[str]:
        """Return the reasons to save after `step` at `level`, whose mean reward is `reward`.

        There may be none. Call it once after each step: the reward is compared with those of the
        calls before.
        """
        reasons = [f"every {self.every} steps"] if step % self.every == 0 else []
        is_regular = bool(reasons)

        if not self.passed and reward >= self.threshold:
            self.passed = True
            reasons.append(f"reward {reward:.3f} first passed {self.threshold:g}")

        if self.level is None:
            self.level = level
        elif level > self.level:
            self.level, self.best = level, None
        if self.best is None:
            self.best = reward
        elif (
            level == self.level
            and reward > self.best + self.margin
            and (reasons or self._is_spaced(step))
        ):
            reasons.append(f"new best reward {reward:.3f} (was {self.best:.3f})")
            self.best, self.best_step = reward, step

        if reasons and (self.last is None or not is_regular):
            self.last = step
        return reasons

    def _is_spaced(self, step: int) -> bool:
        if self.last is None:
            return True
        return self.spacing is not None and step - self.last >= self.spacing

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "best": self.best,
            "level": self.level,
            "passed": self.passed,
            "last": self.last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.best, self.passed, self.last = state["best"], state["passed"], state["last"]
        self.level = state["level"]


def spacing_for(lost: float, duration: float, step_times: Sequence[float]) -> int | None:
    """Return how many steps apart saves for a new best must be.

    Then all of them take at most `SHARE` of the time, and each ends before the next begins.

    - `lost`: seconds that a save costs training: the wait, and the work of the core that writes;
    - `duration`: seconds that a save takes, which are more than `lost` if the disk is slow;
    - `step_times`: seconds of this process's steps. The first one is a warm-up and does not count.

    Returns None if there is no other step.
    """
    if len(step_times) < 2:
        return None
    step = median(step_times[1:])
    return max(1, math.ceil(lost / (SHARE * step)), math.ceil(duration / step))

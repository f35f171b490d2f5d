"""When a run ends early: nothing can be trained on, or the last level seems to be solved."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo.group_metrics import first_tries
from grpo.records import Group
from grpo.variance import DEGENERATE, REMEDIES

# Once SOLVED_SHARE of the groups of the last SOLVED_STEPS steps are solved, a validation check may
# end the run. A few steps are not enough: the score still rises when most groups are solved
# (runs/LOG.md, 2026-11-25).
SOLVED_SHARE = 0.95
SOLVED_STEPS = 10


class EarlyStop:
    """Counts the steps in a row that trained on nothing, and those in a row at which nearly all
    recent groups were solved.

    `patience` is the number of steps without a trained group after which a run stops (0: never).
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.untrained = 0
        self.solved_steps = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=SOLVED_STEPS)  # solved groups, groups
        self.level: int | None = None  # that of the recent steps
        self.classes: Counter[str] = Counter()  # of the groups in the untrained steps
        self.reward = 0.0  # mean of the last step

    def observe(self, groups: Sequence[Group], level: int) -> None:
        """Count a step at a level; `groups` has every try.

        Steps without a trained group count whatever their level, unless the groups were solved:
        solved groups of one level say nothing about the next.
        """
        if self.level != level:
            self.level = level
            self.recent.clear()
            if self._were_solved:
                self.untrained = 0
                self.classes.clear()

        first = first_tries(groups)
        solved = sum(group.class_name == "solved" for group in first)
        self.recent.append((solved, len(first)))
        solved_groups, groups_in_all = map(sum, zip(*self.recent, strict=True))
        is_solved = solved_groups >= SOLVED_SHARE * groups_in_all
        self.solved_steps = (
            self.solved_steps + 1 if is_solved and len(self.recent) == SOLVED_STEPS else 0
        )
        self.reward = fmean(reward for group in first for reward in group.rewards)

        if any(group.teaches for group in groups):
            self.untrained = 0
            self.classes.clear()
            return

        self.untrained += 1
        self.classes.update(group.class_name for group in first)

    @property
    def stopped(self) -> str:
        """Why the run stops: its groups taught nothing for `patience` steps; "" if it does not.

        Solved groups are no reason to stop, because they are no failure (see `exhausted`).
        """
        cause = self._cause
        if cause is None or cause == "solved":
            return ""

        ranked = ", ".join(
            f"{count / self.classes.total():.0%} {name}"
            for name, count in self.classes.most_common()
        )
        return (
            f"no group could be trained on for {self.untrained} steps ({ranked}; reward "
            f"{self.reward:.3f}); {REMEDIES[cause]}"
        )

    @property
    def exhausted(self) -> str:
        """Why there is nothing left to learn: solved groups for `patience` steps; "" if there is
        something.
        """
        if self._cause != "solved":
            return ""
        return f"every training group was solved for {self.untrained} steps"

    @property
    def _were_solved(self) -> bool:
        """Whether nearly all groups of the untrained steps were solved."""
        return self.classes["solved"] > 0.9 * self.classes.total()

    @property
    def _cause(self) -> str | None:
        """The class that explains why nothing could be trained on; None while patience lasts."""
        if not self.patience or self.untrained < self.patience:
            return None
        if self._were_solved:
            return "solved"
        failures = [name for name in DEGENERATE if name != "solved"]
        return max(failures, key=self.classes.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "untrained": self.untrained,
            "solved": self.solved_steps,
            "recent": [list(counts) for counts in self.recent],
            "level": self.level,
            "classes": dict(self.classes),
            "reward": self.reward,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.untrained = state["untrained"]
        self.solved_steps = state["solved"]
        self.recent.clear()
        self.recent.extend((solved, groups) for solved, groups in state["recent"])
        self.level = state["level"]
        self.classes = Counter(state["classes"])
        self.reward = state["reward"]

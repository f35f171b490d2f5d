"""What the trainer and the run need of a curriculum."""

from collections.abc import Mapping
from typing import Any, Protocol

from grpo.records import Decision, StepSummary


class Curriculum(Protocol):
    """Chooses the level of every prompt, and decides when training moves to another level.

    `levels` are the levels of training, in rising order. `ended` says why there is nothing left to
    train; "" while there is. Every method depends on nothing but its arguments and the state, so
    that a resumed run makes the same decisions.
    """

    levels: list[int]
    ended: str

    @property
    def level(self) -> int:
        """The level that training is at."""
        ...

    @property
    def steps_before_last(self) -> int | None:
        """The steps made before the last level was reached for the first time; None until then."""
        ...

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the levels of `count` prompts of a step, after its first `drawn` prompts."""
        ...

    def observe(self, summary: StepSummary) -> list[Decision]:
        """Take note of a training step; return the decisions that follow from it."""
        ...

    def wants_validation(self, step: int) -> bool:
        """Return whether the current level is to be evaluated on held-out problems after `step`."""
        ...

    def observe_validation(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        """Take note of that evaluation, a line of eval.jsonl; return the decisions."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...

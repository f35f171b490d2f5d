"""Functions of the user's own that are called after each step."""

from collections.abc import Callable
from typing import Any

from grpo.records import StepReport
from tasks.base import UserError, calling

# Its result is ignored. Numbers that it adds to the report's metrics are stored with them.
Callback = Callable[[StepReport], Any]


def run_callback(callback: Callback, report: StepReport) -> None:
    """Call `callback` with the report of a step.

    Raises UserError if it raises, or adds a metric that is not a number.
    """
    before = set(report.metrics)
    where = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
    with calling(f"{where}, step {report.step}"):
        callback(report)

    for name, value in report.metrics.items():
        if name not in before and type(value) not in (int, float):
            raise UserError(f"{where}: its metric {name} is {value!r}; it must be a number")

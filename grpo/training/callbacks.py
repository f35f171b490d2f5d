"""Functions of the user's own that are called after each step."""

from collections.abc import Callable
from typing import Any

from data.text import shown
from grpo.records import StepReport
from tasks.base import UserError, calling

# Its result is ignored. Numbers that it adds to the report's metrics are stored with them.
Callback = Callable[[StepReport], Any]


def run_callback(callback: Callback, report: StepReport) -> None:
    """Call `callback` with the report of a step.

    Raises UserError if it raises, adds a metric that is not a number, or changes what the run
    stores: a metric that was there before, or the list of groups.
    """
    before, groups = dict(report.metrics), list(report.groups)
    where = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
    with calling(f"{where}, step {report.step}"):
        callback(report)

    for name, value in report.metrics.items():
        if name not in before and type(value) not in (int, float):
            raise UserError(f"{where}: its metric {name} is {shown(value)}; it must be a number")
    for name, value in before.items():
        if name not in report.metrics or report.metrics[name] is not value:
            raise UserError(f"{where}: it has changed the metric {name}; add one of another name")
    if list(map(id, report.groups)) != list(map(id, groups)):
        raise UserError(f"{where}: it has changed the list of groups; make a copy")

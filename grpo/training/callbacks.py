"""Functions of the user's own that are called after each step."""

import inspect
from collections.abc import Callable
from typing import Any

from data.errors import UserError
from data.text import is_encodable, shown
from grpo.records import Group, StepReport
from tasks.user_code import calling, process_unchanged

# Its result is ignored. Numbers that it adds to the report's metrics are stored with them.
Callback = Callable[[StepReport], Any]


def run_callback(callback: Callback, report: StepReport) -> None:
    """Call `callback` with the report of a step.

    Raises UserError if it is a coroutine function, if it raises, if it changes the process
    (`process_unchanged`), if it adds a metric that is not a number, or if it changes what the run
    stores: a metric that was there before, an event, or the groups with their scores and
    advantages.
    """
    where = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
    if inspect.iscoroutinefunction(callback):
        raise UserError(f"{where}: is async, and nothing would wait for it; give a plain function")

    before = dict(report.metrics)
    events, groups = list(report.events), list(report.groups)
    parts = [_parts(group) for group in groups]
    with process_unchanged(where), calling(f"{where}, step {report.step}"):
        callback(report)

    for name, value in report.metrics.items():
        if not isinstance(name, str) or not is_encodable(name):
            raise UserError(f"{where}: it has added a metric named {name!a}; give a text")
        if name not in before:
            plain = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or PyTorch
            if type(plain) not in (int, float):
                raise UserError(f"{where}: its metric {name} is {shown(value)}; give a number")
            report.metrics[name] = plain
    for name, value in before.items():
        if name not in report.metrics or report.metrics[name] is not value:
            raise UserError(f"{where}: it has changed the metric {name}; add one of another name")
    if list(map(id, report.groups)) != list(map(id, groups)):
        raise UserError(f"{where}: it has changed the list of groups; make a copy")
    if report.events != events:
        raise UserError(f"{where}: it has changed the events; make a copy")
    if [_parts(group) for group in groups] != parts:
        raise UserError(f"{where}: it has changed a group; make a copy")


def _parts(group: Group) -> tuple[Any, ...]:
    """Return what a group holds, as it was: its records cannot be changed, its lists can."""
    return (*map(list, (group.completions, group.scores, group.advantages)), group.action)

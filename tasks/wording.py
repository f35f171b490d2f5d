"""Prompts in the user's own words (--wording)."""

import string
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from data.errors import UserError
from tasks.protocol import Problem, Task

# For each placeholder, the function that makes its text from a problem's data.
Placeholders = Mapping[str, Callable[[Mapping[str, Any]], str]]

BRACES = "a brace that is text is written twice"


def check_placeholders(wording: str, placeholders: Placeholders, *, task: str, where: str) -> None:
    """Raise UserError unless `wording` has all `placeholders` of the task and no others.

    `where` is the flag or file that holds the wording.
    """
    if not placeholders:
        raise UserError(
            f"{where}: task {task} has no placeholders, so its wording cannot be replaced"
        )

    known = ", ".join(f"{{{name}}}" for name in placeholders)
    try:
        found = _fields_of(wording)
    except ValueError as error:
        raise UserError(
            f"{where}: {error}; task {task} has the placeholders {known}, and {BRACES}"
        ) from error

    for name in found:
        if name not in placeholders:
            raise UserError(
                f"{where}: no placeholder of task {task} is called {name!r}; it has {known}, and "
                f"{BRACES}"
            )
    for name in placeholders:
        if name not in found:
            raise UserError(f"{where}: lacks {{{name}}}; task {task} has the placeholders {known}")


def _fields_of(wording: str) -> list[str]:
    """Return what is written between braces: ["a", "b"] for "A: {a}, B: {b}".

    Raises ValueError if the braces do not match.
    """
    fields = []
    for _, name, form, conversion in string.Formatter().parse(wording):
        if name is not None:
            suffix = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            fields.append(name + suffix)
    return fields


def worded(task: Task, problem: Problem) -> Problem:
    """Return `problem` with its prompt in the wording that `load_task` gave the task, if any.

    Raises UserError if the problem's data lacks what a placeholder needs.
    """
    wording = getattr(task, "wording", "")
    placeholders: Placeholders = getattr(task, "placeholders", {})
    if not (wording and placeholders):
        return problem

    try:
        texts = {name: text_of(problem.data) for name, text_of in placeholders.items()}
    except (LookupError, TypeError) as error:
        raise UserError(
            f"task {task.name}, problem {problem.key}: its data lacks what the placeholders of "
            f"--wording stand for ({type(error).__name__}: {error})"
        ) from error
    return replace(problem, prompt=wording.format(**texts))

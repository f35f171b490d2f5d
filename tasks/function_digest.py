"""Fingerprints of the user's functions that are given in Python: rewards and losses.

A resumed run compares them with those of its checkpoint. A fingerprint covers the function's own
code, without comments and layout, its decorators and defaults, and the numbers and texts that it
takes from enclosing functions. It does not cover what the function calls.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tasks.protocol import key_of

PLAIN = (bool, int, float, str, bytes, type(None))


def function_digest(function: Callable) -> str:
    """Return 16 hex digits that stand for what a function, or another callable, does.

    >>> function_digest(lambda x: x + 1) == function_digest(lambda x:  x+1)
    True
    """
    return key_of(*_parts(function))


def _parts(function: Any) -> Iterator[str]:
    if isinstance(function, partial):
        yield from _parts(function.func)
        yield from map(_plain, function.args)
        yield from (f"{name}={_plain(value)}" for name, value in sorted(function.keywords.items()))
        return

    if inspect.ismethod(function):
        function = function.__func__
    elif not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function)  # of an object with __call__
    try:
        yield _source(function)
    except (OSError, TypeError, SyntaxError, ValueError):  # e.g. its code was made at run time
        yield function.__qualname__

    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield _plain(cell.cell_contents)
        except ValueError:  # an empty cell
            continue


def _source(function: Any) -> str:
    """Return the source code of a function or a class, without comments and layout.

    Raises OSError, TypeError or SyntaxError if it cannot be found.
    """
    if isinstance(function, type):
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))

    # The lines of a lambda alone may be the middle of a call, which cannot be parsed.
    function = inspect.unwrap(function)
    lines, _ = inspect.findsource(function)
    first = function.__code__.co_firstlineno
    found = [
        ast.unparse(node)
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        == first
    ]
    if not found:
        raise OSError("no function begins in this line")
    return "\n".join(found)


def _plain(value: Any) -> str:
    """Return a number or a text as it is, and the type of anything else."""
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__

"""Makes text of a model, a file or a command line safe to show."""

import shlex


def escape_control(text: str) -> str:
    """Return `text` on one line, with unprintable characters spelled out.

    These are escape codes, line breaks, direction marks and the like.

    >>> escape_control("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():  # as most texts are, and much faster
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable(text: str) -> str:
    """Return `text` with its line breaks, and everything else unprintable spelled out."""
    return "\n".join(map(escape_control, text.split("\n")))


def quoted(path: object) -> str:
    """Return a path as a shell takes it, e.g. ``'runs/two words'``; escaped as `escape_control`."""
    return escape_control(shlex.quote(str(path)))


def shortened(text: str, most: int = 80) -> str:
    """Return `text` escaped, without its middle if it has more than `most` characters.

    >>> shortened("one two three four five", 11)
    'one t … five'
    """
    shown = escape_control(text)
    if len(shown) <= most:
        return shown
    half = most // 2
    return f"{shown[:half]} … {shown[-half:]}"


def shown(value: object) -> str:
    """Return the `repr` of a user's value, shortened; the name of its type if it has none."""
    try:
        return shortened(repr(value))
    except Exception:
        return f"a value of type {type(value).__name__}"

"""Text of a model or a file, made harmless wherever it is shown."""


def visible(text: str) -> str:
    """Return `text` on one line, each unprintable character spelled out: escape codes, line breaks, direction marks.

    >>> visible("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )

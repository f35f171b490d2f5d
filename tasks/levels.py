"""The levels of the default ladder, and how lists of levels are written."""

from itertools import pairwise

from data.errors import UserError

LADDER = (10, 25, 50, 100, 200, 500)  # words of each text


def parse_levels(text: str, flag: str, *, must_rise: bool = False) -> list[int]:
    """Return the levels written as "10,25,50".

    Raises UserError, which names `flag`, unless they are whole numbers above 0, and rising ones if
    they `must_rise`.

    >>> parse_levels("10, 25", "--words")
    [10, 25]
    """
    parts = [part.strip() for part in text.split(",")]
    levels = [int(part) if part.isascii() and part.isdecimal() else 0 for part in parts]
    rises = all(low < high for low, high in pairwise(levels))
    if 0 in levels or (must_rise and not rises):
        kind = "rising whole numbers" if must_rise else "whole numbers above 0"
        raise UserError(f"{flag} {text}: give {kind} with commas between them, e.g. 10,25,50")
    return levels

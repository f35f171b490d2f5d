"""Compare a completion with its target, word by word, as coloured text.

Nothing depends on colour alone, because the text has the marks of wdiff: `[-missing-]`,
`{+added+}`, and both for a word that replaces another. The alignment is that of Needleman and
Wunsch, scored as the reward is (match 1, mismatch -1, gap -1).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

from align.needleman import nw_align
from align.words import split_words
from data.text import escape_control

STYLES = {"substitute": "bold magenta", "delete": "bold red", "insert": "bold blue"}
NAMES = {"match": "right", "substitute": "substituted", "delete": "missing", "insert": "added"}

# In a long run of right words, this many are shown at each end.
CONTEXT = 6


class Column(NamedTuple):
    """One word of an alignment.

    `kind` is "match", "substitute", "delete" (`written` is None), "insert" (`wanted` is None), or
    "plain": there is no target text to compare with.
    """

    kind: str
    wanted: str | None
    written: str | None


def aligned(target: str, text: str) -> list[Column]:
    """Return a best alignment of the words of `text` with those of `target`, if it has any.

    >>> [column.kind for column in aligned("the old owl", "the owl saw")]
    ['match', 'delete', 'match', 'insert']
    """
    wanted, written = split_words(target), split_words(text)
    if not wanted:
        return [Column("plain", None, word) for word in written]
    return [
        Column(
            op.kind, None if op.i is None else wanted[op.i], None if op.j is None else written[op.j]
        )
        for op in nw_align(wanted, written).ops
    ]


def counts(columns: Sequence[Column]) -> str:
    """Return the number of words of each kind, e.g. "3 right, 1 missing"."""
    if not columns or columns[0].kind == "plain":  # an empty text without a target has none
        return f"{len(columns)} word{'s' * (len(columns) != 1)}"
    numbers = Counter(column.kind for column in columns)
    return ", ".join(
        f"{numbers[kind]} {name}"
        for kind, name in NAMES.items()
        if numbers[kind] or kind == "match"
    )


def first_divergence(target: str, text: str) -> str:
    """Return where the text first differs from its target; "" if it does not, or there is none.

    An example is "word 3: wrote 'saw' for 'owl'".
    """
    wanted, written = split_words(target), split_words(text)
    at = next(
        (i for i, (x, y) in enumerate(zip(wanted, written)) if x != y),
        min(len(wanted), len(written)),
    )
    if not wanted or at == len(wanted) == len(written):
        return ""

    if at == len(written):
        return f"word {at + 1}: ended before '{escape_control(wanted[at])}'"
    wrote = f"word {at + 1}: wrote '{escape_control(written[at])}'"
    if at == len(wanted):
        return f"{wrote} after the end"
    return f"{wrote} for '{escape_control(wanted[at])}'"


def rendered(columns: Sequence[Column], *, whole: bool = False) -> Text:
    """Return the alignment as text.

    Unless `whole`, the middle of a long run of right words is replaced by their number.
    """
    pieces: list[Text] = []
    for right, same in groupby(columns, lambda column: column.kind in ("match", "plain")):
        run = list(same)  # neighbouring words that are all right, or all wrong
        words = [_word(column) for column in run]
        hidden = len(run) - 2 * CONTEXT
        if right and not whole and hidden > CONTEXT:
            what = "right" if run[0].kind == "match" else "more"
            words[CONTEXT:-CONTEXT] = [Text(f"… {hidden} {what} …", "dim")]
        pieces += words
    return Text(" ").join(pieces)


def _word(column: Column) -> Text:
    kind, wanted, written = column
    if kind in ("match", "plain"):
        return Text(escape_control(written or ""))
    missing = f"[-{escape_control(wanted)}-]" if wanted is not None else ""
    added = f"{{+{escape_control(written)}+}}" if written is not None else ""
    return Text(missing + added, STYLES[kind])

"""The search in a run's completions that the server of a live page answers.

A text matches if it contains the query, in upper or lower case alike. The texts are those that the
page shows: the prompt of each group, and each distinct text of its completions, with its words
separated by single spaces. `report_search.js` searches the completions in a file by the same rule;
`tests/grpo/report/test_report_search.py` compares the two.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data.text import printable
from grpo.records import Group
from grpo.run.reader import RunData
from grpo.tools.report.samples import escape_words, first_samples

# An answer covers whole steps. It ends after the step in which it has this many matches, or has
# taken this many seconds; the page asks for the rest when it needs it.
ENOUGH = 40
SECONDS = 0.5

# The characters that are shown of a text: before a match, and from its beginning.
BEFORE = 40
FROM = 60


@dataclass(frozen=True)
class Find:
    """A text that matches, e.g. ``Find(12, 3, 10, "the old grey owl")``.

    `group` and `completion` are counted from 0. The completion is the first one with this text;
    None if the match is in the prompt. `text` is an excerpt around the match.
    """

    step: int
    group: int
    completion: int | None
    text: str


def search(run: RunData, query: str, after: int, until: int) -> dict[str, Any]:
    """Return the matches in the steps from `after` + 1 to `until`, as far as the answer goes.

    "finds" holds them in the order of the steps, "searched" is the last step that was searched. The
    `query` is in lower case, with single spaces. Raises UserError if a file is damaged.
    """
    end = time.monotonic() + SECONDS
    finds: list[Find] = []
    for step in run.steps():
        if not after < step <= until:
            continue
        finds += finds_in(step, run.groups(step), query)
        after = step
        if len(finds) >= ENOUGH or time.monotonic() > end:
            break
    else:
        after = until
    return {"finds": [asdict(find) for find in finds], "searched": after}


def finds_in(step: int, groups: Sequence[Group], query: str) -> Iterator[Find]:
    """Yield the matches in the groups of a step: for each group its prompt, then completions."""
    for number, group in enumerate(groups):
        prompt = printable(group.problem.prompt)
        if query in prompt.lower():
            yield Find(step, number, None, excerpt(prompt, query))

        for sample in dict.fromkeys(first_samples(group)):
            words = escape_words(group.texts[sample])
            if query in words.lower():
                yield Find(step, number, sample, excerpt(words, query))


def excerpt(text: str, query: str) -> str:
    """Return the part of `text` around the first match of `query`.

    >>> excerpt("one two three four five six seven eight nine ten eleven", "ten")
    '… three four five six seven eight nine ten eleven'
    """
    at = text.lower().index(query)
    start = max(0, at - BEFORE)
    return ("… " if start else "") + text[start : at + FROM]

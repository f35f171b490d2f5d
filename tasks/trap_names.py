"""Which cheap strategy a completion follows: the name of the trap it is in, if it is in one.

Seen from word to word: each pair of neighbours is a step that goes on along A, along B, in turn
(as the target does) or out of turn (A and B in turns, with one of them ahead of its place). A
strategy is one kind of step throughout, or one kind up to some place and another from there. A
slip spoils a step or two, so shares of steps stay what they are where texts compared place by
place, or words counted, would not.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

ALONG_A, ALONG_B, IN_TURN, B_LEADS, OUT_OF_TURN = range(
    5
)  # B leads by one word: the commonest way to be out of turn
MOST = 0.7  # share of steps that makes a strategy
# share of steps that two kinds must explain beyond one alone, and LEAST of them: more than one
# slip spoils
MORE = 0.1
LEAST = 3
ALONE = {ALONG_A: "copies A", ALONG_B: "copies B", B_LEADS: "B first", OUT_OF_TURN: "turn lost"}
CHANGES = {
    (ALONG_A, ALONG_B): "A then B",
    (ALONG_B, ALONG_A): "B then A",
    (IN_TURN, ALONG_A): "runs on in A",
    (IN_TURN, ALONG_B): "runs on in B",
    (IN_TURN, OUT_OF_TURN): "turn lost",
}


class TrapNames:
    """Knows the steps of one problem: texts `a` and `b`, and `target`, their interleaving."""

    def __init__(self, a: Sequence[str], b: Sequence[str], target: Sequence[str]):
        self.a, self.b, self.target, self.words = a, b, target, {*a, *b}

    @cached_property
    def kinds(self) -> dict[tuple[str, str], int]:
        """(word, next word) -> a bit for each kind that this step can be. Made when the first name
        is asked for: right answers need none.
        """
        kinds: dict[tuple[str, str], int] = defaultdict(int)

        def add(kind: int, words: Sequence[str], following: Sequence[str]) -> None:
            for step in zip(words, following):
                kinds[step] |= 1 << kind

        for kind, text in ((ALONG_A, self.a), (ALONG_B, self.b)):
            add(kind, text, text[1:])
            add(kind, text, text[2:])  # a word was left out
        add(IN_TURN, self.target, self.target[1:])
        for lead in (
            -2,
            -1,
            1,
            2,
            # by how many words B is ahead: the step from A's word i goes to B's i + lead, and on to
            # A's i + 1
        ):
            for kind in (OUT_OF_TURN, *[B_LEADS][: lead == 1]):
                add(kind, self.a[max(0, -lead) :], self.b[max(0, lead) :])
                add(kind, self.b[max(0, lead - 1) :], self.a[max(0, 1 - lead) :])
        return dict(kinds)

    def name(self, words: Sequence[str], matches: Sequence[tuple[int, int]]) -> str | None:
        """Return the trap that a completion of these `words` is in, None if it is in none that has
        a name.

        `matches` are the places (in the completion, in the target) of the words that its best
        alignment matches. Strategies are those of `tasks.traps.strategies`, each wherever it
        begins or stops; besides "turn lost" (from some place on, or by more than a word), "runs
        on" (past the end of a whole answer) and "empty". What is nearly right has to be kept out
        by the caller.
        """
        if not words:
            return "empty"
        wanted = len(self.target)
        if (
            len(words) > 1.1 * wanted
            and sum(self.kinds.get(step, 0) >> IN_TURN & 1 for step in pairwise(words[:wanted]))
            >= MOST * wanted
        ):
            return "runs on"
        known = [word for word in words if word in self.words]
        if len(known) < MOST * len(words):
            return None
        once = [word for word, before in zip(known, [None, *known]) if word != before]
        found = self._strategy(once)
        if found == IN_TURN:
            reached = (
                sum(j >= 0.75 * wanted for _, j in matches) > 0.125 * wanted
            )  # half of its last quarter
            return "stops half way" if len(words) < 0.8 * wanted and not reached else None
        if not isinstance(found, int):
            return found
        if found in (ALONG_A, ALONG_B) and 1.5 * len(once) <= len(known):
            return ALONE[found].replace("copies", "doubles")
        return ALONE[found]

    def _strategy(self, words: Sequence[str]) -> int | str | None:
        """Return the kind of most steps, else the name of the change that explains most of them,
        if any does.
        """
        steps = [self.kinds.get(step, 0) for step in pairwise(words)]
        if not steps:
            return IN_TURN if words[:1] == self.target[:1] else None
        seen = np.array(steps)[:, None] >> np.arange(5) & 1  # (steps, kinds)
        before = np.concatenate(
            [np.zeros((1, 5), int), seen.cumsum(axis=0)]
        )  # how many of the first k steps are of a kind
        total = before[-1]
        alone = max(range(5), key=lambda kind: total[kind])
        if alone == OUT_OF_TURN and total[B_LEADS] >= MOST * len(
            steps
        ):  # some steps of a slip are out of turn otherwise
            alone = B_LEADS
        more, gains = max(LEAST, MORE * len(steps)), {}
        for (first, then), name in CHANGES.items():
            explained = (before[:, first] + total[then] - before[:, then]).max()
            if (
                explained >= MOST * len(steps)
                and explained - max(total[first], total[then]) >= more
            ):
                gains[name] = explained
        best = max(gains, key=gains.__getitem__, default=None)
        if best and gains[best] - total[alone] >= more:
            return best
        return alone if total[alone] >= MOST * len(steps) else None

"""Recognise the cheap strategy (the trap) that a completion follows, if it follows one.

Each pair of neighbouring words is a step. A step continues in A, continues in B, takes turns (as
the target does), or takes turns with one text ahead of its place. A strategy is one kind of step
throughout, or one kind up to some place and another kind from there on. Shares of steps are robust:
a single mistake changes one or two steps, whereas it would shift all later words if texts were
compared place by place.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

# Kinds of steps. B_LEADS is the most frequent case of OUT_OF_TURN: B is one word ahead.
ALONG_A, ALONG_B, IN_TURN, B_LEADS, OUT_OF_TURN = range(5)

# A strategy explains at least this share of the steps.
MOST = 0.7

# A change of strategy must explain this share of the steps more than one strategy alone does, and
# at least LEAST steps, which is more than a single mistake changes.
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
    """Names the traps of one problem: texts `a` and `b`, and their interleaving, the `target`."""

    def __init__(self, a: Sequence[str], b: Sequence[str], target: Sequence[str]):
        self.a, self.b, self.target, self.words = a, b, target, {*a, *b}

    @cached_property
    def kinds(self) -> dict[tuple[str, str], int]:
        """For each (word, next word), a bit for each kind that this step can be.

        This is computed when it is needed first, because right answers do not need it.
        """
        kinds: dict[tuple[str, str], int] = defaultdict(int)

        def add(kind: int, words: Sequence[str], following: Sequence[str]) -> None:
            for step in zip(words, following):
                kinds[step] |= 1 << kind

        for kind, text in ((ALONG_A, self.a), (ALONG_B, self.b)):
            add(kind, text, text[1:])
            add(kind, text, text[2:])  # a word was left out
        add(IN_TURN, self.target, self.target[1:])
        # B is `lead` words ahead: word i of A is followed by word i + lead of B, then by word i + 1
        # of A.
        for lead in (-2, -1, 1, 2):
            for kind in (OUT_OF_TURN, *[B_LEADS][: lead == 1]):
                add(kind, self.a[max(0, -lead) :], self.b[max(0, lead) :])
                add(kind, self.b[max(0, lead - 1) :], self.a[max(0, 1 - lead) :])
        return dict(kinds)

    def name(self, words: Sequence[str], matches: Sequence[tuple[int, int]]) -> str | None:
        """Return the name of the trap that a completion of these `words` is in, or None.

        `matches` are the pairs of places (in the completion, in the target) that the best alignment
        matches. The names are those of `tasks.traps.strategies`, and "turn lost" (from some place
        on, or by more than a word), "runs on" (after a whole answer) and "empty". The caller has to
        exclude completions that are nearly right.
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
            # Half of the last quarter of the target.
            reached = sum(j >= 0.75 * wanted for _, j in matches) > 0.125 * wanted
            return "stops half way" if len(words) < 0.8 * wanted and not reached else None
        if not isinstance(found, int):
            return found
        if found in (ALONG_A, ALONG_B) and 1.5 * len(once) <= len(known):
            return ALONE[found].replace("copies", "doubles")
        return ALONE[found]

    def _strategy(self, words: Sequence[str]) -> int | str | None:
        """Return the kind of most steps, or the name of the change that explains most of them.

        Returns None if neither explains enough.
        """
        steps = [self.kinds.get(step, 0) for step in pairwise(words)]
        if not steps:
            return IN_TURN if words[:1] == self.target[:1] else None
        seen = np.array(steps)[:, None] >> np.arange(5) & 1  # (steps, kinds)
        # before[k]: how many of the first k steps are of each kind.
        before = np.concatenate([np.zeros((1, 5), int), seen.cumsum(axis=0)])
        total = before[-1]
        alone = max(range(5), key=lambda kind: total[kind])
        # After a mistake some steps are out of turn in another way.
        if alone == OUT_OF_TURN and total[B_LEADS] >= MOST * len(steps):
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

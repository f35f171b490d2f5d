"""Recognise the cheap strategy (the trap) that a completion follows, if it follows one.

Each pair of neighbouring words is a step. A step continues in A, continues in B, takes turns (as
the target does), or takes turns with one text ahead of its place. A strategy is one kind of step
throughout, or one kind up to some place and another kind after it. Shares of steps are robust: a
single mistake changes one or two steps, whereas in a comparison place by place it would shift all
later words.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from align.needleman import Alignment

# Kinds of steps. B_LEADS is the most frequent case of OUT_OF_TURN: B is one word ahead.
KINDS = range(5)
ALONG_A, ALONG_B, IN_TURN, B_LEADS, OUT_OF_TURN = KINDS

# A strategy must explain at least this share of the steps.
MIN_SHARE = 0.7

# A change of strategy must explain more steps than a single strategy does: by this share of all
# steps, and by at least MIN_EXTRA_STEPS steps, which is more than a single mistake changes.
EXTRA_SHARE = 0.1
MIN_EXTRA_STEPS = 3

# "runs on": the text is longer than the target by this factor.
LONG = 1.1

# "stops half way": the text is shorter than the target by this factor, and of the last quarter of
# the target fewer words than an eighth of the target are matched.
SHORT = 0.8
END_STARTS_AT = 0.75
MAX_END_MATCHES = 0.125

# "doubles": the text has at least this many words for each that differs from the one before.
DOUBLED = 1.5

ALONE = {ALONG_A: "copies A", ALONG_B: "copies B", B_LEADS: "B first", OUT_OF_TURN: "turn lost"}
CHANGES = {
    (ALONG_A, ALONG_B): "A then B",
    (ALONG_B, ALONG_A): "B then A",
    (IN_TURN, ALONG_A): "runs on in A",
    (IN_TURN, ALONG_B): "runs on in B",
    (IN_TURN, OUT_OF_TURN): "turn lost",
}

# What each trap is, in the words of a verdict.
IN_WORDS = {
    "empty": "nothing is written",
    "copies A": "only text A is copied",
    "copies B": "only text B is copied",
    "doubles A": "each word of text A is written twice",
    "doubles B": "each word of text B is written twice",
    "A then B": "text A is written whole, then text B",
    "B then A": "text B is written whole, then text A",
    "B first": "text B runs a word ahead",
    "turn lost": "one text runs ahead of its turn",
    "runs on in A": "after some turns text A continues alone",
    "runs on in B": "after some turns text B continues alone",
    "runs on": "more words follow a whole answer",
    "stops half way": "the answer stops half way",
}


class TrapNames:
    """Names the traps of one problem: texts `a` and `b`, and their interleaving, the `target`."""

    def __init__(self, a: Sequence[str], b: Sequence[str], target: Sequence[str]):
        self.a = a
        self.b = b
        self.target = target
        self.words = {*a, *b}

    @cached_property
    def kinds(self) -> dict[tuple[str, str], int]:
        """For each (word, next word), a bit for each kind that this step can be.

        It is computed only when it is needed, because right answers do not need it.
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
            for kind in (OUT_OF_TURN, B_LEADS) if lead == 1 else (OUT_OF_TURN,):
                add(kind, self.a[max(0, -lead) :], self.b[max(0, lead) :])
                add(kind, self.b[max(0, lead - 1) :], self.a[max(0, 1 - lead) :])
        return dict(kinds)

    def name(self, words: Sequence[str], alignment: Alignment) -> str | None:
        """Return the name of the trap that a completion of these `words` is in, or None.

        `alignment` is the best one with the target. The caller has to exclude completions that are
        nearly right.
        """
        if not words:
            return "empty"
        if self._runs_on(words):
            return "runs on"

        known = [word for word in words if word in self.words]
        if len(known) < MIN_SHARE * len(words):
            return None

        once = [word for word, before in zip(known, [None, *known]) if word != before]
        found = self._strategy(once)
        if found == IN_TURN:
            return "stops half way" if self._stops_early(words, alignment) else None
        if not isinstance(found, int):
            return found
        if found in (ALONG_A, ALONG_B) and DOUBLED * len(once) <= len(known):
            return ALONE[found].replace("copies", "doubles")
        return ALONE[found]

    def _runs_on(self, words: Sequence[str]) -> bool:
        """Return whether `words` begin with a whole answer and then continue."""
        length = len(self.target)
        if len(words) <= LONG * length:
            return False
        steps = pairwise(words[:length])
        in_turn = sum(self.kinds.get(step, 0) >> IN_TURN & 1 for step in steps)
        return in_turn >= MIN_SHARE * length

    def _stops_early(self, words: Sequence[str], alignment: Alignment) -> bool:
        """Return whether `words` are short, and few of them match the end of the target."""
        length = len(self.target)
        matched = [op.j for op in alignment.ops if op.kind == "match" and op.j is not None]
        near_end = sum(j >= END_STARTS_AT * length for j in matched)
        return len(words) < SHORT * length and near_end <= MAX_END_MATCHES * length

    def _strategy(self, words: Sequence[str]) -> int | str | None:
        """Return the kind of most steps, or the name of the change that explains most of them.

        Returns None if neither explains enough.
        """
        steps = [self.kinds.get(step, 0) for step in pairwise(words)]
        if not steps:
            return IN_TURN if words[:1] == self.target[:1] else None

        # counts[k]: how many of the first k steps are of each kind, (steps + 1, kinds).
        is_kind = np.array(steps)[:, None] >> np.array(KINDS) & 1
        counts = np.concatenate([np.zeros((1, len(KINDS)), int), is_kind.cumsum(axis=0)])
        total = counts[-1]
        enough = MIN_SHARE * len(steps)
        more = max(MIN_EXTRA_STEPS, EXTRA_SHARE * len(steps))

        # The single strategy that explains most steps. If B leads in enough of them, that is its
        # name, although after a mistake some steps are out of turn in another way.
        alone = max(KINDS, key=lambda kind: total[kind])
        if alone == OUT_OF_TURN and total[B_LEADS] >= enough:
            alone = B_LEADS

        # The change of strategy that explains most steps, wherever it happens.
        explained = {
            name: (counts[:, first] + total[then] - counts[:, then]).max()
            for (first, then), name in CHANGES.items()
        }
        best = max(explained, key=explained.__getitem__)
        if explained[best] >= max(enough, total.max() + more):
            return best
        return alone if total[alone] >= enough else None

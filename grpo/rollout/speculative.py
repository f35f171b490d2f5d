"""Target drafting: the task guesses how completions go on, and several tokens are verified in one
forward pass.

Every place has its own uniform number (`sampling.uniform`), so what is drawn there depends on the
policy's distribution and that number alone. A guess that is drawn itself saves a forward pass; the
first that is not has been replaced by the sample, and the task aims anew from there. So drafts
cost or save time, and change nothing else. Cf. speculative decoding (arXiv:2211.17192), whose
acceptance test is needed where the draft is itself drawn; prompt lookup decoding also drafts from
what is known.

Shapes: R rows, k drafted tokens.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import chain

import torch
from torch import Tensor

from grpo.choices import MOST_DRAFTED, is_draft_mode
from grpo.model.encoding import plain_tokens
from tasks.base import UserError

LENGTHS = (0, 1, 3, 7, 15, 31, 63, MOST_DRAFTED)  # of drafts, in tokens
# tokens: longer drafts are only for completions that may be so long, and a row is aimed for no
# shorter one
SHORT = 31
NONE = -1  # a token that never is drawn
# characters of a guess that are tokenized for a token of the draft, when a row is aimed anew: most
# are never reached
AHEAD = 10
_PIECE = re.compile(r"\s*\S+|\s+")


class AcceptanceModel:
    """How well drafts have done, and so how long the next ones should be. `mode`: "auto", "off",
    or a fixed length.

    `matched` and `slipped` are the tokens that went as planned and those that did not, lately; all
    else counts since `begin`.
    """

    def __init__(self, mode: str = "auto"):
        self.fixed = parse_mode(mode)
        self.matched, self.slipped = 8.0, 2.0  # taken for granted until something is seen
        self.begin()

    def begin(self):
        """Start the figures of a step; what was seen before counts half as much from now on."""
        self.matched, self.slipped = self.matched / 2, self.slipped / 2
        self.tokens = self.passes = 0  # of all completions
        self.seconds = self.plain_seconds = 0.0

    @property
    def acceptance(self) -> float:
        """The probability that a token goes as planned."""
        return (self.matched + 0.1) / (self.matched + self.slipped + 0.2)

    def length(
        self,
        rows: int,
        flat: int,
        aim: int,
        lengths: Sequence[int] = LENGTHS,
        matched: float = 0,
        slipped: float = 0,
    ) -> int:
        """Return which of the `lengths` gives the most tokens for the time, in `rows` of which so
        many tokens matched and slipped.

        A fixed length is kept to, or else the longest of them. The rows' own record counts beside
        the general one, because those that are left at the end are those that went astray. A
        forward pass over n tokens is taken to last as long as flat + n, and aiming a row anew as
        `aim` tokens; drafts of k tokens yield (1 - a^(k + 1)) / (1 - a) tokens on average at
        acceptance a (arXiv:2211.17192, eq. 1). A gain that is doubtful is let go.
        """
        if self.fixed is not None:
            return min(self.fixed, lengths[-1])
        a = (matched + 4 * rows * self.acceptance) / (matched + slipped + 4 * rows)

        def speed(k):
            return (1 - a ** (k + 1)) / (1 - a) / (flat + rows * (k + 1 + aim * (1 - a**k)))

        best = max(lengths, key=speed)
        return best if speed(best) > 1.3 * speed(0) else 0

    def observe(
        self,
        k: int,
        rows: int,
        flat: int,
        matched: int,
        slipped: int,
        count: Tensor,
        seconds: float,
    ):
        """Learn from a pass of `rows` rows over drafts of `k` tokens (0: from any number of
        passes).

        `count` tokens of each completion counted; several may be one row.
        """
        completions, tokens = int((count > 0).sum()), int(count.sum())
        self.matched, self.slipped = self.matched + matched, self.slipped + slipped
        self.passes, self.tokens = (
            self.passes + (completions if k else tokens),
            self.tokens + tokens,
        )
        self.seconds += seconds
        self.plain_seconds += seconds * (
            tokens / completions * (flat + rows) / (flat + rows * (k + 1)) if k else 1
        )

    def metrics(self) -> dict[str, float]:
        """Return the step's figures. The time saved is an estimate: by how much passes without
        drafts would be shorter, see `length`.
        """
        if not self.passes:
            return {}
        return {
            "draft/acceptance": self.acceptance,
            "draft/tokens_per_forward": self.tokens / self.passes,
            "time/saved_by_drafts": self.plain_seconds - self.seconds,
        }

    def state_dict(self) -> dict[str, float]:
        return {"matched": self.matched, "slipped": self.slipped}

    def load_state_dict(self, state: dict[str, float]):
        self.matched, self.slipped = state["matched"], state["slipped"]


def parse_mode(mode: str) -> int | None:
    """Return the fixed length of a mode ("off" is 0), None for "auto". Raises UserError for what
    is none.
    """
    if not is_draft_mode(mode):
        raise UserError(f"draft {mode}: give auto, off, or a number of tokens up to {MOST_DRAFTED}")
    if mode in ("auto", "off"):
        return None if mode == "auto" else 0
    return int(mode)


class DraftPlans:
    """What each of R rows is expected to write, in tokens: `guesses[r]` takes the text so far and
    returns the rest of it.

    A row that slips, or comes to the end of a plan that is not the end of its text, is aimed anew
    when it is next drafted for; rows of the same guess that have written the same are aimed
    together.
    """

    def __init__(self, policy, guesses: Sequence[Callable[[str], str]], width: int):
        self.policy, self.guesses = policy, [copy(guess) for guess in guesses]
        self.end = [policy.end]
        self.texts, self.read = (
            [""] * len(guesses),
            [0] * len(guesses),
        )  # of each row: its text, and how many tokens that is
        self.pieces: dict[
            str, list[int]
        ] = {}  # words, with the white space before them: their tokens
        self.planned = torch.full((len(guesses), width), NONE)
        self.is_stale = torch.zeros(
            len(guesses), dtype=torch.bool
        )  # went otherwise, and was not aimed anew
        self.matched, self.slipped = (
            torch.zeros(len(guesses), dtype=torch.long) for _ in range(2)
        )  # tokens of each row
        self.until = torch.zeros(len(guesses), dtype=torch.long)  # where the plan ends
        first = {guess: row for row, guess in reversed(list(enumerate(guesses)))}
        self.first = [first[guess] for guess in guesses]  # the first row of the same guess
        self._aim(
            torch.arange(len(guesses)),
            torch.empty(len(guesses), 0, dtype=torch.long),
            torch.zeros_like(self.until),
            SHORT,
        )

    def offer(self, rows: Tensor, live: Tensor, tokens: Tensor, written: Tensor, k: int) -> Tensor:
        """Return the k tokens (R, k) that are expected next in `rows`; of the `tokens` of all rows
        (all, room), `written` (R,) are.
        """
        if not k:
            return torch.empty(len(rows), 0, dtype=torch.long)
        lost = (live & (self.is_stale[rows] | (self.until[rows] < written + k))).nonzero()[:, 0]
        if len(lost):
            self._aim(rows[lost], tokens, written[lost], max(k, SHORT))
        return self.planned[rows[:, None], written[:, None] + torch.arange(k)]

    def observe(
        self, rows: Tensor, written: Tensor, chosen: Tensor, count: Tensor
    ) -> tuple[int, int]:
        """Compare what was written, `count` tokens from `written` on, with the plans; return how
        many matched and how many slipped.
        """
        steps = torch.arange(chosen.shape[1])
        places = written[:, None] + steps
        real = (
            (steps < count[:, None])
            & ~self.is_stale[rows, None]
            & (places < self.until[rows, None])
        )
        as_planned = chosen == self.planned[rows[:, None], places]
        slipped = (real & ~as_planned).any(1)
        matched = (real & as_planned).long().cumprod(1).sum(1)
        self.is_stale[rows[slipped]] = True
        self.matched[rows] += matched
        self.slipped[rows] += slipped
        return int(matched.sum()), int(slipped.sum())

    def _aim(self, rows: Tensor, tokens: Tensor, written: Tensor, k: int):
        """Plan anew how `rows` go on, each at least for a draft of `k` tokens if it goes on so
        long; `tokens` are those of all rows.
        """
        alike: dict[tuple[int, int, bytes], list[int]] = {}
        for row, n in zip(rows.tolist(), written.tolist()):
            alike.setdefault((self.first[row], n, tokens[row, :n].numpy().tobytes()), []).append(
                row
            )
        starts = [n for _, n, _ in alike]
        rests = [
            self.guesses[row](self._text(row, tokens[row, :n]))
            for (row, *_), n in zip(alike.values(), starts)
        ]
        cuts = [rest.rfind(" ", 0, AHEAD * k) if len(rest) > AHEAD * k else -1 for rest in rests]
        parts = [rest[:cut] if cut > 0 else rest for rest, cut in zip(rests, cuts)]
        plans = self._tokens(parts) if tokens.shape[1] else self._encode(parts)
        plans = [plan if cut > 0 else [*plan, *self.end] for plan, cut in zip(plans, cuts)]
        self._set(alike.values(), starts, plans, [cut <= 0 for cut in cuts])

    def _text(self, row: int, tokens: Tensor) -> str:
        """Return what the row has written. Only what is new is decoded, up to a whole character.

        It is decoded behind the token before it, because some tokenizers drop a space that stands
        first.
        """
        before = max(0, self.read[row] - 1)
        new = tokens[before:].tolist()
        known = self.policy.decode(new[: self.read[row] - before])
        text = self.texts[row] + self.policy.decode(new)[len(known) :]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.texts[row], self.read[row] = text, len(tokens)
        return text

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of `texts`, word by word: the words of a problem come again and again,
        and most tokenizers part them.

        They stand behind a line end, because many tokenizers put a space before what stands first.
        """
        parted = [_PIECE.findall(text) for text in texts]
        new = [
            piece
            for piece in dict.fromkeys(chain.from_iterable(parted))
            if piece not in self.pieces
        ]
        if new:
            line_end, *encoded = self._encode(["\n", *("\n" + piece for piece in new)])
            self.pieces |= {piece: tokens[len(line_end) :] for piece, tokens in zip(new, encoded)}
        return [
            list(chain.from_iterable(map(self.pieces.__getitem__, pieces))) for pieces in parted
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return plain_tokens(self.policy.tokenizer, texts)

    def _set(
        self,
        rows: Iterable[list[int]],
        starts: Iterable[int],
        plans: Iterable[list[int]],
        is_whole: Iterable[bool],
    ):
        """Write each of the `plans` down for its rows, from its start on; a whole one lasts for
        ever, with nothing behind its end.
        """
        width = self.planned.shape[1]
        for alike, start, plan, lasts in zip(rows, starts, plans, is_whole, strict=True):
            end = min(start + len(plan), width)
            self.planned[alike, start:end] = torch.tensor(plan[: end - start], dtype=torch.long)
            if lasts:
                self.planned[alike, end:] = NONE
            self.until[alike] = end + width * lasts
            self.is_stale[alike] = False

"""Speculative decoding from the task's own guesses.

The task guesses how a completion continues, and several tokens are verified in one forward pass.
The token drawn at each place depends only on its own uniform number (`sampling.uniform`) and on the
policy's distribution. If it is the guessed token, a forward pass is saved. The first token that
differs is itself the sample, and the task guesses again from there.

Difference from speculative decoding (arXiv:2211.17192): there the draft is sampled from a second
model and needs a test of acceptance. Here it is deterministic, as in prompt lookup decoding.

Shapes: C completions, k drafted tokens.
"""

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from grpo.model.policy import Policy
from grpo.rollout.generate import Drafting
from grpo.tasks.base import calling

# The lengths of drafts, in tokens.
LENGTHS = (0, 1, 3, 7, 15, 31, 63, 127)

# Drafts of more tokens are only for budgets as large. Plans are made for at least so many tokens.
SHORT = 31

NO_TOKEN = -1  # is never drawn
MIN_GAIN = 1.3  # drafts are made only if they are expected to be faster by this factor
PRIOR_WEIGHT = 4  # tokens of each row that the general record counts for

CHARACTERS_PER_TOKEN = 10  # of a guess that are tokenized for each token of a draft

_PIECE = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class Costs:
    """How long the passes and plans of a decoder take, in tokens, e.g. ``Costs(48, plan=3)``.

    A pass over n tokens takes as long as `fixed` + n of them, and a new plan as long as `plan`.
    If the host makes plans `meanwhile`, the pass has no draft for the rows that are planned.
    """

    fixed: float
    plan: float
    meanwhile: bool = False


def draft_length(
    drafting: Drafting,
    costs: Costs,
    rows: int,
    matched: float = 0,
    rejected: float = 0,
    lengths: Sequence[int] = LENGTHS,
) -> int:
    """Return which of the `lengths` promises the most tokens in the same time.

    `rows` counts the rows of a pass that have different tokens; `matched` and `rejected` are the
    drafted tokens in them.

    At acceptance a, a pass over a draft of k tokens yields (1 - a^(k + 1)) / (1 - a) tokens on
    average (arXiv:2211.17192, eq. 1), and a row needs a new plan after it with probability 1 - a^k.
    """
    if drafting.fixed is not None:
        return min(drafting.fixed, lengths[-1])

    # The acceptance of the current rows, with the general record as the prior: the last rows of a
    # rollout are often those that depart from their plans.
    prior = PRIOR_WEIGHT * rows
    a = (matched + prior * drafting.acceptance) / (matched + rejected + prior)

    def speed(k: int) -> float:
        tokens, plans = (1 - a ** (k + 1)) / (1 - a), 1 - a**k
        if not costs.meanwhile:
            return tokens / (costs.fixed + rows * (k + 1 + plans * costs.plan))

        # A row that needs a plan has no draft in the next pass and writes one token. If that is the
        # planned one (with probability a), it has a draft again. So the share of rows with a draft
        # settles where as many lose it as get it: share * plans = (1 - share) * a.
        share = a / (a + plans)
        tokens, plans = share * tokens + 1 - share, 1 - share
        return tokens / max(costs.fixed + rows * (k + 1), rows * plans * costs.plan)

    best = max(lengths, key=speed)
    return best if speed(best) > MIN_GAIN * speed(0) else 0


class DraftPlans:
    """What each completion is expected to write, in tokens.

    A completion that needs a draft gets a new plan if it has departed from the old one, or reached
    its end. Completions with the same guess and the same text are planned together.

    The methods take `rows` (R,), the completions that the rows of a pass write; `written` (R,), the
    tokens that each has so far; `live` (R,), which of them a draft is wanted for; and `tokens`
    (C, width), those of all completions.

    - `planned` (C, width): the tokens of the plans, NO_TOKEN where there are none;
    - `until` (C,): where each plan ends;
    - `is_stale` (C,): whether the completion has departed from its plan;
    - `matched`, `rejected` (C,): tokens that agreed with the plans, and that did not.
    """

    def __init__(
        self,
        policy: Policy,
        guesses: Sequence[Callable[[str], str]],
        width: int,
        answers: Sequence[Sequence[int]] = (),
    ):
        self.policy = policy

        # Each completion has its own copy of the guess. `first` is the first one with the same.
        self.guesses = [copy(guess) for guess in guesses]
        places: dict[int, int] = {}
        self.first = [places.setdefault(id(guess), row) for row, guess in enumerate(guesses)]

        # The text of each completion, as far as it was decoded, and the number of tokens it takes.
        count = len(guesses)
        self.texts = [""] * count
        self.decoded = [0] * count

        self.planned = torch.full((count, width), NO_TOKEN)
        self.until = torch.zeros(count, dtype=torch.long)
        self.is_stale = torch.ones(count, dtype=torch.bool)
        self.matched = torch.zeros(count, dtype=torch.long)
        self.rejected = torch.zeros(count, dtype=torch.long)

        # The first plan is the right answer to the prompt. It costs nothing: its tokens are known.
        G = count // max(1, len(answers))
        for p, answer in enumerate(answers):
            self._set([*range(p * G, p * G + G)], 0, answer, policy.end in answer[-1:])

    def make(
        self, rows: Tensor, written: Tensor, live: Tensor, needed: int, tokens: Tensor
    ) -> None:
        """Make the plans that are missing, or that have fewer than `needed` tokens left."""
        needs_plan = self.is_stale[rows] | (self.until[rows] < written + needed)
        chosen = live & needs_plan
        if needed and chosen.any():
            self._plan(rows[chosen], tokens, written[chosen], max(needed, SHORT))

    def drafts(self, rows: Tensor, written: Tensor, length: int) -> Tensor:
        """Return the drafts (R, length); rows that departed from their plan get a useless one."""
        places = written[:, None] + torch.arange(length)
        drafts = self.planned[rows[:, None], places]
        return drafts.masked_fill(self.is_stale[rows, None], NO_TOKEN)

    def observe(
        self, rows: Tensor, written: Tensor, chosen: Tensor, count: Tensor
    ) -> tuple[int, int]:
        """Compare the `count` tokens (R,) that were chosen with the plans; return how many tokens
        matched, and in how many rows one was rejected.
        """
        steps = torch.arange(chosen.shape[1])
        places = written[:, None] + steps
        is_written = steps < count[:, None]
        is_planned = ~self.is_stale[rows, None] & (places < self.until[rows, None])
        is_compared = is_written & is_planned
        as_planned = chosen == self.planned[rows[:, None], places]

        rejected = (is_compared & ~as_planned).any(1)
        matched = (is_compared & as_planned).long().cumprod(1).sum(1)
        self.is_stale[rows[rejected]] = True
        self.matched[rows] += matched
        self.rejected[rows] += rejected
        return int(matched.sum()), int(rejected.sum())

    def _plan(self, rows: Tensor, tokens: Tensor, written: Tensor, k: int) -> None:
        """Plan how `rows` continue, for at least `k` tokens unless the text ends before."""
        alike: dict[tuple[int, int, bytes], list[int]] = {}
        for row, n in zip(rows.tolist(), written.tolist()):
            key = (self.first[row], n, tokens[row, :n].numpy().tobytes())
            alike.setdefault(key, []).append(row)

        # Only the beginning of a long guess is tokenized, up to a whole word.
        most = CHARACTERS_PER_TOKEN * k
        parts, is_whole = [], []
        with calling("the guesser of the task's draft()"):
            for (_, n, _), (row, *_) in alike.items():
                rest = self.guesses[row](self._text(row, tokens[row, :n]))
                cut = rest.rfind(" ", 0, most) if len(rest) > most else -1
                parts.append(rest[:cut] if cut > 0 else rest)
                is_whole.append(cut <= 0)

        plans = self._tokens(parts)
        for (_, start, _), same, plan, ends in zip(alike, alike.values(), plans, is_whole):
            self._set(same, start, [*plan, self.policy.end] if ends else plan, ends)

    def _text(self, row: int, tokens: Tensor) -> str:
        """Return the text of a completion, of which only the new tokens are decoded.

        The token before them goes along, because some tokenizers drop a space at the beginning.
        """
        before = max(0, self.decoded[row] - 1)
        new = tokens[before:].tolist()
        known = self.policy.decode(new[: self.decoded[row] - before])
        text = self.texts[row] + self.policy.decode(new)[len(known) :]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.texts[row] = text
            self.decoded[row] = len(tokens)
        return text

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of `texts`, word by word: the words of a problem recur."""
        words = [_PIECE.findall(text) for text in texts]
        tokens = iter(self.policy.words(chain(*words)))
        return [list(chain(*islice(tokens, len(text)))) for text in words]

    def _set(self, rows: list[int], start: int, plan: Sequence[int], is_whole: bool) -> None:
        """Set the plan of some rows from place `start` on, up to the completion's end if whole."""
        if plan and max(plan) >= self.policy.vocabulary:  # some tokenizers have more
            plan = [token if token < self.policy.vocabulary else NO_TOKEN for token in plan]
        width = self.planned.shape[1]
        end = min(start + len(plan), width)
        planned = self.planned.numpy()  # the same memory: it takes a list in a tenth of the time
        planned[rows, start:end] = plan[: end - start]
        if is_whole:
            planned[rows, end:] = NO_TOKEN
        self.until[rows] = end + width * is_whole
        self.is_stale[rows] = False


class Drafter:
    """Speculative decoding within one rollout: what to draft, and how well it went.

    - `decoder`: the rows that are written, `EagerRows` or `CudaRows`;
    - `longest`: the most tokens of a draft; `length`: that of the last drafts;
    - `wanted`: the plans that the last drafts need, as `DraftPlans.make` takes them.

    A different first token is not counted as a rejection, and the rest is planned again from there:
    SmolLM2 begins its answers with a space that the guess does not have.
    """

    def __init__(self, decoder: Any, plans: DraftPlans, drafting: Drafting, longest: int):
        self.decoder, self.plans, self.drafting = decoder, plans, drafting
        self.longest, self.length = longest, 0
        self.wanted: tuple[Tensor, Tensor, Tensor, int] | None = None

    def observe(self, rows: Tensor, written: Tensor, chosen: Tensor, count: Tensor) -> None:
        """Record which drafts a pass accepted."""
        matched, rejected = self.plans.observe(rows, written, chosen, count)
        if self.wanted is None:  # these are the first tokens
            matched = rejected = 0
        gained = int((count > 0).sum()), int(count.sum())
        self.drafting.observe(self.length, matched, rejected, *gained)

    def propose(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the next drafts (C, k), of the length with the highest expected gain."""
        plans, live, written = self.plans, self.decoder.live, lengths[rows]
        if self.wanted is None:
            plans.matched.zero_()
            plans.rejected.zero_()
            plans.make(rows, written, live & plans.is_stale[rows], SHORT, tokens)

        k = self.length = draft_length(
            self.drafting,
            self.decoder.costs,
            int(live.sum()),
            plans.matched[rows[live]].sum().item(),
            plans.rejected[rows[live]].sum().item(),
            [k for k in self.decoder.lengths if k <= self.longest],
        )
        # Plans that are made while a pass runs must also last for the pass after it.
        meanwhile = self.decoder.costs.meanwhile
        self.wanted = rows, written, live, 2 * k + 1 if meanwhile and k else k
        if not meanwhile:
            plans.make(*self.wanted, tokens)
        return plans.drafts(rows, written, k)

    def plan_meanwhile(self, tokens: Tensor) -> None:
        """Make missing plans while the device runs the pass, if its costs say so."""
        if self.wanted and self.decoder.costs.meanwhile:
            self.plans.make(*self.wanted, tokens)

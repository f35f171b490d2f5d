"""The rollout: sample many completions of each prompt.

Each prompt is processed once. Then every forward pass writes one token of each completion, or
several with speculative decoding. The forward passes are made by a decoder: `cuda_decoder` if
device and model allow it, otherwise `eager_decoder`.

A sample depends neither on the layout of the batch, nor on the other prompts in it, nor on drafts:
see `grpo.rollout.sampling`.

Shapes: P prompts, G completions each, C completions that are still being written (P * G at first),
k drafted tokens, T = 1 + k.
"""

import math
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from data.errors import UserError
from grpo.model.policy import Policy
from grpo.records import Completion
from grpo.rollout.cuda_decoder import CudaDecoder, cuda_step
from grpo.rollout.eager_decoder import EagerDecoder
from grpo.rollout.memory import rollout_memory
from grpo.rollout.request import DecodeRequest, RolloutRequest
from grpo.rollout.speculative import (
    LENGTHS,
    SHORT,
    AcceptanceModel,
    Costs,
    DraftPlans,
    DraftRequest,
    Observation,
    RowRecord,
)


class Decoder(Protocol):
    """Runs the forward passes of one rollout: `EagerDecoder`, or `CudaDecoder` on a GPU."""

    @property
    def costs(self) -> Costs:
        """How long its passes take, and plans for them."""

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of drafts, in tokens, that the decoder can verify."""

    @property
    def live(self) -> Tensor:
        """A mask (C,) of the completions that need a draft: one of each set of identical ones."""

    def start(self, drafts_Ck: Tensor) -> None:
        """Start a pass, which verifies the drafts and draws one more token."""

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the pass.

        Returns tokens (C, T), their log-probabilities (C, T), and how many of them count (C,).
        """

    def retire(self) -> Tensor:
        """Drop finished completions; return the indices of the others, in order."""


def generate(
    policy: Policy, request: RolloutRequest, drafting: AcceptanceModel | None = None
) -> list[list[Completion]]:
    """Return the completions of each prompt, in order.

    `drafting` decides how much is drafted, and learns from what is accepted; without it nothing is
    drafted. The log-probabilities of a completion are those of the distribution that it was sampled
    from.

    If a GPU has too little memory for all prompts at once, they are answered in several batches.
    Raises FloatingPointError if a token was drawn from a distribution that is not finite, and
    UserError if memory runs out for a single prompt.
    """
    longest = max(map(len, request.prompts))
    room = _room(request, drafting)
    memory = rollout_memory(policy)

    answers: list[list[Completion]] = []
    while (start := len(answers)) < len(request.prompts):
        at_once = memory.prompts(request.group_size, longest, room)
        batch = request.of(slice(start, start + at_once))
        try:
            answers += _generate(policy, batch, drafting)
            continue
        except torch.OutOfMemoryError as error:
            if len(batch.prompts) == 1:
                raise UserError(
                    f"out of memory in the rollout of {batch.group_size} completions of up to "
                    f"{max(batch.budgets)} tokens; give a smaller --group-size, a lower level, or "
                    "a smaller model"
                ) from error

        # Not in the except block: there the exception keeps the tensors of the failed rollout.
        memory.halve(len(batch.prompts), request.group_size, room)
    return answers


def _is_drafted(request: RolloutRequest, drafting: AcceptanceModel | None) -> bool:
    return request.guesses is not None and drafting is not None and drafting.fixed != 0


def _longest_draft(request: RolloutRequest, drafting: AcceptanceModel | None) -> int:
    """Return the largest number of tokens that one pass may draft."""
    most = max(request.budgets) if _is_drafted(request, drafting) else 0
    return max(k for k in LENGTHS if k <= max(SHORT, most))


def _room(request: RolloutRequest, drafting: AcceptanceModel | None) -> int:
    """Return for how many tokens of a completion there must be memory.

    Drafts may reach beyond the budget, where they never count.
    """
    return max(request.budgets) + _longest_draft(request, drafting) + 1


@torch.no_grad()
def _generate(
    policy: Policy, request: RolloutRequest, drafting: AcceptanceModel | None
) -> list[list[Completion]]:
    """Answer prompts that fit in memory together; see `generate`."""
    P, G = len(request.prompts), request.group_size
    longest = _longest_draft(request, drafting)
    room = _room(request, drafting)

    decoder = _make_decoder(policy, request, room)
    drafter = None
    if _is_drafted(request, drafting):
        assert request.guesses is not None and drafting is not None
        plans = DraftPlans(policy, [guess for guess in request.guesses for _ in range(G)], room)
        drafter = _Drafter(decoder, plans, drafting, longest, distinct=P * G)

    tokens = torch.zeros(P * G, room, dtype=torch.long)
    logprobs = torch.zeros(tokens.shape)
    lengths = torch.zeros(P * G, dtype=torch.long)
    rows = torch.arange(P * G)  # the completion that each row of the decoder is writing
    drafts = torch.empty(P * G, 0, dtype=torch.long)

    while len(rows):
        # One forward pass: the drafts are verified, and one more token is drawn.
        start = time.perf_counter()
        decoder.start(drafts)
        if drafter is not None:
            drafter.plan_meanwhile(tokens)
        chosen, chosen_logprobs, count = decoder.finish()
        written = lengths[rows]
        if drafter is not None:
            drafter.observe(rows, written, chosen, count, start)

        # Tokens after a rejected draft are overwritten later, or cut off at the end.
        positions = written[:, None] + torch.arange(chosen.shape[1])
        tokens[rows[:, None], positions] = chosen
        logprobs[rows[:, None], positions] = chosen_logprobs
        lengths[rows] = written + count

        rows = rows[decoder.retire()]
        drafts = torch.empty(len(rows), 0, dtype=torch.long)
        if drafter is not None and len(rows):
            drafts = drafter.propose(rows, tokens, lengths)

    completions = [
        _completion(policy, ids[:n], values[:n])
        for ids, values, n in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist())
    ]
    return [completions[p * G : (p + 1) * G] for p in range(P)]


def _make_decoder(policy: Policy, request: RolloutRequest, room: int) -> Decoder:
    """Return a decoder with `room` tokens for each completion: on a GPU the CUDA decoder."""
    G = request.group_size
    decoded = DecodeRequest(
        request.prompts,
        keys=torch.tensor([key for group in request.keys for key in group]),
        temperatures=torch.tensor(request.temperatures).float().repeat_interleave(G),
        budgets=torch.tensor(request.budgets).repeat_interleave(G),
        truncate=request.truncate,
        room=room,
    )
    step = cuda_step(policy)
    return CudaDecoder(step, decoded) if step else EagerDecoder(policy, decoded)


class _Drafter:
    """Speculative decoding within one rollout: what to draft, and how well it went.

    - `longest`: the most tokens of a draft; `request`: that of the last drafts, None before any;
    - `distinct`: rows that differ, which decide what a pass costs;
    - `has_first_tokens`: whether each row has written its first token. It is drawn without a draft,
      and it says little about the rest: SmolLM2 begins its answers with a space that the guess does
      not have. So a different first token is not counted as a rejection, and the rest is planned
      again from there.
    """

    def __init__(
        self,
        decoder: Decoder,
        plans: DraftPlans,
        drafting: AcceptanceModel,
        longest: int,
        distinct: int,
    ):
        self.decoder = decoder
        self.plans = plans
        self.drafting = drafting
        self.longest = longest
        self.distinct = distinct
        self.request: DraftRequest | None = None
        self.has_first_tokens = False

    def observe(
        self, rows: Tensor, written: Tensor, chosen: Tensor, count: Tensor, start: float
    ) -> None:
        """Record which drafts a pass accepted, and what it cost. The pass began at `start`."""
        matched, rejected = self.plans.observe(rows, written, chosen, count)
        if not self.has_first_tokens:
            matched = rejected = 0
        self.drafting.observe(
            Observation(
                draft_length=self.request.length if self.request else 0,
                rows=self.distinct,
                fixed_cost=self.decoder.costs.fixed,
                matched=matched,
                rejected=rejected,
                completions=int((count > 0).sum()),
                tokens=int(count.sum()),
                seconds=time.perf_counter() - start,
            )
        )

    def propose(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the next drafts (C, k), of the length with the highest expected gain."""
        live = self.decoder.live
        if not self.has_first_tokens:
            self.plans.begin(rows, live, tokens, lengths[rows])
            self.has_first_tokens = True

        self.distinct = int(live.sum())
        record = RowRecord(
            self.distinct,
            self.plans.matched[rows[live]].sum().item(),
            self.plans.rejected[rows[live]].sum().item(),
        )
        k = self.drafting.length(
            record,
            self.decoder.costs,
            [k for k in self.decoder.lengths if k <= self.longest],
        )
        # Plans that are made while a pass runs must also last for the pass after it.
        meanwhile = self.decoder.costs.meanwhile
        needed = 2 * k + 1 if meanwhile else k
        self.request = DraftRequest(rows, lengths[rows], live, length=k, needed=needed)
        if not meanwhile:
            self.plans.make(self.request, tokens)
        return self.plans.drafts(self.request)

    def plan_meanwhile(self, tokens: Tensor) -> None:
        """Make the plans that are missing while the device runs the pass, if its costs say so."""
        if self.request and self.decoder.costs.meanwhile:
            self.plans.make(self.request, tokens)


def _completion(policy: Policy, tokens: list[int], logprobs: list[float]) -> Completion:
    """Return a completion. Raises FloatingPointError if a log-probability is not finite."""
    is_finite = [*map(math.isfinite, logprobs)]
    if not all(is_finite):
        place = is_finite.index(False)
        raise FloatingPointError(
            f"token {place + 1} of a completion was drawn with a log-probability of "
            f"{logprobs[place]}: the model's logits are not finite"
        )
    finish = "stop" if tokens[-1] in policy.stops else "length"
    return Completion(tuple(tokens), tuple(logprobs), policy.decode(tokens), finish)

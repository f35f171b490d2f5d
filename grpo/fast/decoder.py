"""The decoder of `grpo.fast`: every forward pass writes one token of each completion, or several
with speculative decoding.

The forward passes are made by `CudaRows` if device and model allow it, otherwise by `EagerRows`:
the model's own forward pass, step by step. There the completions of a prompt begin alike, and those
of a competent policy stay alike for long. As long as completions have the same tokens, they have
the same keys, values and next distribution. So they share one row of the forward pass, and each
samples from the row's distribution with its own uniform number. Where they diverge, the row is
split.

Shapes: P prompts, G completions each, C completions that are still being written (P * G at first),
R rows, k drafted tokens, T = 1 + k.
"""

import math
from typing import Any

import torch
from torch import Tensor

from grpo.fast.cuda_decoder import CudaRows, CudaStep, new_cuda_step
from grpo.fast.forward import FastForward
from grpo.fast.speculative import LENGTHS, SHORT, Costs, Drafter, DraftPlans
from grpo.model.policy import Policy
from grpo.rollout.generate import Drafting, RolloutRequest
from grpo.rollout.sampling import choose, uniform


class FastDecoder:
    """Samples completions of a policy; see `grpo.rollout.generate.PlainDecoder`."""

    def __init__(self, policy: Policy, forward: FastForward):
        self.policy = policy
        self.forward = forward
        self.has_step = False
        self.step: CudaStep | None = None

    def room(self, request: RolloutRequest, drafting: Drafting | None) -> int:
        """Return for how many tokens of a completion there must be memory.

        Drafts may reach beyond the budget, where they never count.
        """
        return max(request.budgets) + _longest_draft(request, drafting) + 1

    def free(self) -> bool:
        """Free the memory and the graphs of the captured step; return whether there is one."""
        if self.step is not None:
            self.step.free()
        return self.step is not None

    def cuda_step(self) -> CudaStep | None:
        """Return the captured decode step, or None if there is none. It is made once."""
        if not self.has_step:
            self.step = new_cuda_step(self.policy, self.forward)
            self.has_step = True
        return self.step

    def rows(self, request: RolloutRequest, room: int) -> Any:
        """Return the rows of a rollout, with `room` tokens each: on a GPU those of the step."""
        step = self.cuda_step()
        if step:
            return CudaRows(step, request, room)
        return EagerRows(self.policy, self.forward, request, room)

    @torch.no_grad()
    def decode(
        self, request: RolloutRequest, drafting: Drafting | None = None
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens of each completion, and their log-probabilities.

        Should the captured step write a log-probability that is not finite, the rollout is repeated
        without it: the same uniform numbers draw the same tokens, up to rounding.
        """
        room = self.room(request, drafting)
        written = self._decode(self.rows(request, room), request, drafting, room)
        if self.step and not all(math.isfinite(sum(values)) for _, values in written):
            self.policy.events.append(
                "the captured decode step gave numbers that are not finite: this rollout was "
                "repeated without it"
            )
            rows = EagerRows(self.policy, self.forward, request, room)
            written = self._decode(rows, request, drafting, room)
        return written

    def _decode(
        self, decoder: Any, request: RolloutRequest, drafting: Drafting | None, room: int
    ) -> list[tuple[list[int], list[float]]]:
        policy, G = self.policy, request.group_size
        C = len(request.prompts) * G

        drafter = None
        if _is_drafted(request, drafting):
            assert request.guesses is not None and drafting is not None
            plans = DraftPlans(policy, [guess for guess in request.guesses for _ in range(G)], room)
            drafter = Drafter(decoder, plans, drafting, _longest_draft(request, drafting))

        tokens = torch.zeros(C, room, dtype=torch.long)
        logprobs = torch.zeros(tokens.shape)
        lengths = torch.zeros(C, dtype=torch.long)
        rows = torch.arange(C)  # the completion that each row of the decoder is writing
        drafts = torch.empty(C, 0, dtype=torch.long)

        while len(rows):
            # One forward pass: the drafts are verified, and one more token is drawn.
            decoder.start(drafts)
            if drafter is not None:
                drafter.plan_meanwhile(tokens)
            chosen, chosen_logprobs, count = decoder.finish()
            written = lengths[rows]
            if drafter is not None:
                drafter.observe(rows, written, chosen, count)

            # Tokens after a rejected draft are overwritten later, or cut off at the end.
            positions = written[:, None] + torch.arange(chosen.shape[1])
            tokens[rows[:, None], positions] = chosen
            logprobs[rows[:, None], positions] = chosen_logprobs
            lengths[rows] = written + count

            rows = rows[decoder.retire()]
            drafts = torch.empty(len(rows), 0, dtype=torch.long)
            if drafter is not None and len(rows):
                drafts = drafter.propose(rows, tokens, lengths)

        return [
            (ids[:n], values[:n])
            for ids, values, n in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist())
        ]


def _is_drafted(request: RolloutRequest, drafting: Drafting | None) -> bool:
    return request.guesses is not None and drafting is not None and drafting.fixed != 0


def _longest_draft(request: RolloutRequest, drafting: Drafting | None) -> int:
    """Return the largest number of tokens that one pass may draft."""
    most = max(request.budgets) if _is_drafted(request, drafting) else 0
    return max(k for k in LENGTHS if k <= max(SHORT, most))


def accepted(chosen_CT: Tensor, drafts_Ck: Tensor, stops: Tensor) -> Tensor:
    """Return how many of the chosen tokens count (C,).

    They count up to the first that differs from the draft, or that ends the text. A token is drawn
    from the right distribution if all tokens before it are the drafted ones, so the first that
    differs is itself a valid sample.
    """
    goes_on = (chosen_CT[:, :-1] == drafts_Ck) & ~torch.isin(chosen_CT[:, :-1], stops)
    return 1 + goes_on.long().cumprod(1).sum(1)


class EagerRows:
    """The completions of one rollout while they are written.

    - `row` (C,): the row of the forward pass that each completion shares;
    - `first` (R,): the first completion of each row, which speaks for the others;
    - `live` (C,): whether a draft is wanted, which is so for the first of each row;
    - `last` (C,): each completion's last token, which the model has not read yet;
    - `drafts_Rk` and `drawn`: the drafts of the pass, and its tokens with log-probabilities.
    """

    costs = Costs(fixed=48, plan=3)  # measured with the embedded model on two CPU cores
    lengths = LENGTHS
    live: Tensor

    def __init__(self, policy: Policy, forward: FastForward, request: RolloutRequest, room: int):
        self.policy, self.forward, self.truncate = policy, forward, request.truncate
        prompts, G = len(request.prompts), request.group_size
        self.last_PE, self.cache = forward.prefill(request.prompts)
        self.cache.allocate(prompts, room)

        self.keys, self.temperature, self.budget = request.flat
        self.stops = torch.tensor(policy.stops)
        self.written = torch.zeros_like(self.keys)
        self.last: Tensor | None = None

        self.row = torch.arange(prompts).repeat_interleave(G)
        self.first = torch.arange(prompts) * G

    def start(self, drafts_Ck: Tensor) -> None:
        """Start a pass. All completions of a row use the draft of the first of them."""
        device, drafts_Rk = self.policy.device, drafts_Ck[self.first]
        if self.last is None:  # the first tokens follow the prompts
            drafts_Rk = drafts_Rk[:, :0]
            hidden_RTE = self.last_PE[:, None]
        else:
            tokens = torch.cat([self.last[self.first, None], drafts_Rk.clamp(min=0)], 1)
            hidden_RTE = self.forward.extend(tokens.to(device), self.cache)

        places_CT = self.written[:, None] + torch.arange(hidden_RTE.shape[1])
        self.drafts_Rk = drafts_Rk
        self.drawn = choose(
            self.policy.logits(hidden_RTE),
            self.temperature[self.first].to(device),
            uniform(self.keys[:, None], places_CT).to(device),
            self.row.to(device),
            self.truncate,
        )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens of each completion, their log-probabilities (C, T), and how many
        of them count (C,), on the CPU.
        """
        chosen, logprobs = (drawn.cpu() for drawn in self.drawn)
        count = accepted(chosen, self.drafts_Rk[self.row], self.stops)
        count = count.minimum(self.budget - self.written)
        self.last = chosen.gather(1, count[:, None] - 1)[:, 0]
        self.written = self.written + count
        return chosen, logprobs, count

    def retire(self) -> Tensor:
        """Drop finished completions, and split rows that diverged; return which completions stay,
        in order.
        """
        assert self.last is not None  # `finish` comes first
        goes_on = ~torch.isin(self.last, self.stops) & (self.written < self.budget)
        stay = goes_on.nonzero()[:, 0]
        if not len(stay):
            return stay

        sources_R = torch.arange(len(self.first))
        if len(stay) < len(self.last) or len(self.first) < len(self.last):
            for name in ("keys", "budget", "temperature", "written", "row", "last"):
                setattr(self, name, getattr(self, name)[stay])
            sources_R = self._split_rows()

        # The last token written is not in the cache yet.
        cached_R = self.written[self.first] - 1
        self.cache.reorder(sources_R.to(self.policy.device), cached_R.to(self.policy.device))
        self.live = torch.zeros(len(stay), dtype=torch.bool).index_fill(0, self.first, True)
        return stay

    def _split_rows(self) -> Tensor:
        """Give one row to the completions that have read the same and continue with the same token;
        return the row that each new row is a copy of.

        To save copies, the first part of a row stays where it is if that place still exists. The
        other parts fill the gaps.
        """
        assert self.last is not None
        state = torch.stack([self.row, self.written, self.last])
        parts, part_C = state.unique(dim=1, return_inverse=True)
        source_R = parts[0]  # in ascending order
        R = len(source_R)

        is_first_part = source_R.diff(prepend=source_R.new_tensor([-1])) > 0
        stays_R = is_first_part & (source_R < R)
        is_free_R = torch.ones(R, dtype=torch.bool).index_fill(0, source_R[stays_R], False)
        place_R = source_R.masked_scatter(~stays_R, is_free_R.nonzero())

        self.row = place_R[part_C]
        completions = torch.arange(len(part_C))
        first = torch.full((R,), len(part_C))
        self.first = first.scatter_reduce(0, self.row, completions, "amin")
        return source_R.scatter(0, place_R, source_R)

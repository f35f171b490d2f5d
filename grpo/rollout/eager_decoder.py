"""The decoder for every model and device: the model's own forward pass, step by step.

The completions of a prompt begin as one, and those of a competent policy agree for long. As long
as completions have the same tokens they have the same keys, values and next distribution: they are
one row of the forward pass, and each draws from its distribution with its own uniform number.
Where they go apart, the row is copied.

Shapes: P prompts, C completions, R rows, k drafted tokens, T = 1 + k.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo.model.policy import Policy
from grpo.rollout.sampling import choose, uniform
from grpo.rollout.speculative import LENGTHS


def accepted(chosen_CT: Tensor, drafts_Ck: Tensor, stops: Tensor) -> Tensor:
    """Return how many of the chosen tokens count: up to the first that the draft had otherwise, or
    that ends the text (C,).

    A chosen token is drawn from the right distribution if all before it are the drafted ones; the
    first that differs is itself the sample.
    """
    goes_on = (chosen_CT[:, :-1] == drafts_Ck) & ~torch.isin(chosen_CT[:, :-1], stops)
    return 1 + goes_on.long().cumprod(1).sum(1)


class EagerDecoder:
    """The completions of one rollout, as they are written. `live` are those that drafts are wanted
    for: one for each row.
    """

    flat, aim = 48, 3  # see AcceptanceModel.length; as seen with the embedded model on two cores
    lengths = LENGTHS

    def __init__(
        self, policy: Policy, prompts, keys, heat, budget, truncate: Callable | None, room: int
    ):
        self.policy, self.truncate = policy, truncate
        self.last_PH, self.shared = policy.prefill(prompts)
        self.shared.allocate(len(prompts), room)
        self.keys, self.heat, self.budget = keys, heat, budget
        self.stops, self.written = torch.tensor(policy.stops), torch.zeros_like(keys)
        self.row = torch.arange(len(prompts)).repeat_interleave(
            len(keys) // len(prompts)
        )  # which row each completion reads
        self.first = torch.arange(len(prompts)) * (
            len(keys) // len(prompts)
        )  # the first completion of each row
        self.last: Tensor | None = (
            None  # the token of each completion that the model has not read yet
        )

    def step(self, drafts_Ck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens of each completion, their log-probabilities (C, T), and how many
        of them count (C,), on the CPU.

        The completions of a row go by the draft of the first of them.
        """
        device, drafts_Rk = self.policy.device, drafts_Ck[self.first]
        if self.last is None:
            drafts_Rk, hidden = drafts_Rk[:, :0], self.last_PH[:, None]
        else:
            tokens = torch.cat([self.last[self.first, None], drafts_Rk.clamp(min=0)], 1)
            hidden = self.policy.extend(tokens.to(device), self.shared)
        places_CT = self.written[:, None] + torch.arange(hidden.shape[1])
        chosen, logprobs = choose(
            self.policy.logits(hidden),
            self.heat[self.first].to(device),
            uniform(self.keys[:, None], places_CT).to(device),
            self.row.to(device),
            self.truncate,
        )
        chosen, logprobs = chosen.cpu(), logprobs.cpu()
        count = accepted(chosen, drafts_Rk[self.row], self.stops).minimum(
            self.budget - self.written
        )
        self.last = chosen.gather(1, count[:, None] - 1)[:, 0]
        self.written = self.written + count
        return chosen, logprobs, count

    def retire(self) -> Tensor:
        """Let finished completions go, part those that went apart; return which stay, by their
        present places, in order.
        """
        assert self.last is not None  # `step` comes first
        stay = (~torch.isin(self.last, self.stops) & (self.written < self.budget)).nonzero()[:, 0]
        if not len(stay):
            return stay
        sources_R = torch.arange(len(self.first))
        if len(stay) < len(self.last) or len(self.first) < len(
            self.last
        ):  # else each has its row and keeps it
            for name in ("keys", "heat", "budget", "written", "row", "last"):
                setattr(self, name, getattr(self, name)[stay])
            sources_R = self._part()
        filled_R = self.written[self.first] - 1
        self.shared.reorder(sources_R.to(self.policy.device), filled_R.to(self.policy.device))
        self.live = torch.zeros(len(stay), dtype=torch.bool).index_fill(0, self.first, True)
        return stay

    def _part(self) -> Tensor:
        """Make one row of the completions that have read the same and go on with the same token;
        return which row each row was.

        The first part of a row stays where it is, while that is below the new number of rows; the
        others fill the gaps.
        """
        assert self.last is not None
        parts, part_C = torch.stack([self.row, self.written, self.last]).unique(
            dim=1, return_inverse=True
        )
        source_R = parts[0]  # in order
        R = len(source_R)
        stays_R = (source_R.diff(prepend=source_R.new_tensor([-1])) > 0) & (source_R < R)
        is_free_R = torch.ones(R, dtype=torch.bool).index_fill(0, source_R[stays_R], False)
        place_R = source_R.masked_scatter(~stays_R, is_free_R.nonzero())
        self.row = place_R[part_C]
        self.first = torch.full((R,), len(part_C)).scatter_reduce(
            0, self.row, torch.arange(len(part_C)), "amin"
        )
        return source_R.scatter(0, place_R, source_R)

"""The decoder for every model and device: the model's own forward pass, step by step.

Rows stand in a grid of P prompts by G completions, so that all completions of a prompt read its keys at once. Finished rows leave
as soon as a whole column of the grid is free.

Shapes: P prompts, G completions each, R = P * G rows, k drafted tokens, T = 1 + k.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from grpo.policy import Policy
from grpo.rollout.sampling import choose, uniform


def accepted(chosen_RT: Tensor, drafts_Rk: Tensor, stops: Tensor) -> Tensor:
    """Return how many of the chosen tokens count: up to the first that the draft had otherwise, or that ends the text (R,).

    A chosen token is drawn from the right distribution if all before it are the drafted ones; the first that differs is
    itself the sample.
    """
    goes_on = (chosen_RT[:, :-1] == drafts_Rk) & ~torch.isin(chosen_RT[:, :-1], stops)
    return 1 + goes_on.long().cumprod(1).sum(1)


class EagerDecoder:
    """The rows of one rollout, as they are written."""

    flat, aim = 48, 3  # see Drafting.length; as seen with the embedded model on two cores

    def __init__(self, policy: Policy, prompts, keys, heat, budget, truncate: Callable | None, room: int):
        self.policy, self.truncate, device = policy, truncate, policy.device
        self.columns = len(keys) // len(prompts)
        self.last_PH, self.shared = policy.prefill(prompts)
        self.shared.allot(len(keys), room)
        self.keys, self.heat, self.budget = keys.to(device), heat.to(device), budget.to(device)
        self.stops = torch.tensor(policy.stops, device=device)
        self.written = torch.zeros_like(self.keys)
        self.live = torch.ones_like(self.keys, dtype=torch.bool)
        self.last: Tensor | None = None  # the token of each row that the model has not read yet

    def step(self, drafts_Rk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens of each row, their log-probabilities (R, 1 + k), and how many of them count (R,), on the CPU."""
        drafts_Rk = drafts_Rk.to(self.policy.device)
        if self.last is None:
            drafts_Rk = drafts_Rk[:, :0]
            hidden = self.last_PH.repeat_interleave(self.columns, 0)[:, None]
        else:
            hidden = self.policy.extend(torch.cat([self.last[:, None], drafts_Rk.clamp(min=0)], 1), self.shared)
        places_RT = self.written[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        chosen, logprobs = choose(self.policy.head(hidden), self.heat, uniform(self.keys[:, None], places_RT), self.truncate)
        count = accepted(chosen, drafts_Rk, self.stops).minimum(self.budget - self.written)
        count = torch.where(self.live, count, 0)
        if self.last is not None:
            filler = int(chosen.shape[1] == 1 and self.shared.is_even)  # finished rows go along where that keeps all even
            self.shared.keep(torch.where(self.live, count, filler))
        self.last = chosen.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.written = self.written + count
        self.live = self.live & ~torch.isin(self.last, self.stops) & (self.written < self.budget)
        return chosen.cpu(), logprobs.cpu(), count.cpu()

    def retire(self) -> Tensor:
        """Let finished rows go as far as the grid stays a grid; return the rows that stay, by their present places, in order."""
        if not self.live.any():
            return torch.arange(0)
        prompts, rows = _compact(self.live.view(-1, self.columns).cpu())
        if rows is None:
            return torch.arange(len(self.live))
        self.columns = len(rows) // len(prompts)
        prompts, rows = prompts.to(self.live.device), rows.to(self.live.device)
        self.shared.retire(prompts, rows)
        for name in ("keys", "heat", "budget", "written", "live", "last"):
            setattr(self, name, getattr(self, name)[rows])
        return rows.cpu()


def _compact(live_PG: Tensor):
    """Return (prompts to keep, rows to keep) with the finished rows left out as far as the grid stays a grid.

    Prompts without a live row leave; the others keep as many columns as the longest-lived of them needs, live rows
    first. (None, None) while that would free nothing.
    """
    counts = live_PG.sum(1)
    prompts, width = counts.nonzero()[:, 0], int(counts.max())
    if len(prompts) == live_PG.shape[0] and width == live_PG.shape[1]:
        return None, None
    order = (~live_PG[prompts]).int().argsort(dim=1, stable=True)[:, :width]  # live ones first, in their order
    return prompts, (prompts[:, None] * live_PG.shape[1] + order).reshape(-1)

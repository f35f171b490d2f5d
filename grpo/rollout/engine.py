"""The rollout: many completions of each prompt, one token a step, the prompt read once.

Rows stand in a grid of P prompts by G completions. Finished rows stop counting at once and leave the batch as soon as a
whole column of the grid is free, so no row waits long for others. Nothing that is sampled depends on the layout:
see `grpo.rollout.sampling`.

Shapes: P prompts, G completions each, R = P * G rows, V vocabulary.
"""
import math
from collections.abc import Callable, Sequence

import torch

from grpo.policy import Policy
from grpo.records import Completion
from grpo.rollout.sampling import draw, uniform
from tasks.base import UserError


def budget_for(policy: Policy, prompt: tuple[int, ...], target: str, asked: int = 0) -> int:
    """Return the most new tokens a completion may take: a quarter more than its target does, or `asked`.

    Raises UserError where `asked` is too small for the target, or the context for prompt and completion.
    """
    needed = policy.target_length(target)
    if asked and asked < needed:
        raise UserError(f"--max-new-tokens {asked}: the right answer takes {needed} tokens; give at least that, or "
                        "leave it out")
    budget = asked or math.ceil(1.25 * needed)
    if len(prompt) + budget > policy.context:
        raise UserError(f"--model {policy.name}: its context of {policy.context} tokens is too short for this level: "
                        f"{len(prompt)} tokens of prompt and {budget} of completion; give fewer --words")
    return budget


@torch.no_grad()
def generate(policy: Policy, prompts: Sequence[tuple[int, ...]], *, keys: Sequence[Sequence[int]],
             temperatures: Sequence[float], budgets: Sequence[int], truncate: Callable | None = None) -> list[list[Completion]]:
    """Return `len(keys[p])` completions of each prompt p (as many for every prompt), in order.

    `keys` (P, G) are 64-bit sample keys (`sampling.sample_key`); `temperatures` and `budgets` (most new tokens)
    count for all completions of a prompt; temperature 0 is greedy. Log-probs are those of the distribution drawn from.
    """
    P, G, device = len(prompts), len(keys[0]), policy.device
    last_PH, shared = policy.prefill(list(prompts))
    shared.allot(P * G, max(budgets))
    logits = policy.head(last_PH).float().repeat_interleave(G, 0)  # (R, V)
    rows = torch.arange(P * G)  # which completion each row of the batch is writing
    budget = torch.tensor(budgets).repeat_interleave(G)
    heat = torch.tensor(temperatures, dtype=torch.float32, device=device).repeat_interleave(G)
    key = torch.tensor([k for row in keys for k in row], dtype=torch.int64, device=device)
    stops = torch.tensor(policy.stops)
    tokens = torch.zeros(P * G, max(budgets), dtype=torch.long)
    logprobs = torch.zeros(P * G, max(budgets))
    lengths = torch.zeros(P * G, dtype=torch.long)
    live = torch.ones(P * G, dtype=torch.bool)
    columns = G
    for position in range(max(budgets)):
        chosen, chosen_logprob = _choose(logits, heat, key, position, truncate)
        chosen_cpu = chosen.cpu()
        writing = rows[live]
        tokens[writing, position] = chosen_cpu[live]
        logprobs[writing, position] = chosen_logprob.cpu()[live]
        lengths[writing] = position + 1
        live &= ~torch.isin(chosen_cpu, stops) & (budget > position + 1)
        if not live.any():
            break
        kept_prompts, kept = _compact(live.view(-1, columns))
        if kept is not None:
            shared.retire(kept_prompts.to(device), kept.to(device))
            chosen, heat, key = (x[kept.to(device)] for x in (chosen, heat, key))
            rows, budget, live = rows[kept], budget[kept], live[kept]
            columns = len(kept) // len(kept_prompts)
        hidden = policy.extend(chosen[:, None], shared)
        shared.keep(torch.ones_like(chosen))
        logits = policy.head(hidden[:, 0]).float()
    flat = [_completion(policy, ids[:n].tolist(), lp[:n].tolist()) for ids, lp, n in zip(tokens, logprobs, lengths)]
    return [flat[p * G:(p + 1) * G] for p in range(P)]


def _completion(policy: Policy, tokens: list[int], logprobs: list[float]) -> Completion:
    finish = "stop" if tokens[-1] in policy.stops else "length"
    return Completion(tuple(tokens), tuple(logprobs), policy.decode(tokens), finish)


def _choose(logits_RV, heat_R, key_R, position, truncate):
    """Return the token drawn for each row and its log-probability under the distribution it was drawn from."""
    greedy = heat_R == 0
    scaled = logits_RV / torch.where(greedy, 1.0, heat_R)[:, None]
    if truncate is not None:
        scaled = truncate(scaled, None)
    logp = scaled.log_softmax(-1)
    chosen = torch.where(greedy, logp.argmax(-1), draw(logp, uniform(key_R, position)))
    return chosen, logp.gather(1, chosen[:, None])[:, 0]


def _compact(live_PG: torch.Tensor):
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

"""The rollout: many completions of each prompt, the prompt read once, one token or several
(`speculative`) a forward pass.

Nothing that is sampled depends on the layout of the batch, on who shares it, or on drafts: see
`grpo.rollout.sampling`. The forward passes are a decoder's: `cuda_decoder`, where the device and
the model allow it, or else `eager_decoder`.

Shapes: P prompts, G completions each, R = P * G completions.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from grpo.model.policy import Policy
from grpo.records import Completion
from grpo.rollout.cuda_decoder import CudaDecoder, cuda_step
from grpo.rollout.eager_decoder import EagerDecoder
from grpo.rollout.speculative import LENGTHS, SHORT, AcceptanceModel, DraftPlans
from tasks.base import Problem, UserError

Guess = Callable[
    [str], str
]  # text so far -> the rest of it; each completion has a copy of its own, which may remember
PASSED_OVER = 16  # problems in a row that may be too long for the context, before the level is


def fitting(
    policy: Policy, problems: Iterable[Problem], passed: list[Problem], asked: int | None = None
) -> Iterator[Problem]:
    """Yield the problems whose prompt and target fit the context, and put the others into `passed`.

    Where a budget is `asked` for (--max-new-tokens), the target must fit that as well. Raises
    UserError where PASSED_OVER problems in a row do not fit.
    """
    in_a_row = 0
    for problem in problems:
        prompt = policy.encode(problem)
        needed = policy.target_length(problem.target)
        if len(prompt) + needed <= policy.context and (not asked or needed <= asked):
            in_a_row = 0
            yield problem
        else:
            in_a_row += 1
            passed.append(problem)
            if in_a_row == PASSED_OVER:
                budget_for(policy, prompt, problem.target, asked)  # says what is wrong


def budget_for(
    policy: Policy,
    prompt: tuple[int, ...],
    target: str,
    asked: int | None = None,
    declared: int = 0,
) -> int:
    """Return the most new tokens a completion may take; at most what the context leaves.

    That is `asked` (--max-new-tokens), or else a quarter more than the target takes, and no less
    than the task has `declared`. Raises UserError where `asked` is too small for the target, or
    the context for prompt and target.
    """
    needed = policy.target_length(target)
    return budget(needed, len(prompt), policy.context, asked, policy.name, declared)


def budget(
    needed: int, prompt: int, context: int, asked: int | None, name: str, declared: int = 0
) -> int:
    """The same, where the answer takes `needed` tokens after a `prompt` of so many, and the model
    called `name` has such a `context`.
    """
    if asked and asked < needed:
        raise UserError(
            f"--max-new-tokens {asked}: the right answer takes {needed} tokens; give at least "
            "that, or "
            "leave it out"
        )
    room = context - prompt
    if room < needed:
        raise UserError(
            f"--model {name}: its context of {context} tokens is too short for this level: "
            f"{prompt} tokens of prompt and {needed} of the right answer; give fewer --words or "
            "--shots"
        )
    return min(asked or max(declared, math.ceil(1.25 * needed)), room)


def generate(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    *,
    keys: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    budgets: Sequence[int],
    truncate: Callable | None = None,
    guesses: Sequence[Guess] | None = None,
    drafting: AcceptanceModel | None = None,
) -> list[list[Completion]]:
    """Return `len(keys[p])` completions of each prompt p (as many for every prompt), in order.

    `keys` (P, G) are 64-bit sample keys (`sampling.sample_key`); `temperatures` and `budgets`
    (most new tokens) count for all completions of a prompt; temperature 0 is greedy. Log-probs are
    those of the distribution drawn from. `guesses`, one a prompt, are drafted from as `drafting`
    decides, and its figures brought up to date. Prompts for which a GPU has no memory at once are
    answered one lot after the other. Raises FloatingPointError where a token was drawn from a
    distribution that is not finite, UserError where memory runs out.
    """
    answers: list[list[Completion]] = []
    lot = policy.prompts_at_once(len(keys[0]), max(map(len, prompts)), max(budgets) + SHORT + 1)
    for some in (slice(start, start + lot) for start in range(0, len(prompts), lot)):
        try:
            answers += _generate(
                policy,
                prompts[some],
                keys[some],
                temperatures[some],
                budgets[some],
                truncate,
                guesses[some] if guesses else None,
                drafting,
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory in the rollout of {len(keys[some]) * len(keys[0])} completions of "
                f"up to {max(budgets[some])} tokens; give a smaller "
                "--group-size, fewer --words, or a smaller model"
            ) from error
    return answers


@torch.no_grad()
def _generate(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    keys: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    budgets: Sequence[int],
    truncate: Callable | None,
    guesses: Sequence[Guess] | None,
    drafting: AcceptanceModel | None,
) -> list[list[Completion]]:
    """Answer prompts that fit in memory together; see `generate`."""
    P, G, room = len(prompts), len(keys[0]), max(budgets)
    is_drafted = guesses is not None and drafting is not None and drafting.fixed != 0
    longest = max(k for k in LENGTHS if k <= SHORT or is_drafted and k <= room)
    width = room + longest + 1  # drafts may reach beyond the budget; there they never count

    keys_C = torch.tensor([key for row in keys for key in row])
    temperature_C = torch.tensor(temperatures, dtype=torch.float32).repeat_interleave(G)
    budget_C = torch.tensor(budgets).repeat_interleave(G)
    request = (prompts, keys_C, temperature_C, budget_C, truncate, width)
    step = cuda_step(policy)
    decoder: Decoder = CudaDecoder(step, *request) if step else EagerDecoder(policy, *request)

    drafter = None
    if is_drafted and guesses is not None and drafting is not None:
        plans = DraftPlans(policy, [guess for guess in guesses for _ in range(G)], width)
        drafter = _Drafter(plans, drafting, longest, distinct=P * G)

    tokens = torch.zeros(P * G, width, dtype=torch.long)
    logprobs = torch.zeros(tokens.shape)
    lengths = torch.zeros(P * G, dtype=torch.long)
    rows = torch.arange(P * G)  # which completion each row of the decoder is writing
    drafts = torch.empty(P * G, 0, dtype=torch.long)
    while len(rows):
        # One forward pass: the drafts are verified, and one more token is drawn.
        start = time.perf_counter()
        chosen, chosen_logprobs, count = decoder.step(drafts)
        written = lengths[rows]
        if drafter is not None:
            drafter.observe(decoder, rows, written, drafts, chosen, count, start)

        # What was drawn after a rejected draft is overwritten later, or cut off at the end.
        places = written[:, None] + torch.arange(chosen.shape[1])
        tokens[rows[:, None], places] = chosen
        logprobs[rows[:, None], places] = chosen_logprobs
        lengths[rows] = written + count

        rows = rows[decoder.retire()]
        drafts = torch.empty(len(rows), 0, dtype=torch.long)
        if drafter is not None and len(rows):
            drafts = drafter.propose(decoder, rows, tokens, lengths)

    flat = [
        _completion(policy, ids[:n].tolist(), lp[:n].tolist())
        for ids, lp, n in zip(tokens, logprobs, lengths)
    ]
    return [flat[p * G : (p + 1) * G] for p in range(P)]


class Decoder(Protocol):
    """Runs the forward passes of one rollout: `EagerDecoder`, or on a GPU `CudaDecoder`.

    `flat` and `aim` describe the cost of a pass, see `AcceptanceModel.length`.
    """

    flat: int
    aim: int

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of drafts that it can verify, in tokens."""

    @property
    def live(self) -> Tensor:
        """Which completions (C,) a draft is wanted for: one of those that have read the same."""

    def step(self, drafts_Ck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Verify the drafts and draw one token more: tokens and log-probabilities (C, T), and how
        many of them count (C,).
        """

    def retire(self) -> Tensor:
        """Drop finished completions; return which rows stay, in order."""


class _Drafter:
    """Speculative decoding within one rollout: what to draft, and how well it went."""

    def __init__(
        self, plans: DraftPlans, drafting: AcceptanceModel, longest: int, *, distinct: int
    ):
        self.plans, self.drafting, self.longest = plans, drafting, longest
        self.distinct = distinct  # rows that differ, which is what a pass costs

    def observe(
        self,
        decoder: Decoder,
        rows: Tensor,
        written: Tensor,
        drafts: Tensor,
        chosen: Tensor,
        count: Tensor,
        start: float,
    ):
        """Learn from a pass that began at `start` which drafts were accepted, and what it cost."""
        matched, slipped = self.plans.observe(rows, written, chosen, count)
        self.drafting.observe(
            drafts.shape[1],
            self.distinct,
            decoder.flat,
            matched,
            slipped,
            count,
            time.perf_counter() - start,
        )

    def propose(self, decoder: Decoder, rows: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the next drafts (C, k), of the length that is expected to pay most."""
        live = decoder.live
        self.distinct = int(live.sum())
        k = self.drafting.length(
            self.distinct,
            decoder.flat,
            decoder.aim,
            [k for k in decoder.lengths if k <= self.longest],
            self.plans.matched[rows[live]].sum().item(),
            self.plans.slipped[rows[live]].sum().item(),
        )
        return self.plans.offer(rows, live, tokens, lengths[rows], k)


def _completion(policy: Policy, tokens: list[int], logprobs: list[float]) -> Completion:
    if not all(map(math.isfinite, logprobs)):
        place = next(i for i, value in enumerate(logprobs) if not math.isfinite(value))
        raise FloatingPointError(
            f"token {place + 1} of a completion was drawn with a log-probability of "
            f"{logprobs[place]}: the model's logits are not finite"
        )
    finish = "stop" if tokens[-1] in policy.stops else "length"
    return Completion(tuple(tokens), tuple(logprobs), policy.decode(tokens), finish)

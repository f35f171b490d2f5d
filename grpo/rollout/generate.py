"""The rollout: sample many completions of each prompt.

A sample depends neither on the layout of the batch, nor on the other prompts in it, nor on drafts:
see `grpo.rollout.sampling`. So every decoder writes the same completions, up to rounding.

Shapes: P prompts, G completions each, C completions that are still being written (P * G at first).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.data.errors import UserError, lacks_memory
from grpo.distributed import Ranks
from grpo.model.policy import Policy
from grpo.records import Completion, Group, Resumable
from grpo.rollout.sampling import choose, uniform
from grpo.tasks.base import Problem, Task, asked

# A guess takes the text so far and returns how it may continue. Each completion has its own copy,
# so a guess may remember what it has seen.
Guess = Callable[[str], str]

# By prompt; and what a decoder writes: the tokens of each completion, and their log-probabilities.
Completions = list[list[Completion]]
Written = list[tuple[list[int], list[float]]]

# Whether nothing after these tokens of a completion is scored. Once true, it stays true.
IsEnough = Callable[[Sequence[int]], bool]


class Drafting(Resumable):
    """How often drafted tokens are accepted, which decides how much `grpo.fast` drafts. A rollout
    adds what it has seen.
    """

    STATE = ("matched", "rejected")

    matched, rejected = 8.0, 2.0  # recent counts; assumed until something is observed

    def __init__(self, length: int | None = None):
        self.fixed = length  # of every draft, in tokens; None: as it pays
        self.begin()

    def begin(self) -> None:
        """Begin a step. The counts of earlier steps lose half of their weight."""
        self.matched, self.rejected = self.matched / 2, self.rejected / 2
        self.tokens = self.passes = 0  # of all completions, in this step

    @property
    def acceptance(self) -> float:
        """The probability that a drafted token is accepted."""
        return (self.matched + 0.1) / (self.matched + self.rejected + 0.2)

    def observe(
        self, draft_length: int, matched: int, rejected: int, completions: int, tokens: int
    ) -> None:
        """Learn from one pass, or from any number of passes without drafts (`draft_length` 0).

        The `completions` gained so many `tokens`. So many drafted ones `matched`, and in so many
        rows one was `rejected`.
        """
        self.matched += matched
        self.rejected += rejected
        self.tokens += tokens
        self.passes += completions if draft_length else tokens

    def metrics(self) -> dict[str, float]:
        """Return the step's figures."""
        if not self.passes:
            return {}
        return {
            "draft/acceptance": self.acceptance,
            "draft/tokens_per_forward": self.tokens / self.passes,
        }

    def average(self, ranks: Ranks) -> None:
        """Go on from the mean counts of all ranks, which all of them find in the checkpoint."""
        counts = ranks.gather([(self.matched, self.rejected)])
        self.matched, self.rejected = (sum(each) / len(each) for each in zip(*counts, strict=True))


@dataclass(frozen=True)
class RolloutRequest:
    """P prompts to be answered, with the same number G of completions each.

    E.g. two greedy completions of a prompt: ``RolloutRequest([(5, 8)], [[1, 2]], 0.0, [32])``.
    """

    prompts: Sequence[tuple[int, ...]]  # token ids
    keys: Sequence[Sequence[int]]  # (P, G), see `sampling.sample_key`
    temperature: float  # 0 is greedy
    budgets: Sequence[int]  # the most new tokens of a completion
    truncate: Callable | None = None  # cuts the distribution, see `sampling.truncation`
    guesses: Sequence[Guess] = ()  # what is drafted from; () for no drafts
    drafting: Drafting = field(default_factory=Drafting)  # how much is drafted
    answers: Sequence[Sequence[int]] = ()  # the right ones, which are drafted first
    is_enough: Sequence[IsEnough | None] | None = None  # None: everything is scored

    @property
    def group_size(self) -> int:
        """The number of completions of each prompt, G."""
        return len(self.keys[0])

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """The sample keys and budgets of all completions, (P * G,) each."""
        keys = torch.tensor([key for group in self.keys for key in group])
        return keys, torch.tensor(self.budgets).repeat_interleave(self.group_size)

    @property
    def is_drafted(self) -> bool:
        """Whether a decoder that can do so drafts tokens."""
        return bool(self.guesses) and self.drafting.fixed != 0

    def ends_at(self, c: int, tokens: Sequence[int]) -> bool:
        """Return whether nothing after the `tokens` of completion `c` is scored."""
        is_enough = self.is_enough[c // self.group_size] if self.is_enough else None
        return is_enough is not None and is_enough(tokens)

    def of(self, prompts: Sequence[int]) -> "RolloutRequest":
        """Return the request for some of the prompts."""
        by_prompt = ("prompts", "keys", "budgets", "guesses", "answers", "is_enough")
        given = {name: x for name in by_prompt if (x := getattr(self, name))}
        chosen: dict[str, Any] = {name: [x[p] for p in prompts] for name, x in given.items()}
        return replace(self, **chosen)


class PlainDecoder:
    """The decoder for every model and device: one token a step, see `grpo.model.rows`."""

    def __init__(self, policy: Policy):
        self.policy = policy

    @torch.no_grad()
    def decode(self, request: RolloutRequest) -> Written:
        """Return the tokens of each completion, and their log-probabilities."""
        lots: dict[int, list[int]] = {}  # of prompts that are answered together
        for p, prompt in enumerate(request.prompts):
            lots.setdefault(len(prompt) * self.policy.rows.needs_one_length, []).append(p)

        answers: dict[int, list[tuple[list[int], list[float]]]] = {}
        for lot in lots.values():
            written, G = self._decode(request.of(lot)), request.group_size
            answers |= {p: written[i * G : i * G + G] for i, p in enumerate(lot)}
        return [answer for p in range(len(request.prompts)) for answer in answers[p]]

    def _decode(self, request: RolloutRequest) -> Written:
        policy = self.policy
        keys_C, budgets_C = request.flat
        written: list[tuple[list[int], list[float]]] = [([], []) for _ in keys_C]

        rows = policy.rows(policy, request.prompts, request.group_size)
        live_C, place = torch.arange(len(written)), 0
        with rows.decoding():
            while True:
                token_C1, logprob_C1 = choose(
                    rows.logits[:, None],
                    request.temperature,
                    uniform(keys_C[live_C], place)[:, None].to(policy.device),
                    torch.arange(len(live_C), device=policy.device),
                    request.truncate,
                )
                tokens, logprobs = token_C1[:, 0].tolist(), logprob_C1[:, 0].tolist()
                for c, token, logprob in zip(live_C.tolist(), tokens, logprobs):
                    written[c][0].append(token)
                    written[c][1].append(logprob)

                goes_on = [
                    token not in policy.stops and not request.ends_at(c, written[c][0])
                    for c, token in zip(live_C.tolist(), tokens)
                ]
                stay = (torch.tensor(goes_on) & (place + 1 < budgets_C[live_C])).nonzero()[:, 0]
                if not len(stay):
                    return written
                live_C = live_C[stay]
                place += 1
                rows.go_on(stay, torch.tensor(tokens)[stay])

    def room(self, request: RolloutRequest) -> int:
        """Return for how many tokens of a row, its prompt included, there must be memory."""
        return max(map(len, request.prompts)) + max(request.budgets)


def sample_groups(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    indices: Sequence[int],
    keys: Sequence[Sequence[int]],
    temperature: float,
    budgets: Sequence[int],
    drafting: Drafting,
    truncate: Callable | None = None,
    stops_early: bool = False,
    engine: Any = None,
) -> list[Group]:
    """Return an unscored group of completions for each problem; see `RolloutRequest`.

    With `stops_early` a completion ends where the task scores nothing that follows, else only
    behind a window.
    """
    prompts = [policy.encode(problem) for problem in problems]
    guesses = [asked(task, "draft", problem) for problem in problems]
    request = RolloutRequest(
        prompts,
        keys,
        temperature,
        budgets,
        truncate,
        guesses if any(guesses) else (),
        drafting,
        [policy.answer_tokens(problem) for problem in problems] if any(guesses) else (),
        is_enough=tests_of_enough(policy, task, problems, stops_early),
    )
    answers = generate(policy, request, engine)
    return [
        Group(
            index,
            problem,
            prompt,
            temperature,
            completions,
            shots=policy.shots(problem),
            opened=policy.opened(problem),
        )
        for index, problem, prompt, completions in zip(
            indices, problems, prompts, answers, strict=True
        )
    ]


def generate(policy: Policy, request: RolloutRequest, engine: Any = None) -> Completions:
    """Return the completions of each prompt, in order; those of an `engine` if there is one.

    If a GPU has too little memory for all prompts at once, they are answered in several
    batches. Raises FloatingPointError if a token was drawn from a distribution that is not finite.
    """
    if engine:
        return _completions(policy, request, engine.decode(request))

    decoder = policy.decoder or PlainDecoder(policy)
    longest, room = max(map(len, request.prompts)), decoder.room(request)
    G = request.group_size

    answers: Completions = []
    while (start := len(answers)) < len(request.prompts):
        # The policy knows its own sizes, but not what other programs on the GPU take.
        at_once = policy.prompts_at_once(G, longest, room)
        at_once = max(1, int(min(at_once, policy.rollout_tokens / (G * room))))
        batch = request.of(range(start, min(start + at_once, len(request.prompts))))
        try:
            written = decoder.decode(batch)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            if len(batch.prompts) == 1:
                raise UserError(
                    f"out of memory in the rollout of {G} completions of up to "
                    f"{max(batch.budgets)} tokens; give a smaller --group-size, a lower level, or "
                    "a smaller model"
                ) from error
            written = None

        # Not in the except block: there the exception keeps the tensors of the failed rollout.
        if written is None:
            policy.free_decoder()
            policy.rollout_tokens = len(batch.prompts) * G * room / 2
            policy.events.append(
                f"out of memory: rollouts of at most {max(1, len(batch.prompts) // 2) * G} "
                f"completions of {room} tokens at a time from now on"
            )
            continue

        answers += _completions(policy, batch, written)
    return answers


def _completions(policy: Policy, request: RolloutRequest, written: Written) -> Completions:
    """Return the completions of each prompt, from what a decoder has written."""
    completions = [_completion(policy, request, c, *drawn) for c, drawn in enumerate(written)]
    G = request.group_size
    return [completions[i : i + G] for i in range(0, len(completions), G)]


def _completion(
    policy: Policy, request: RolloutRequest, c: int, tokens: list[int], logprobs: list[float]
) -> Completion:
    for place, logprob in enumerate(logprobs, 1):
        if not math.isfinite(logprob):
            raise FloatingPointError(
                f"token {place} of a completion was drawn with a log-probability of {logprob}: "
                "the model's logits are not finite"
            )

    finish = "stop" if tokens[-1] in policy.stops else "length"
    if request.ends_at(c, tokens):
        # A decoder may have drawn more tokens than are scored. Each token depends only on those
        # before it, so cutting the rest off changes nothing else.
        counts = range(1, len(tokens))
        enough = bisect_left(counts, True, key=lambda count: request.ends_at(c, tokens[:count])) + 1
        tokens, logprobs, finish = tokens[:enough], logprobs[:enough], "enough"
    return Completion(tuple(tokens), tuple(logprobs), policy.decode(tokens), finish)


def tests_of_enough(
    policy: Policy, task: Any, problems: Sequence[Problem], stops_early: bool
) -> list[IsEnough | None] | None:
    """Return a test for the completions of each problem; None where the whole text is scored, which
    a right answer with words behind it tells, or where only windows are asked for.
    """
    found: list[IsEnough | None] = [
        partial(_is_enough, policy, task, problem, policy.answer_tokens(problem))
        if (stops_early or problem.goes_on)
        and asked(task, "is_enough", problem, f"{problem.target} and more")
        else None
        for problem in problems
    ]
    return found if any(found) else None


def _is_enough(
    policy: Policy, task: Any, problem: Problem, answer: tuple[int, ...], tokens: Sequence[int]
) -> bool:
    is_right = tuple(tokens) == answer[: len(tokens)]  # so far; most are, and need no text
    return not is_right and asked(task, "is_enough", problem, policy.decode(tokens))


# Token budgets

MAX_TOO_LONG = 16  # problems in a row that do not fit, after which `fitting` raises


def budget_for(
    policy: Policy,
    prompt: tuple[int, ...],
    target: str,
    asked: int | None = None,
    declared: int = 0,
) -> int:
    """Return the most new tokens a completion of the policy may take.

    They are `asked` (--max-new-tokens) if that is given, else a quarter more than the right answer
    takes, or what the task has `declared` if that is larger; at most what the context has room for.
    Raises UserError if the right answer does not fit.
    """
    needed = len(policy.target_tokens(target)) + 1  # its end token included
    if asked and asked < needed:
        raise UserError(
            f"--max-new-tokens {asked}: the right answer takes {needed} tokens; give at least "
            "that, or leave it out"
        )

    room = policy.context - len(prompt)
    if room < needed:
        raise UserError(
            f"--model {policy.name}: its context of {policy.context} tokens is too short for this "
            f"level: the prompt takes {len(prompt)} tokens and the right answer {needed}; give a "
            "lower level, shorter prompts or fewer --shots"
        )
    return min(asked or max(declared, math.ceil(1.25 * needed)), room)


def fitting(
    policy: Policy, problems: Iterable[Problem], too_long: list[Problem], asked: int | None = None
) -> Iterator[Problem]:
    """Yield the problems whose prompt and target fit the context, and whose target fits the budget
    `asked`; append the others to `too_long`. Raises UserError after MAX_TOO_LONG in a row.
    """
    in_a_row = 0
    for problem in problems:
        prompt = policy.encode(problem)
        try:
            budget_for(policy, prompt, problem.target, asked)
        except UserError:
            in_a_row += 1
            too_long.append(problem)
            if in_a_row == MAX_TOO_LONG:
                raise
        else:
            in_a_row = 0
            yield problem

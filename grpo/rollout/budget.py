"""Token budgets: how many new tokens a completion may take, and which problems fit the context."""

import math
from collections.abc import Iterable, Iterator

from data.errors import UserError
from grpo.model.policy import Policy
from tasks.base import Problem

# A prompt that leaves a smaller share of a completion's budget is warned of.
LEAST_ROOM = 0.5

# The search for problems ends after this many in a row that do not fit the context.
MAX_TOO_LONG = 16


def budget_for(
    policy: Policy,
    prompt: tuple[int, ...],
    target: str,
    asked: int | None = None,
    declared: int = 0,
) -> int:
    """Return the most new tokens a completion of the policy may take.

    The budget is `asked` (--max-new-tokens) if that is given. Otherwise it is a quarter more than
    the right answer takes, or what the task has `declared` if that is larger. It never exceeds the
    room that the `prompt` leaves in the model's context.

    Raises UserError if `asked` is too small for the right answer, or if prompt and answer do not
    fit the context.
    """
    needed = policy.target_length(target)
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


def room_warning(
    policy: Policy, problem: Problem, asked: int | None = None, declared: int = 0
) -> str:
    """Return a warning if the prompt leaves less than half of a completion's budget, else "".

    Such a completion is probably cut off, and nothing else would say why. The budget is what is
    `asked` or `declared`; one that follows from the right answer is never cut so far, because
    prompt and answer fit the context.
    """
    wanted = asked or declared
    prompt = len(policy.encode(problem))
    room = policy.context - prompt
    if room >= LEAST_ROOM * wanted:
        return ""
    return (
        f"{problem.title}: its prompt takes {prompt:,} of the model's {policy.context:,} tokens, "
        f"which leaves a completion {room:,} instead of {wanted:,}, as in every such problem; give "
        "shorter prompts, fewer --shots, a model with a longer context, or as --max-new-tokens "
        "what a completion needs"
    )


def fitting(
    policy: Policy, problems: Iterable[Problem], too_long: list[Problem], asked: int | None = None
) -> Iterator[Problem]:
    """Yield the problems whose prompt and target fit the context; append the others to `too_long`.

    If --max-new-tokens gives a budget (`asked`), the target must fit the budget as well. Raises
    UserError after MAX_TOO_LONG problems in a row that do not fit.
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
            too_long.append(problem)
            if in_a_row == MAX_TOO_LONG:
                # It raises an error that says what does not fit.
                budget_for(policy, prompt, problem.target, asked)

"""The enumeration test of a loss, on a policy so small that every completion can be listed.

    from enumeration import check_loss
    from my_loss import loss

    def test_my_loss():
        check_loss(loss)

The policy is a table of logits over 3 tokens, one row for each context (nothing yet, after token 0,
after token 1). Token 2 ends a completion, and completions have at most 2 tokens. So there are seven
in all, and every expectation is a sum. The exact gradients know no tensors: they are computed with
`math` alone, by central differences.

Shapes: R rows (completions), T tokens, C contexts, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo.learn.loss import LossInputs, LossSettings, OwnLoss, step_loss, token_weights

Table = Sequence[Sequence[float]]

COMPLETIONS = [(2,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
ADVANTAGES = [1.5, -1.0, 0.5, -2.0, 0.0, 2.0, -0.25]

# Logits (C, V): the policy that is trained, and another that has sampled.
POLICY = [[0.3, -0.2, 0.1], [1.0, 0.0, -0.5], [-0.4, 0.6, 0.2]]
OLD = [[0.4, -0.6, 0.5], [0.2, 0.3, 0.1], [-0.1, -0.3, 0.9]]

LENGTHS_R = torch.tensor([len(completion) for completion in COMPLETIONS])
FIRST_R = torch.tensor([completion[0] for completion in COMPLETIONS])
LAST_R = torch.tensor([completion[-1] for completion in COMPLETIONS])
MASK_RT = torch.arange(2) < LENGTHS_R[:, None]
ADVANTAGES_R = torch.tensor(ADVANTAGES, dtype=torch.float64)

STEP = 1e-5  # of the central differences, whose error is then 1e-10
TOLERANCE = 1e-8  # the largest error of a gradient in float64


def check_loss(
    loss: str | Callable,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    is_policy_gradient: bool = True,
) -> None:
    """Check a loss, which is one of `LOSSES` or a function as `grpo.learn.loss` describes.

    1. On policy, with each completion weighted by its probability, its gradient is the exact
       gradient of the negative expected advantage. A loss that is meant to have another gradient,
       such as one with a further term, passes by ``is_policy_gradient=False``.
    2. Off policy, its value and its gradient do not change when a step is cut into micro-batches
       and its rows are permuted.

    Raises AssertionError, which says what is wrong, or UserError for what training would refuse.
    """
    if isinstance(loss, str):
        settings, weights = LossSettings(loss, clip_low, clip_high), loss
    else:
        own = OwnLoss(loss)
        settings, weights = LossSettings(own.spec, clip_low, clip_high, own_loss=own), own.weights

    if is_policy_gradient:
        _check_policy_gradient(settings)
    _check_micro_batches(settings, weights)


def _check_policy_gradient(settings: LossSettings) -> None:
    """Compare the mean gradient over all completions with the exact policy gradient."""
    probabilities_R = torch.tensor(probabilities(POLICY), dtype=torch.float64)
    table_CV = torch.tensor(POLICY, dtype=torch.float64).requires_grad_()
    logp_RT, entropy_RT = logprobs(table_CV), entropies(table_CV)
    inputs = LossInputs(
        logp_RT, logp_RT.detach(), ADVANTAGES_R, MASK_RT, probabilities_R, entropy_RT=entropy_RT
    )
    step_loss(inputs, settings)[0].backward()
    assert table_CV.grad is not None

    exact_CV = central_differences(_negative_expectation, POLICY)
    error = (table_CV.grad - torch.tensor(exact_CV, dtype=torch.float64)).abs().max().item()
    if not error <= TOLERANCE:
        raise AssertionError(
            f"loss {settings.kind}: on policy its mean gradient differs by {error:.3g} from the "
            f"policy gradient: {_rounded(table_CV.grad.tolist())} instead of {_rounded(exact_CV)}"
        )


def _check_micro_batches(settings: LossSettings, weights: str) -> None:
    """Compare a step, off policy, with the same step cut into parts, rows permuted."""
    whole_RT, value = _gradient(settings, weights, list(range(len(COMPLETIONS))))
    order = [3, 0, 6, 1, 5, 2, 4]
    for size in (1, 2, 3, 7):
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        gradients, values = zip(*(_gradient(settings, weights, rows) for rows in parts))
        error = (torch.cat(gradients) - whole_RT[torch.tensor(order)]).abs().max().item()
        error = max(error, abs(sum(values) - value))
        if not error <= TOLERANCE:
            raise AssertionError(
                f"loss {settings.kind}: depends on how a step is cut into micro-batches: with "
                f"{size} rows in each, its gradient or its value differs by {error:.3g}"
            )


def _gradient(settings: LossSettings, weights: str, rows: Sequence[int]) -> tuple[Tensor, float]:
    """Return the gradient of some rows of the step by their log-probabilities and entropies, and
    the loss.
    """
    weights_R = token_weights(weights, LENGTHS_R, max_length=2)
    table_CV, old_CV = (torch.tensor(table, dtype=torch.float64) for table in (POLICY, OLD))
    leaves = [x_RT[rows].requires_grad_() for x_RT in (logprobs(table_CV), entropies(table_CV))]
    inputs = LossInputs(
        leaves[0],
        logprobs(old_CV)[rows],
        ADVANTAGES_R[rows],
        MASK_RT[rows],
        weights_R[rows],
        entropy_RT=leaves[1],
    )
    loss, _ = step_loss(inputs, settings)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat(gradients, -1), loss.item()


def _rounded(table: Table) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in table]


# The exact side: plain floats.


def completion_logprobs(table: Table, completion: Sequence[int]) -> list[float]:
    """Return the log-probability of each token of `completion`."""
    contexts = (0, *(1 + token for token in completion[:-1]))
    return [
        table[context][token] - math.log(sum(map(math.exp, table[context])))
        for context, token in zip(contexts, completion, strict=True)
    ]


def probabilities(table: Table) -> list[float]:
    """Return the probability of each completion; they add up to 1."""
    return [math.exp(sum(completion_logprobs(table, each))) for each in COMPLETIONS]


def _negative_expectation(table: Table) -> float:
    """Return minus the expected advantage, which a policy gradient method minimises."""
    return -sum(p * advantage for p, advantage in zip(probabilities(table), ADVANTAGES))


def central_differences(function: Callable[[Table], float], table: Table) -> list[list[float]]:
    """Return the gradient of function(table), as a table.

    Its error is of the order of STEP squared, 1e-10.
    """

    def shifted(context: int, token: int, by: float) -> Table:
        return [
            [x + by * ((c, v) == (context, token)) for v, x in enumerate(row)]
            for c, row in enumerate(table)
        ]

    return [
        [
            (function(shifted(c, v, STEP)) - function(shifted(c, v, -STEP))) / (2 * STEP)
            for v in range(len(row))
        ]
        for c, row in enumerate(table)
    ]


# The same policy in tensors.


def logprobs(table_CV: Tensor) -> Tensor:
    """Return the log-probabilities (R, T) of all completions.

    Padding depends on the table too, so that a loss which reads it would show.
    """
    logprobs_CV = table_CV.log_softmax(-1)
    return torch.stack(
        [logprobs_CV[0, FIRST_R], logprobs_CV[1 + FIRST_R.clamp(max=1), LAST_R]], dim=-1
    )


def entropies(table_CV: Tensor) -> Tensor:
    """Return the entropies (R, T) in nats of what the tokens of all completions were drawn from."""
    entropies_C = torch.special.entr(table_CV.softmax(-1)).sum(-1)
    return entropies_C[torch.stack([torch.zeros_like(FIRST_R), 1 + FIRST_R.clamp(max=1)], dim=-1)]

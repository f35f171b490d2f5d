"""Losses in float64 against direct enumeration, on the policy of `enumeration`.

The oracle knows no tensors: it computes the objective from the papers' formulas with `math`, and
its gradient by central differences.

Shapes: R rows (answers), T tokens, C contexts, V vocabulary.
"""

import math

import pytest
import torch
from enumeration import (
    ADVANTAGES,
    ADVANTAGES_R,
    COMPLETIONS,
    LENGTHS_R,
    MASK_RT,
    OLD,
    POLICY,
    central_differences,
    check_loss,
    completion_logprobs,
    logprobs,
    probabilities,
)
from losses import step_loss

from grpo.learn.loss import LOSSES, kl_k3, token_weights

REFERENCE = [[0.0, 0.1, -0.3], [0.7, 0.4, 0.0], [0.5, 0.5, -0.2]]
LOW, HIGH, BUDGET = 0.1, 0.2, 4
CLIP = {"clip_low": LOW, "clip_high": HIGH}


# The oracle: plain floats.


def oracle(kind, table, at, old, beta):
    """Return loss, tokens clipped low and high, and the sum of k3; what has its gradient stopped
    is taken at `at`.
    """
    loss = low = high = kl = 0
    total = sum(map(len, COMPLETIONS))
    for answer, advantage in zip(COMPLETIONS, ADVANTAGES, strict=True):
        new, frozen, before, reference = (
            completion_logprobs(t, answer) for t in (table, at, old, REFERENCE)
        )
        length = len(answer)
        weight = {
            "grpo": 1 / length / len(COMPLETIONS),
            "gspo": 1 / length / len(COMPLETIONS),
            "dr_grpo": 1 / len(COMPLETIONS) / BUDGET,
        }.get(kind, 1 / total)
        for t in range(length):
            ratio = math.exp(new[t] - before[t])
            if kind == "gspo":
                ratio = (math.exp(sum(new)) / math.exp(sum(before))) ** (1 / length)
            if kind == "cispo":
                constant = math.exp(frozen[t] - before[t])
                loss -= weight * sorted([1 - LOW, constant, 1 + HIGH])[1] * advantage * new[t]
                low, high = low + (ratio < 1 - LOW), high + (ratio > 1 + HIGH)
            elif advantage > 0:  # the gain is bounded from above
                loss -= weight * advantage * min(ratio, 1 + HIGH)
                high += ratio > 1 + HIGH
            else:  # the pessimistic side of a negative advantage is the larger ratio
                loss -= weight * advantage * max(ratio, 1 - LOW)
                low += advantage < 0 and ratio < 1 - LOW
            k3 = math.exp(reference[t]) / math.exp(new[t]) - 1 - (reference[t] - new[t])
            loss, kl = loss + beta * weight * math.exp(new[t] - before[t]) * k3, kl + k3
    return loss, low, high, kl


def table(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("old", [POLICY, OLD], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_equal_the_enumeration(kind, old, beta):
    table_CV = table(POLICY).requires_grad_()
    weights_R = token_weights(kind, LENGTHS_R, max_length=BUDGET)
    given = logprobs(table_CV), logprobs(table(old)), ADVANTAGES_R, MASK_RT, weights_R
    loss, sums = step_loss(kind, *given, **CLIP, beta=beta, ref_RT=logprobs(table(REFERENCE)))
    loss.backward()

    expected, low, high, kl = oracle(kind, POLICY, POLICY, old, beta)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: x.item() for name, x in sums.items()} == pytest.approx(
        {"tokens": 13, "clipped_low": low, "clipped_high": high, "kl": kl}, rel=1e-12
    )
    assert (low > 0 and high > 0) == (old is OLD)  # both are at work off policy, none on policy

    expected_CV = table(
        central_differences(lambda t: oracle(kind, t, POLICY, old, beta)[0], POLICY)
    )
    torch.testing.assert_close(table_CV.grad, expected_CV, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_passes_the_check_for_own_losses(kind):
    # For gspo too: the gradient of length * s is the sum of the gradients of logp.
    check_loss(kind, clip_low=LOW, clip_high=HIGH)


def test_on_policy_expectation_of_the_kl_term_is_the_gradient_of_the_kl():
    # KL(policy || reference) of the next token, in the contexts that the policy visits: the visits
    # themselves are held fast, for the term of a token knows nothing of those after it. With k3
    # alone it would be the gradient of KL(reference || policy).
    table_CV = table(POLICY).requires_grad_()
    probabilities_R = table(probabilities(POLICY))
    logp_RT = logprobs(table_CV)
    step_loss(
        "grpo",
        logp_RT,
        logp_RT.detach(),
        0 * ADVANTAGES_R,
        MASK_RT,
        probabilities_R,
        **CLIP,
        beta=1.0,
        ref_RT=logprobs(table(REFERENCE)),
    )[0].backward()

    visits = [1.0] + [math.exp(completion_logprobs(POLICY, (token, 2))[0]) for token in (0, 1)]

    def divergence(values):
        rows = [
            [[x - math.log(sum(map(math.exp, row))) for x in row] for row in rows]
            for rows in (values, REFERENCE)
        ]
        return sum(
            visit * sum(math.exp(p) * (p - q) for p, q in zip(ours, theirs))
            for visit, ours, theirs in zip(visits, *rows)
        )

    torch.testing.assert_close(
        table_CV.grad, table(central_differences(divergence, POLICY)), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3])
def test_k3_of_float32_is_half_the_square_of_a_small_difference(size):
    # Sampler and trainer differ by as much. In float32, exp(d) - d - 1 is noise of either sign.
    ref_RT = torch.linspace(-size, size, 1001)[None]
    k3_RT = kl_k3(torch.zeros_like(ref_RT), ref_RT)
    assert (k3_RT >= 0).all()
    torch.testing.assert_close(k3_RT, ref_RT.double().square() / 2, rtol=size, atol=1e-22)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Ratio 1.5 with A = 1: -1.3 (clipped high). 0.9 with A = -2: 1.8. 0.5 with A = 3: -1.5.
        # 1.25 with A = 0: 0.
        ("grpo", -0.25),  # ((-1.3 + 1.8) / 2 + (-1.5 + 0) / 2) / 2
        ("dapo", -0.25),
        ("dr_grpo", -0.125),  # (-1.3 + 1.8 - 1.5) / (2 * 4)
        # -(1.3 log 0.75 - 2 * 0.9 log 0.45 + 3 * 0.8 log 0.25) / 4 = -(-0.3739867 + 1.4373138 -
        # 3.3271065) / 4
        ("cispo", 0.5659448),
    ],
)
def test_advantages_of_tokens_by_hand(kind, expected):
    logp_RT = table([[0.75, 0.45, 0.5], [0.25, 1.0, 0.5]]).log().requires_grad_()
    old_RT = table([[0.5, 0.5, 0.5], [0.5, 0.8, 0.5]]).log()
    advantages_RT = table([[1.0, -2.0, math.nan], [3.0, 0.0, math.nan]])
    mask_RT = torch.tensor([[True, True, False]] * 2)
    weights_R = token_weights(kind, mask_RT.sum(-1), max_length=4)
    given = logp_RT, old_RT, advantages_RT, mask_RT, weights_R
    loss, sums = step_loss(kind, *given, clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    assert logp_RT.grad.isfinite().all() and not logp_RT.grad[~mask_RT].any()
    assert sums["clipped_high"] == 1 and sums["clipped_low"] == (1 if kind == "cispo" else 0)


def test_a_row_that_nobody_sampled_has_no_kl_and_counts_in_no_sum():
    # Of the first row as below: -1 + 0.5 * 0.3068528; of the second, whose ratio of 2 is clipped,
    # -1.2. Each has half of the weight.
    logp_RT = table([[0.25], [0.5]]).log().requires_grad_()
    loss, sums = step_loss(
        "dapo",
        logp_RT,
        table([[0.25], [0.25]]).log(),
        table([1.0, 1.0]),
        torch.tensor([[True], [True]]),
        table([0.5, 0.5]),
        clip_low=0.2,
        clip_high=0.2,
        beta=0.5,
        ref_RT=table([[0.5], [0.1]]).log(),
        entropy_RT=table([[0.7], [0.9]]),
        sampled_R=torch.tensor([True, False]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (-1 + 0.5 * 0.3068528) - 0.5 * 1.2, abs=1e-6)
    assert logp_RT.grad[1] == 0  # clipped, and without a KL
    assert sums.pop("kl").item() == pytest.approx(0.3068528, abs=1e-6)
    assert sums.pop("entropy").item() == pytest.approx(0.7)
    assert sums == {"tokens": 1, "clipped_low": 0, "clipped_high": 0}


@pytest.mark.parametrize("kind", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_ratio_beyond_all_numbers_makes_no_nan(kind, beta):
    """In a later pass a shown token may have risen from a log-probability of -200."""
    logp_RT = torch.tensor([[-1.0, -0.5]], requires_grad=True)
    loss, _ = step_loss(
        kind,
        logp_RT,
        torch.tensor([[-200.0, -300.0]]),
        torch.tensor([1.5]),
        torch.tensor([[True, True]]),
        table([0.5]),
        clip_low=0.2,
        clip_high=0.2,
        beta=beta,
        ref_RT=torch.tensor([[-200.0, -1.0]]),
        sampled_R=torch.tensor([False]),
    )
    loss.backward()
    assert loss.isfinite() and logp_RT.grad.isfinite().all()


def random_step(lengths, seed):
    """Return [logp, old, ref, entropy], advantages and mask of a step of ragged rows (entropy: any
    numbers).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths, default=0))
    values = [-2 * torch.rand(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    advantages_R = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    return values, advantages_R, torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


def gradient_and_sums(kind, values, advantages_R, mask_RT, weights_R):
    logp_RT, old_RT, ref_RT, entropy_RT = values
    logp_RT = logp_RT.clone().requires_grad_()
    given = logp_RT, old_RT, advantages_R, mask_RT, weights_R
    more = dict(beta=0.1, ref_RT=ref_RT, entropy_RT=entropy_RT)
    loss, sums = step_loss(kind, *given, **CLIP, **more)
    loss.backward()
    return logp_RT.grad, {"loss": loss.detach(), **sums}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_padding_has_no_effect_and_gets_no_gradient(kind, garbage):
    values, advantages_R, mask_RT = random_step([3, 2, 1], seed=1)
    weights_R = token_weights(kind, mask_RT.sum(-1), max_length=4)
    gradient_RT, sums = gradient_and_sums(kind, values, advantages_R, mask_RT, weights_R)
    dirty = [x.masked_fill(~mask_RT, garbage) for x in values]
    dirty_gradient_RT, dirty_sums = gradient_and_sums(kind, dirty, advantages_R, mask_RT, weights_R)

    assert torch.equal(dirty_gradient_RT, gradient_RT) and not gradient_RT[~mask_RT].any()
    assert dirty_sums == sums

"""Chunked log-probabilities against the plain log_softmax of all logits, in float64.

Shapes: N tokens, V vocabulary, H hidden.
"""

import pytest
import torch
from torch import nn

from grpo.learn import batch
from grpo.learn.batch import token_logprobs
from grpo.rollout.sampling import truncation

N, H, V = 11, 4, 7
TEMPERATURE = 0.7

# Of the head: any module, or a linear layer with or without a bias; and KEPT.
HEADS = [(None, 0), (True, 0), (False, 0), (False, 1000)]


class LoraHead(nn.Module):
    """A linear head with a bias and a low-rank adapter: every way in which parameters enter a real
    lm_head.
    """

    def __init__(self, generator):
        super().__init__()
        self.weight_VH, self.down_2H, self.up_V2, self.bias_V = (
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
            for shape in ((V, H), (2, H), (V, 2), (V,))
        )
        self.rows = []

    def forward(self, hidden_NH):
        self.rows.append(len(hidden_NH))
        return hidden_NH @ (self.weight_VH + self.up_V2 @ self.down_2H).T + self.bias_V


def inputs():
    """Return hidden states, head, targets and weights of a scalar objective, always the same."""
    generator = torch.Generator().manual_seed(5)
    hidden_NH = torch.randn(N, H, dtype=torch.float64, generator=generator).requires_grad_()
    targets_N = torch.randint(V, (N,), generator=generator)
    weights_N = torch.randn(N, dtype=torch.float64, generator=generator)
    return hidden_NH, LoraHead(generator), targets_N, weights_N


def top_two_and_target(logits_NV, targets_N):
    keep_NV = torch.zeros_like(logits_NV, dtype=torch.bool).scatter(
        -1, logits_NV.topk(2).indices, True
    )
    return logits_NV.masked_fill(~keep_NV.scatter(-1, targets_N[:, None], True), -torch.inf)


@pytest.mark.parametrize("truncate", [None, top_two_and_target])
@pytest.mark.parametrize("chunk", [1, 4, N])
@pytest.mark.parametrize("bias, kept", HEADS)
def test_values_and_gradients_equal_the_full_log_softmax(monkeypatch, truncate, chunk, bias, kept):
    monkeypatch.setattr(batch, "KEPT", kept)
    hidden_NH, head, targets_N, weights_N = inputs()
    if bias is not None:  # a plain linear layer goes by few passes of its own
        torch.manual_seed(0)
        head = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    leaves = [hidden_NH, *head.parameters()]

    logits_NV = head(hidden_NH) / TEMPERATURE
    if truncate:
        logits_NV = truncate(logits_NV, targets_N)
    distribution = torch.distributions.Categorical(logits=logits_NV)
    expected_N = distribution.log_prob(targets_N)
    expected_gradients = torch.autograd.grad(weights_N @ expected_N, leaves)

    logprobs_N, entropy_N = token_logprobs(
        hidden_NH, head, targets_N, TEMPERATURE, truncate, chunk=chunk
    )
    gradients = torch.autograd.grad(weights_N @ logprobs_N, leaves)

    exactly = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(logprobs_N, expected_N, **exactly)
    torch.testing.assert_close(
        entropy_N, -(distribution.probs.xlogy(distribution.probs)).sum(-1), **exactly
    )
    torch.testing.assert_close(gradients, expected_gradients, **exactly)


@pytest.mark.parametrize("truncate", [None, top_two_and_target])
def test_the_gradient_of_entropies_is_that_of_the_plain_formula(truncate):
    hidden_NH, head, targets_N, weights_N = inputs()
    leaves = [hidden_NH, *head.parameters()]

    logits_NV = head(hidden_NH) / TEMPERATURE
    kept_NV = torch.ones_like(logits_NV, dtype=torch.bool)
    if truncate:
        kept_NV = truncate(logits_NV, targets_N).isfinite()
    # A sum over the tokens that are kept, so that nothing infinite enters.
    lse_N1 = logits_NV.exp().where(kept_NV, 0.0).sum(-1, keepdim=True).log()
    all_NV = (logits_NV - lse_N1).where(kept_NV, 0.0)
    entropies_N = -(all_NV.exp().where(kept_NV, 0.0) * all_NV).sum(-1)
    logprobs_N = all_NV.gather(-1, targets_N[:, None])[:, 0]
    expected = torch.autograd.grad(weights_N @ (2 * entropies_N + logprobs_N), leaves)

    ours_N, entropy_N = token_logprobs(
        hidden_NH, head, targets_N, TEMPERATURE, truncate, has_entropy_gradient=True, chunk=3
    )
    gradients = torch.autograd.grad(weights_N @ (2 * entropy_N + ours_N), leaves)
    torch.testing.assert_close(entropy_N, entropies_N, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)


def test_a_token_that_truncation_would_exclude_joins_after_the_cut():
    """As in a second epoch, by hand: the nucleus of 0.65 is masses of 0.4 and 0.3."""
    mass = [0.4, 0.3, 0.2, 0.06, 0.04]
    logits_NV = torch.tensor([mass, mass], dtype=torch.float64).log()
    logprobs_N, _ = token_logprobs(
        logits_NV, nn.Identity(), torch.tensor([0, 4]), 1.0, truncation(0.65)
    )
    assert logprobs_N.exp().tolist() == pytest.approx([0.4 / 0.7, 0.04 / 0.74])


def test_full_logits_never_live_at_once():
    hidden_NH, head, targets_N, weights_N = inputs()
    saved = []
    hooks = (lambda x: saved.append(x.numel()) or x, lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        logprobs_N, entropy_N = token_logprobs(hidden_NH, head, targets_N, TEMPERATURE, chunk=3)
    assert not entropy_N.requires_grad
    assert sum(saved) < N * V  # not the logits of all chunks together either
    assert head.rows == [3, 3, 3, 2]
    (weights_N @ logprobs_N).backward()
    assert sorted(head.rows) == 2 * [2] + 6 * [3]  # once more each, in the backward pass


def test_half_precision_heads_give_float32():
    # bfloat16 logits (8, 0): p = 1 / (1 + e^-8). In bfloat16 log p would be 0, for e^-8 = 3.4e-4
    # is lost beside 1.
    hidden_NH = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16)
    logprobs_N, entropy_N = token_logprobs(hidden_NH, nn.Identity(), torch.tensor([0]), 1.0)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    # -log(1 + e^-8) = -e^-8 + e^-16 / 2
    assert logprobs_N.item() == pytest.approx(-3.3540637e-4, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_linear_head_on_a_gpu(dtype, tolerance):
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(50, 64, dtype=torch.float64, requires_grad=True),
        nn.Linear(64, 9000, bias=False, dtype=torch.float64),
    )
    targets = torch.randint(9000, (50,))
    weights = torch.randn(50, dtype=torch.float64)

    from grpo.fast import update_kernels

    def results(hidden, head, device):
        kernels = update_kernels if device == "cuda" else None
        logprobs, entropies = token_logprobs(
            hidden, head, targets.to(device), TEMPERATURE, kernels=kernels, chunk=16
        )
        (weights.to(device, logprobs.dtype) @ logprobs).backward()
        outputs = (logprobs.detach(), entropies.detach(), hidden.grad, head.weight.grad)
        return [x.cpu().double() for x in outputs]

    expected = results(hidden, head, "cpu")
    ours = nn.Linear(64, 9000, bias=False, dtype=dtype, device="cuda")
    ours.weight.data.copy_(head.weight.data)
    for found, wanted in zip(
        results(hidden.detach().to("cuda", dtype).requires_grad_(), ours, "cuda"),
        expected,
        strict=True,
    ):
        assert (found - wanted).norm() < tolerance * wanted.norm()

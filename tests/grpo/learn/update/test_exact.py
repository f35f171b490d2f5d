"""Log-probabilities and gradients of an update against those of a plain forward pass."""

import random
from dataclasses import replace

import pytest
import torch
from losses import step_loss
from transformers import AutoModelForCausalLM
from updates import HEAT, WHOLE, loss_and_gradients, one_batch

from grpo.fast.packing import Packing
from grpo.learn.batch import completion_logprobs, micro_batches
from grpo.learn.loss import LOSSES, OwnLoss, token_weights
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key, truncation


@pytest.fixture()
def plain(tiny_model, float64):
    # sdpa, because transformers' eager attention takes its softmax in float32 whatever the model's
    # precision
    return AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float64, attn_implementation="sdpa"
    )


def plain_logits(model, group, completion):
    """Each completion by itself, whole sequence, full logits (T, V)."""
    tokens = torch.tensor([[*group.prompt, *completion.tokens]])
    return model(input_ids=tokens).logits[0, len(group.prompt) - 1 : -1] / group.temperature


def plain_logprobs(model, group, completion):
    logits = plain_logits(model, group, completion)
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def plain_gradients(model, groups, kind):
    lengths = torch.tensor([len(c.tokens) for group in groups for c in group.completions])
    weights = iter(token_weights(kind, lengths, max_length=24))
    for group in groups:
        for completion, advantage in zip(group.completions, group.advantages):
            logp = plain_logprobs(model, group, completion)[None]
            old = torch.tensor([completion.logprobs], dtype=logp.dtype)
            mask = torch.ones(logp.shape, dtype=torch.bool)
            given = logp, old, torch.tensor([advantage]), mask, next(weights)[None]
            step_loss(kind, *given, clip_low=0.2, clip_high=0.2)[0].backward()
    return [p.grad for p in model.parameters()]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def test_logprobs_are_those_of_a_plain_forward(tiny_policy, groups, plain):
    rows = [(group, completion) for group in groups for completion in group.completions]
    found_RT, _ = completion_logprobs(tiny_policy, one_batch(groups))
    for logp, (group, completion) in zip(found_RT, rows, strict=True):
        expected = plain_logprobs(plain, group, completion)
        torch.testing.assert_close(logp[: len(expected)], expected, atol=1e-10, rtol=0)
        assert not logp[len(expected) :].any()


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_a_plain_forward(tiny_policy, groups, plain, kind):
    """A plain loss over completion tokens alone: prompt and padding get nothing, the end token its
    share.
    """
    close(loss_and_gradients(tiny_policy, groups, kind)[1], plain_gradients(plain, groups, kind))


def with_bonus(inputs, settings):
    ratio_RT = (inputs.logp_RT - inputs.old_RT).exp()
    return -ratio_RT * inputs.advantages - 0.3 * inputs.entropy_RT


def test_an_entropy_bonus_has_the_gradient_of_a_plain_forward(tiny_policy, groups, plain):
    total = sum(len(c.tokens) for group in groups for c in group.completions)
    for group in groups:
        for completion, advantage in zip(group.completions, group.advantages):
            all_TV = plain_logits(plain, group, completion).log_softmax(-1)
            logp_T = all_TV.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            ratio_T = (logp_T - torch.tensor(completion.logprobs)).exp()
            entropy_T = -(all_TV.exp() * all_TV).sum(-1)
            loss_T = -ratio_T * torch.tensor([advantage]) - 0.3 * entropy_T
            (loss_T.sum() / total).backward()

    own = dict(micro_tokens=60, own_loss=OwnLoss(with_bonus))
    close(loss_and_gradients(tiny_policy, groups, **own)[1], [p.grad for p in plain.parameters()])


def each_token(groups):
    """Give every token an advantage of its own."""
    rng = random.Random(1)
    for group in groups:
        group.advantages = [
            [rng.uniform(-1, 1) for _ in completion.tokens] for completion in group.completions
        ]


def begin_alike(groups):
    """Give each completion the first half of the first one of its group, and one a whole copy."""
    for group in groups:
        first, *others = group.completions
        half = len(first.tokens) // 2 + 1
        group.completions = [first] + [
            replace(
                other,
                tokens=first.tokens[:half] + other.tokens,
                logprobs=first.logprobs[:half] + other.logprobs,
            )
            for other in others
        ]
        group.completions[-1] = first


def test_gradients_of_advantages_of_tokens(tiny_policy, groups, plain):
    each_token(groups)
    expected = plain_gradients(plain, groups, "grpo")
    for micro_tokens in (WHOLE, 60):
        close(loss_and_gradients(tiny_policy, groups, "grpo", micro_tokens)[1], expected)


@pytest.mark.parametrize("kind, has_own", [("gspo", False), ("dapo", True)])
def test_shared_beginnings_change_neither_loss_nor_gradient(
    tiny_policy, groups, float64, monkeypatch, kind, has_own
):
    begin_alike(groups)
    if has_own:
        each_token(groups)
    loss, gradients = loss_and_gradients(tiny_policy, groups, kind)
    tokens = []

    def without(prompts, completions):
        packing = Packing(prompts, completions, torch.device("cpu"))
        shared = Packing(prompts, completions, torch.device("cpu"), shares_beginnings=True)
        tokens.append((len(shared.tokens_N), len(packing.tokens_N)))
        return packing

    monkeypatch.setattr(tiny_policy.forward, "pack", without)
    expected_loss, expected = loss_and_gradients(tiny_policy, groups, kind)
    ((few, all_of_them),) = tokens
    assert few < 0.8 * all_of_them
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    close(gradients, expected)


@pytest.mark.parametrize("micro_tokens", [1, 60, 120])  # rows alone, parts of a group, groups
def test_micro_batches_change_neither_loss_nor_gradient(tiny_policy, groups, float64, micro_tokens):
    cut = dict(max_length=24, micro_tokens=micro_tokens, device="cpu")
    assert len(list(micro_batches(groups, "dapo", **cut))) > 1
    loss, whole = loss_and_gradients(tiny_policy, groups)
    loss_of_parts, parts = loss_and_gradients(tiny_policy, groups, micro_tokens=micro_tokens)
    assert loss_of_parts == pytest.approx(loss, rel=1e-12)
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()


@pytest.mark.parametrize("truncate", [None, truncation(0.95)])
def test_logprobs_are_the_samplers(tiny_policy, groups, truncate):
    keys = [[sample_key(6, group.index, sample) for sample in range(4)] for group in groups]
    for group, own in zip(groups, keys):
        request = RolloutRequest([group.prompt], [own], HEAT, [24], truncate)
        (group.completions,) = generate(tiny_policy, request)
    batch = one_batch(groups)
    with torch.no_grad():
        logp_RT, entropy_RT = completion_logprobs(tiny_policy, batch, truncate)
        whole_RT, _ = completion_logprobs(tiny_policy, batch)
    assert (logp_RT - batch.old_RT).abs().max() < 1e-4
    assert not logp_RT[~batch.mask_RT].any() and (entropy_RT >= 0).all()
    assert ((logp_RT - whole_RT).max() > 0.05) == bool(truncate)  # it makes a difference

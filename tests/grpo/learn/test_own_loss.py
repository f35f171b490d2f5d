"""Losses of the user's own: what they are given, what they may return, and what is refused."""

import dataclasses

import pytest
import torch
from enumeration import check_loss
from losses import inputs_and_settings
from refusals import refused

from grpo.data.errors import UserError
from grpo.learn.loss import OwnLoss, load_loss, policy_loss, step_loss

MASK_RT = torch.tensor([[True, True, True], [True, False, False]])


def reinforce(inputs, settings):
    return -(inputs.logp_RT - inputs.old_RT).exp() * inputs.advantages


def same_as_grpo(inputs, settings):
    return policy_loss(inputs, dataclasses.replace(settings, kind="grpo"))[0]


same_as_grpo.token_weights = "grpo"


def inputs(entropy=None, **changes):
    """The inputs of two rows, with NaN at padding."""
    generator = torch.Generator().manual_seed(0)
    logp_RT, old_RT = (
        (-2 * torch.rand(2, 3, generator=generator)).masked_fill(~MASK_RT, torch.nan)
        for _ in range(2)
    )
    given, settings = inputs_and_settings(
        "grpo",
        logp_RT.requires_grad_(),
        old_RT,
        torch.tensor([1.0, -2.0]),
        MASK_RT,
        torch.tensor([0.25, 0.5], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
        entropy_RT=torch.ones(2, 3) if entropy is None else entropy,
        **changes,
    )
    return given, settings


def of(function, **changes):
    """Return loss, sums and the inputs, with gradients, of a user's function."""
    given, settings = inputs(**changes)
    own = OwnLoss(function)
    loss, sums = step_loss(given, dataclasses.replace(settings, kind=own.spec, own_loss=own))
    loss.backward()
    return loss.detach(), sums, given


def test_an_own_loss_that_repeats_grpo_equals_it_to_the_bit():
    ref_RT = torch.full((2, 3), -1.0)
    for changes in ({}, {"ref_RT": ref_RT, "beta": 0.3}):
        expected_inputs, settings = inputs(**changes)
        expected, _ = step_loss(expected_inputs, settings)
        expected.backward()
        loss, sums, given = of(same_as_grpo, **changes)
        assert loss == expected and sums["tokens"] == 4 and sums["clipped_high"] == 0
        assert torch.equal(given.logp_RT.grad, expected_inputs.logp_RT.grad)
        assert not given.logp_RT.grad[~MASK_RT].any()


def test_a_function_gets_advantages_of_tokens_and_no_padding():
    def loss(inputs, settings):
        assert inputs.advantages.tolist() == [[1, 1, 1], [-2, 0, 0]]
        for x_RT in (inputs.logp_RT, inputs.old_RT, inputs.entropy_RT):
            assert not x_RT[~MASK_RT].any()
        assert inputs.ref_RT is None and (settings.clip_low, settings.clip_high) == (0.2, 0.3)
        return reinforce(inputs, settings)

    of(loss)


def test_infinities_at_padding_reach_no_gradient():
    def loss(inputs, settings):
        return -inputs.advantages * (inputs.logp_RT + (inputs.logp_RT.abs().log()))

    _, _, given = of(loss)
    assert given.logp_RT.grad.isfinite().all() and not given.logp_RT.grad[~MASK_RT].any()


def with_bonus(inputs, settings):
    return reinforce(inputs, settings) - 0.1 * inputs.entropy_RT


def scaled(inputs, settings):  # by the largest advantage of a micro-batch, not of the step
    return reinforce(inputs, settings) / (1 + inputs.advantages.abs().max())


def test_the_check_finds_what_is_no_policy_gradient_and_what_depends_on_the_cut():
    check_loss(reinforce)
    check_loss(with_bonus, is_policy_gradient=False)
    with pytest.raises(AssertionError, match="on policy its mean gradient differs"):
        check_loss(with_bonus)
    with pytest.raises(AssertionError, match="micro-batches"):
        check_loss(scaled, is_policy_gradient=False)


def raises(inputs, settings):
    raise KeyError("oh\nno")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "raised KeyError: 'oh"),
        (lambda inputs, settings: reinforce(inputs, settings).sum(), "returned torch.Size([])"),
        (lambda inputs, settings: reinforce(inputs, settings)[:, :2], "a tensor of shape (2, 3)"),
        (lambda inputs, settings: 1.0, "returned float; it must return a tensor"),
        (lambda inputs, settings: inputs.old_RT, "with a gradient"),
        (lambda inputs: inputs.logp_RT, "raised TypeError"),
    ],
)
def test_what_is_wrong_is_one_line(function, message):
    line = refused(of, function)
    assert line.startswith("--loss python:") and message in line, line


def test_loading(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def loss(inputs, settings):\n    return inputs.logp_RT\nnumber = 3\n")
    assert load_loss("dapo") is None
    own = load_loss(f"{path}:loss")
    assert own.weights == "dapo" and OwnLoss(same_as_grpo).weights == "grpo"
    for spec, message in (
        (f"{path}:other", "defines no function other"),
        (f"{path}:number", "defines no function number"),
        (f"{tmp_path}/none.py:loss", "no file"),
        ("python:loss", "give the function again, as grpo.train(loss=FUNCTION)"),
    ):
        with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
            load_loss(spec)
    path.write_text("def loss(a, b): pass\nloss.token_weights = 'tokens'\n")
    with pytest.raises(UserError, match="its token_weights is 'tokens'; give one of grpo"):
        load_loss(f"{path}:loss")

"""Masters, sums of gradients, the saved state and the loss scale: against plain AdamW."""

import copy
import gc
import json
import math
import weakref

import pytest
import torch
from safetensors.torch import save_file

from grpo.learn.optimizer import BACKOFF, LARGEST, STEPS_TO_DOUBLE, Optimizer, lr_factor
from grpo.run.checkpoint import load_optimizer

RATE = 1e-4


def made(dtype, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 5)).to(dtype)
    return layers, Optimizer(layers.parameters(), RATE)


def inputs_of(seed, dtype=torch.float32):
    return torch.randn(24, 70, generator=torch.Generator().manual_seed(seed)).to(dtype)


def take(layers, optimizer, seed, parts=1, max_norm=0.0):
    """A step from the gradients of `parts` backward passes; return their norm."""
    optimizer.clear()
    for part in inputs_of(seed, layers[0].weight.dtype).chunk(parts):
        layers(part).float().square().sum().backward()
    norm = optimizer.collect(max_norm)
    optimizer.step()
    return norm


def test_float32_weights_are_their_own_masters_and_step_as_by_adamw():
    layers, optimizer = made(torch.float32)
    theirs = copy.deepcopy(layers)
    plain = torch.optim.AdamW(theirs.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    assert [id(master) for master in optimizer.masters] == list(map(id, layers.parameters()))

    for seed in range(3):
        norm = take(layers, optimizer, seed, max_norm=0.5)
        plain.zero_grad()
        theirs(inputs_of(seed)).square().sum().backward()
        expected = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
        assert norm == pytest.approx(expected) and norm > 1
        plain.step()
    for mine, other in zip(layers.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=0)


def test_steps_too_small_for_bfloat16_add_up_on_the_masters():
    layers, optimizer = made(torch.bfloat16)
    before = [weight.detach().clone() for weight in layers.parameters()]
    take(layers, optimizer, 0)
    changes = [weight - old for weight, old in zip(layers.parameters(), before)]
    assert torch.cat([each.flatten() for each in changes]).eq(0).float().mean() > 0.5

    for seed in range(1, 40):
        take(layers, optimizer, seed % 3)
    moved = (layers[0].weight.float() - before[0].float()).abs()
    assert moved.max() > 20 * RATE and moved.gt(0).float().mean() > 0.9
    for weight, master in zip(layers.parameters(), optimizer.masters):
        assert master.dtype == torch.float32 and torch.equal(weight, master.bfloat16())


def test_gradients_of_bfloat16_weights_are_added_up_in_float32():
    layers, optimizer = made(torch.bfloat16)
    optimizer.clear()
    weight, share = layers[1].bias, 1 / 512  # which a sum of 1 in bfloat16 no longer notices
    for gradient in [1.0] + [share] * 512:
        (weight * gradient).sum().backward()
        assert weight.grad is None  # given back at once
    assert optimizer.collect(0.0) == pytest.approx(2 * math.sqrt(5))
    assert torch.equal(optimizer.masters[3].grad, torch.full((5,), 2.0))
    assert optimizer.masters[0].grad is None

    optimizer.clear()
    (weight * 3).sum().backward()
    optimizer.collect(1.0)
    clipped = torch.full((5,), 1 / math.sqrt(5))
    torch.testing.assert_close(optimizer.masters[3].grad, clipped, atol=1e-5, rtol=0)


def test_an_optimizer_is_freed_while_its_weights_remain():
    layers, optimizer = made(torch.bfloat16)
    master = weakref.ref(optimizer.masters[0])
    del optimizer
    gc.collect()
    assert layers[0].weight.dtype == torch.bfloat16 and master() is None


def save(folder, optimizer):
    """Write the state as a checkpoint does."""
    state = optimizer.state_dict()
    save_file(state["moments"], folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps({"loss_scale": state["loss_scale"]}))


@pytest.mark.parametrize("steps", [0, 3])  # before the first step there are no moments
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_goes_on_bit_for_bit(tmp_path, dtype, steps):
    one, two = made(dtype), made(dtype, seed=1)
    for seed in range(steps):
        take(*one, seed)
    save(tmp_path, one[1])

    two[0].load_state_dict(one[0].state_dict())
    load_optimizer(tmp_path, two[1])
    for seed in range(3, 5):
        assert take(*one, seed) == take(*two, seed)
    assert all(map(torch.equal, one[1].masters, two[1].masters))


# The loss scale.


def float16_optimizer():
    """Return a float16 weight and its optimizer, which takes steps of the gradient's size."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Optimizer([weight], 1.0, dtype=weight.dtype)
    optimizer.inner = torch.optim.SGD(optimizer.masters, lr=1.0)
    return weight, optimizer


def gradient_of(weight, optimizer, slope):
    """Return the master's gradient and the norm, where the loss has this slope in float16."""
    while True:
        optimizer.clear()
        optimizer.backward((weight * slope).sum())
        norm = optimizer.collect(0.0)
        if not optimizer.must_repeat(norm):
            return optimizer.masters[0].grad, norm


def test_a_gradient_below_the_numbers_of_float16_arrives():
    weight, optimizer = float16_optimizer()
    half = torch.tensor(0.5, dtype=torch.float16)
    for scale, expected in ((LARGEST, 2.0**-32), (1.0, 0.0)):
        optimizer.loss_scale = scale
        optimizer.clear()
        optimizer.backward(((weight * half).sum() * half).float() * 2.0**-30)
        assert optimizer.collect(0.0) == pytest.approx(math.sqrt(3) * expected)
        assert optimizer.masters[0].grad.tolist() == [expected] * 3


def test_an_overflow_repeats_the_passes_with_a_smaller_factor():
    weight, optimizer = float16_optimizer()
    gradient, norm = gradient_of(weight, optimizer, 16.0)  # 65,536 times 16 is no float16
    assert gradient.tolist() == [16.0] * 3 and norm == pytest.approx(16 * math.sqrt(3))
    assert optimizer.loss_scale == LARGEST / BACKOFF**3
    optimizer.step()
    assert weight.tolist() == [-15.0] * 3


def test_a_reduced_factor_grows_back():
    _, optimizer = float16_optimizer()
    assert optimizer.must_repeat(math.inf) and optimizer.loss_scale == LARGEST / BACKOFF
    assert not optimizer.must_repeat(1.0)
    factors = []
    for _ in range(4 * STEPS_TO_DOUBLE):
        optimizer.step()
        factors.append(optimizer.loss_scale)
    assert factors[STEPS_TO_DOUBLE - 2 : STEPS_TO_DOUBLE] == [LARGEST / BACKOFF, LARGEST / 2]
    assert factors[-1] == LARGEST


def test_the_factor_is_saved_and_restored(tmp_path):
    weight, optimizer = float16_optimizer()
    gradient_of(weight, optimizer, 16.0)
    optimizer.step()
    save(tmp_path, optimizer)
    _, other = float16_optimizer()
    load_optimizer(tmp_path, other)
    assert other.loss_scale == optimizer.loss_scale < LARGEST and other.steps_at_scale == 1


def test_the_learning_rate_warms_up_and_falls_by_hand():
    constant = [lr_factor(step, 0, 0) for step in (1, 3, 6, 9)]
    assert constant == pytest.approx([1 / 6, 1 / 2, 1, 1])
    falling = [lr_factor(step, 6, 4) for step in (6, 7, 9, 11, 20)]
    assert falling == pytest.approx([1, 1, 0.5, 0, 0])

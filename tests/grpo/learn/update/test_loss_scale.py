"""The factor on the loss of float16 models."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_models import loading
from updates import SETTINGS, sgd, update

from data.errors import UserError
from grpo.learn import loss_scale
from grpo.learn.imitate import imitate
from grpo.learn.loss_scale import BACKOFF, LARGEST, STEPS_TO_DOUBLE, LossScale
from grpo.learn.optimizer import Optimizer
from grpo.model.load import load_policy
from grpo.run.checkpoint import load_optimizer, save_optimizer
from grpo.run.schemas import OptimizerFile, read_checked


def float16_optimizer():
    """Return a float16 weight and its optimizer, which takes steps of the gradient's size."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    return weight, Optimizer([weight], lambda w: torch.optim.SGD(w, lr=1.0), dtype=weight.dtype)


def gradient_of(weight, optimizer, slope):
    """Return the master's gradient and the norm, where the loss has this slope in float16."""
    _, norm = optimizer.gradients(lambda: optimizer.backward((weight * slope).sum()), 0.0)
    return optimizer.masters[0].grad, norm


def test_only_float16_is_scaled():
    assert LossScale.of(torch.float16).factor == LARGEST
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scale = LossScale.of(dtype)
        assert scale.factor == 1 and not scale.reduce() and scale.metrics() == {}


def test_a_gradient_below_the_numbers_of_float16_arrives():
    weight, optimizer = float16_optimizer()
    halves = torch.tensor(0.5, dtype=torch.float16)

    def passes():
        loss = (weight * halves).sum() * halves
        optimizer.backward(loss.float() * 2.0**-30)

    _, norm = optimizer.gradients(passes, 0.0)
    assert optimizer.masters[0].grad.tolist() == [2.0**-32] * 3
    assert norm == pytest.approx(math.sqrt(3) * 2.0**-32)

    optimizer.loss_scale = LossScale.of(torch.float32)
    optimizer.gradients(passes, 0.0)
    assert optimizer.masters[0].grad.tolist() == [0.0] * 3


def test_an_overflow_repeats_the_passes_with_a_smaller_factor():
    weight, optimizer = float16_optimizer()
    gradient, norm = gradient_of(weight, optimizer, 16.0)  # 65,536 times 16 is no float16
    assert gradient.tolist() == [16.0] * 3 and norm == pytest.approx(16 * math.sqrt(3))
    assert optimizer.loss_scale.factor == LARGEST / BACKOFF**3
    optimizer.step()
    assert weight.tolist() == [-15.0] * 3


def test_a_gradient_that_no_factor_helps_is_reported():
    weight, optimizer = float16_optimizer()
    _, norm = gradient_of(weight, optimizer, math.inf)
    assert not math.isfinite(norm) and optimizer.loss_scale.factor == 1


def test_a_reduced_factor_grows_back():
    scale = LossScale.of(torch.float16)
    assert scale.reduce() and scale.factor == LARGEST / BACKOFF
    for _ in range(STEPS_TO_DOUBLE - 1):
        scale.count_step()
    assert scale.factor == LARGEST / BACKOFF
    scale.count_step()
    assert scale.factor == 2 * LARGEST / BACKOFF
    for _ in range(3 * STEPS_TO_DOUBLE):
        scale.count_step()
    assert scale.factor == LARGEST


def test_the_factor_is_saved_and_restored(tmp_path):
    weight, optimizer = float16_optimizer()
    gradient_of(weight, optimizer, 16.0)
    optimizer.step()
    save_optimizer(tmp_path, optimizer.state_dict())
    _, other = float16_optimizer()
    load_optimizer(tmp_path, other)
    assert other.loss_scale == optimizer.loss_scale
    assert other.loss_scale.steps == 1 and other.loss_scale.largest == LARGEST


@pytest.mark.parametrize("lora", [0, 4])
def test_updates_and_imitation_survive_an_overflow(
    tiny_model, tiny_policy, groups, monkeypatch, lora
):
    """The factor at first is so large that the first passes overflow; the result is the same."""
    norms = {}
    for largest in (LARGEST, 2.0**40):
        monkeypatch.setattr(loss_scale, "LARGEST", largest)
        policy = load_policy(
            str(tiny_model), device="cpu", options=loading(dtype="float16", lora_rank=lora)
        )
        optimizer = sgd(policy, 0.0)
        metrics = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
        assert metrics["loss_scale"] == optimizer.loss_scale.factor
        answers = [replace(group, advantages=[1.0] * len(group.completions)) for group in groups]
        imitated = imitate(policy, optimizer, answers, micro_tokens=60, max_grad_norm=1.0)
        norms[largest] = metrics["grad_norm"], imitated["grad_norm"]
        assert optimizer.loss_scale.factor < 2.0**40
    assert norms[LARGEST] == pytest.approx(norms[2.0**40], rel=1e-2)
    assert all(norm > 0 for norm in norms[LARGEST])


@pytest.mark.parametrize("factor", [0, -1, 1 << 17, 10**30, "1", None])
def test_a_damaged_factor_is_refused(tmp_path, factor):
    damaged = {"rest": {}, "param_groups": [], "loss_scale": {"factor": factor, "steps": 0}}
    (tmp_path / "optimizer.json").write_text(json.dumps(damaged))
    with pytest.raises(UserError, match="optimizer.json: is not what a run writes"):
        read_checked(tmp_path / "optimizer.json", OptimizerFile)

"""The fast forward pass against the model's own, outputs and gradients; merged weights that stay
the modules' own.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, SHAPE, write_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from grpo.fast import llama as ops
from grpo.fast.accelerate import FastForward
from grpo.fast.llama import build_fast_llama
from grpo.learn.batch import token_logprobs
from grpo.model import policy as policies
from grpo.model.load import load_policy

FAST = ["llama-3 rotary scaling", "mistral", "qwen2", "qwen3"]
PROMPTS, COMPLETIONS = [(5, 6, 7), (8, 9)], [(1, 2, 3), (4, 5), (6,), (7, 8, 9)]
gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def policy_of(folder, family="llama-3 rotary scaling", lora=0, device="cpu", **changes):
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    write_model(config, folder)
    policy = load_policy(str(folder), device=device, dtype="float32", lora_rank=lora)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name or "bias" in name or "norm" in name:  # 0 or 1 in a new model
            parameter.data += 0.1 * torch.randn(parameter.shape).to(device)
    return policy


def predict(policy):
    return policy.forward.predict(policy.forward.pack(PROMPTS, COMPLETIONS))


def results(policy):
    """Return log-probabilities, entropies and all gradients."""
    policy.model.zero_grad()
    targets = torch.tensor(
        [token for completion in COMPLETIONS for token in completion], device=policy.device
    )
    logprobs, entropies = token_logprobs(
        predict(policy),
        policy.head,
        targets,
        0.7,
        kernels=policy.kernels,
    )
    (logprobs * torch.arange(len(targets), device=policy.device)).sum().backward()
    return [logprobs.detach(), entropies, *(p.grad.clone() for p in policy.parameters)]


def assert_near(found, expected, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a PyTorch without oneDNN")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 5), (64, 256, 96), (3, 1, 33, 10), (0, 4, 6)])
def test_float32_products_by_onednn(monkeypatch, shape, has_bias):
    """What AMD's CPUs take, on any CPU: (..., inputs, outputs)."""
    monkeypatch.setattr(policies, "_prefers_onednn", True)
    x, weight, bias = (
        torch.randn(shape[:-1]),
        torch.randn(shape[-1], shape[-2]),
        torch.randn(shape[-1]) if has_bias else None,
    )
    wide = functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    found = policies.linear_no_grad(x, weight, bias)
    assert found.dtype == torch.float32 and found.shape == wide.shape
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=1e-6 * (10 + shape[-2]))
    given = x.double(), weight.double()  # float64 is left alone
    assert torch.equal(policies.linear_no_grad(*given), functional.linear(*given))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("lora", [0, 20])
@pytest.mark.parametrize(
    "family, changes",
    [
        *((family, {}) for family in FAST),
        ("llama-3 rotary scaling", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_it_is_the_models_own(tmp_path, family, lora, changes, device):
    policy = policy_of(tmp_path, family, lora, device, **changes)
    found = results(policy)
    assert all(part.norm() > 0 for part in found)
    fast, policy.forward = policy.forward, FastForward(policy, None)
    assert_near(found, results(policy))
    if lora:
        with policy.reference():
            expected = predict(policy)
        policy.forward = fast
        with policy.reference():
            torch.testing.assert_close(predict(policy), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("lora", [0, 4])
def test_modules_and_merged_weights_are_one(tmp_path, lora):
    policy = policy_of(tmp_path / "a", "qwen2", lora)
    names = {name for name, _ in policy.model.named_parameters()}
    before = predict(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)  # as an optimizer does
    changed = predict(policy)
    fast, policy.forward = policy.forward, FastForward(policy, None)
    torch.testing.assert_close(predict(policy), changed, atol=1e-4, rtol=0)
    assert not torch.allclose(changed, before, atol=1e-2)
    assert {name for name, _ in policy.model.named_parameters()} == names
    policy.forward = fast
    policy.save(tmp_path / "b")
    again = load_policy(
        str(tmp_path / "a" if lora else tmp_path / "b"),
        device="cpu",
        weights=tmp_path / "b" if lora else None,
    )
    if not lora:
        torch.testing.assert_close(predict(again), changed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.clone()  # torn from the merged weight
    torch.testing.assert_close(predict(policy), changed)
    policy.model.double()  # into new buffers
    torch.testing.assert_close(predict(policy), changed.double(), atol=1e-4, rtol=0)


def test_checkpointed_activations_give_the_same_gradient(tmp_path, monkeypatch):
    policy, calls, swiglu = policy_of(tmp_path, lora=4), [], ops.swiglu
    monkeypatch.setattr(ops, "swiglu", lambda x: calls.append(1) or swiglu(x))
    layers, before = len(policy.forward.llama.blocks), results(policy)
    assert len(calls) == 2 * layers  # in the backward pass it is computed again in any case
    policy.enable_gradient_checkpointing()
    policy.enable_gradient_checkpointing()  # once is enough
    assert_near(results(policy), before, 1e-6)
    assert len(calls) == 5 * layers
    with torch.no_grad():
        predict(policy)
    assert len(calls) == 6 * layers


def test_models_that_are_not_of_the_family_are_left_alone():
    for family in ("gemma", "gpt2", "opt", "gpt-neox"):
        assert build_fast_llama(AutoModelForCausalLM.from_config(FAMILIES[family]())) is None
    assert build_fast_llama(AutoModelForCausalLM.from_config(FAMILIES["mistral"]())) is not None


@pytest.mark.parametrize(
    "config, is_fast",
    [
        (MistralConfig(**SHAPE, sliding_window=50), False),
        (Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=50), True),
        # The layers from `max_window_layers` on have a window: one layer of two, and none.
        (Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=1), False),
        (Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=2), True),
    ],
)
def test_layers_with_a_window_are_left_alone(config, is_fast):
    model = AutoModelForCausalLM.from_config(config)
    assert (build_fast_llama(model) is not None) == is_fast


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"lora_dropout": 0.1}, {"target_modules": ["q_proj", "embed_tokens"]}],
)
def test_adapters_that_are_not_plain_are_left_to_peft(settings):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_config(FAMILIES["mistral"]())
    assert (
        build_fast_llama(
            get_peft_model(
                model,
                LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings),
            ).get_base_model()
        )
        is None
    )


def both(operation, inputs, device, dtype):
    """Return outputs and gradients of an operation, given float64 inputs."""
    inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
    outputs = operation(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    weights = [torch.randn(y.shape, dtype=torch.float64).to(device, dtype) for y in outputs]
    return [
        *outputs,
        *torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, outputs)), inputs),
    ]


def plain_norm(x, y, weight):
    total = x + y
    return total, total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain_rotation(heads):
    cos, sin = angles(len(heads), heads)
    q, k, v = heads.view(len(heads), 5, 16).split([3, 1, 1], 1)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat(
            [a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1
        )

    return turn(q), turn(k), v


def angles(M, like):
    angle = torch.arange(M * 8, dtype=torch.float64).view(M, 8)
    return angle.cos().to(like), angle.sin().to(like)


OPERATIONS = {
    "add_norm": (
        lambda x, y, w: ops.add_norm(SimpleNamespace(weight=w, variance_epsilon=1e-5), x, y),
        plain_norm,
        [(9, 48), (9, 48), (48,)],
    ),
    "apply_rotary": (
        lambda x: ops._apply(ops._Rotary, x, *angles(len(x), x), 3, 1),
        plain_rotation,
        [(9, 80)],
    ),
    "swiglu": (
        lambda x: ops.linear(x, Doubling(), True),
        lambda x: 2 * functional.silu(x[:, :37]) * x[:, 37:],
        [(9, 74)],
    ),
}


class Doubling:
    """In place of a merged linear layer, so that the SwiGLU before it is tested alone."""

    parameters: list = []
    gradient_products = nullcontext

    def gathered(self):
        return self

    def forward(self, x):
        return 2 * x, None

    def gradients(self, dy, x, lora_hidden, needed):
        return 2 * dy, []


@pytest.mark.parametrize(
    "device, dtype, tolerance",
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 2.5e-3, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_and_their_gradients(name, device, dtype, tolerance):
    ours, plain, shapes = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = both(plain, inputs, "cpu", torch.float64)
    assert_near([x.cpu().double() for x in both(ours, inputs, device, dtype)], expected, tolerance)

"""An update: KL, LoRA, clipping, memory, precision, and what is not finite."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from updates import SETTINGS, loss_and_gradients, one_batch, sgd, update

import grpo.learn.optimizer as optimizer_module
import grpo.learn.update as update_module
from grpo.data.errors import UserError
from grpo.learn.batch import completion_logprobs, micro_batches
from grpo.learn.update import UpdateMemory, UpdateSettings, imitate
from grpo.model.load import load_policy
from grpo.rollout.sampling import truncation


def test_kl_is_zero_at_the_reference_and_pulls_back_to_it(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    step = dict(kind="grpo", **SETTINGS | dict(beta=0.5))
    first = update(policy, sgd(policy, 0.05), groups, **step)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert update(policy, sgd(policy, 0.0), groups, **step)["kl"] > 1e-6


def test_the_reference_is_whole_where_sampling_is_cut(tiny_model, groups):
    """A reference that is cut as well would be no distribution beside the policy's."""
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    cut = truncation(0.5)
    batch = one_batch(groups)
    with torch.no_grad():
        logp_RT, _ = completion_logprobs(policy, batch, cut)
        whole_RT, _ = completion_logprobs(policy, batch)
    log_ratio_RT = (whole_RT - logp_RT)[batch.mask_RT]
    expected = (log_ratio_RT.exp() - log_ratio_RT - 1).mean()
    assert expected > 0.01

    step = dict(kind="dapo", truncate=cut, **SETTINGS | dict(beta=0.5))
    metrics = update(policy, sgd(policy, 0.0), groups, **step)
    assert metrics["kl"] == pytest.approx(float(expected), rel=1e-4)


def test_lora_trains_the_adapter_alone_and_its_reference_is_the_base(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", lora_rank=4)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert all("lora_" in name for name, p in policy.model.named_parameters() if p.requires_grad)
    batch = one_batch(groups)
    base, _ = completion_logprobs(policy, batch)  # a fresh adapter changes nothing
    update(policy, sgd(policy, 1.0), groups, kind="dapo", **SETTINGS)
    update(policy, sgd(policy, 1.0), groups, kind="dapo", **SETTINGS)
    changed, _ = completion_logprobs(policy, batch)
    with policy.reference():
        reference, _ = completion_logprobs(policy, batch)
    assert not torch.equal(changed, base) and torch.equal(reference, base)
    assert all(
        torch.equal(p, frozen[name])
        for name, p in policy.model.named_parameters()
        if name in frozen
    )


def test_gradients_that_were_switched_off_are_computed(tiny_policy, groups):
    """A user's own task or reward may do so, for a model of its own."""
    before = [p.clone() for p in tiny_policy.parameters]
    with torch.no_grad():
        update(tiny_policy, sgd(tiny_policy, 1.0), groups, kind="dapo", **SETTINGS)
        imitate(tiny_policy, sgd(tiny_policy, 1.0), groups, UpdateMemory(tiny_policy))
    assert not all(torch.equal(a, b) for a, b in zip(before, tiny_policy.parameters))


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_what_is_not_finite_stops_before_the_weights_change(tiny_policy, groups, what):
    if what == "loss":
        groups[0].advantages[0] = float("nan")
    else:
        tiny_policy.parameters[3].register_hook(lambda gradient: gradient * float("inf"))
    before = [p.clone() for p in tiny_policy.parameters]
    with pytest.raises(FloatingPointError, match=f"the {what} is (nan|inf)$"):
        update(tiny_policy, sgd(tiny_policy, 1.0), groups, kind="dapo", **SETTINGS)
    assert all(map(torch.equal, before, tiny_policy.parameters))


def test_parity_is_the_kl_from_the_sampler_to_the_trainer(tiny_policy, groups):
    """The tokens are the sampler's, so k3 is exp(d) - d - 1 with d = trainer - sampler."""
    step = dict(kind="dapo", micro_tokens=60, **SETTINGS)
    equal = update(tiny_policy, sgd(tiny_policy, 0.0), groups, **step)["parity/kl"]
    assert 0 <= equal < 1e-9

    completion = groups[1].completions[0]
    groups[1].completions[0] = replace(
        completion, logprobs=(completion.logprobs[0] - 2.0, *completion.logprobs[1:])
    )
    tokens = sum(group.tokens for group in groups)
    metrics = update(tiny_policy, sgd(tiny_policy, 0.0), groups, **step)
    assert metrics["parity/kl"] == pytest.approx((math.exp(2) - 2 - 1) / tokens, rel=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(2.0, abs=1e-4)


def test_importance_weights_are_truncated(tiny_policy, groups):
    """The sampler gave all tokens of a completion half the probability: weight 2, or the limit."""
    first, *others = groups[0].completions
    halved = replace(first, logprobs=tuple(each - math.log(2) for each in first.logprobs))
    groups[0] = replace(groups[0], completions=[halved, *others])
    step = dict(policy=tiny_policy, groups=groups, micro_tokens=60)
    each = [loss_and_gradients(**step, importance_limit=limit)[1] for limit in (1.0, 1.5, 5.0)]
    for at1, at15, at5 in zip(*each):
        torch.testing.assert_close(at5 - at1, 2 * (at15 - at1), rtol=1e-2, atol=1e-5)  # 2 and 1.5


def test_the_host_asks_for_no_number_before_all_micro_batches_are_under_way(
    tiny_policy, groups, monkeypatch
):
    """On a GPU it would wait there, and the next micro-batch would be made while the GPU idles."""
    happened = []
    for name in ("item", "backward"):
        real = getattr(torch.Tensor, name)

        def noted(self, *args, name=name, real=real):
            happened.append(name)
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)

    cut = dict(micro_tokens=60, max_length=24, device=tiny_policy.device)
    made = list(micro_batches(groups, "dapo", **cut))
    monkeypatch.setattr(update_module, "micro_batches", lambda *_, **__: iter(made))
    update(tiny_policy, sgd(tiny_policy, 0.0), groups, kind="dapo", micro_tokens=60, **SETTINGS)
    assert len(made) > 3 and happened[: len(made)] == ["backward"] * len(made)
    assert "item" in happened[len(made) :]


def test_updates_and_imitation_survive_an_overflow(tiny_model, groups, monkeypatch):
    """The factor at first is so large that the first passes overflow; the result is the same."""
    norms = []
    for largest in (2.0**16, 2.0**28):
        monkeypatch.setattr(optimizer_module, "LARGEST", largest)
        policy = load_policy(str(tiny_model), device="cpu", dtype="float16")
        optimizer = sgd(policy, 0.0)
        metrics = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
        assert metrics["loss_scale"] == optimizer.loss_scale
        answers = [
            replace(
                group,
                completions=[replace(each, is_demonstration=True) for each in group.completions],
                advantages=[1.0] * len(group.completions),
            )
            for group in groups
        ]
        memory = UpdateMemory(policy)
        memory.micro_tokens = 60
        imitated = imitate(policy, optimizer, answers, memory)
        norms.append((metrics["grad_norm"], imitated["grad_norm"]))
        assert optimizer.loss_scale < 2.0**28
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and all(norm > 0 for norm in norms[0])


def test_out_of_memory_is_answered_step_by_step(tiny_policy, groups, monkeypatch):
    """By halves to single completions, then by checkpointing without the decoder's memory."""
    monkeypatch.setattr("grpo.model.policy.CPU_TOKENS_AT_ONCE", 1000)
    memory, most, tried, freed = UpdateMemory(tiny_policy), 100, [], []
    monkeypatch.setattr(tiny_policy, "free_decoder", lambda: freed.append(1))
    plain = update_module._backward

    def hungry(policy, optimizer, batch, *others):
        tried.append(memory.micro_tokens)
        size = sum(map(len, batch.prompts)) + sum(map(len, batch.completions))
        if not policy.gradient_checkpointing or size > most:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return plain(policy, optimizer, batch, *others)

    monkeypatch.setattr(update_module, "_backward", hungry)

    def step():
        settings = UpdateSettings("dapo", **SETTINGS)
        return update_module.update(tiny_policy, sgd(tiny_policy, 0.0), groups, settings, memory)

    assert math.isfinite(step()["loss"])
    assert tried[:2] == [1000, 500] and min(tried) < 100
    assert tried.count(1000) == 2 and len(freed) > 1  # larger again with checkpointing
    notes = tiny_policy.take_events()
    same = "tokens from now on (the gradient stays the same)"
    assert notes[0] == f"out of memory: micro-batches of 500 {same}"
    assert any("gradient checkpointing, the sampler's memory freed" in note for note in notes)

    done, before = len(tried), len(freed)
    step()
    assert set(tried[done:]) == {tried[done - 1]} and len(freed) == before + 1
    assert tiny_policy.take_events() == []

    most = 0
    with pytest.raises(UserError, match="the update of a single completion of .* tokens"):
        step()


# Low precision.


@pytest.mark.parametrize("half, bound, lora", [("bfloat16", 0.99, 4), ("float16", 0.9999, 0)])
def test_half_precision_has_the_gradient_of_float32_to_its_rounding(
    tiny_model, tiny_policy, groups, half, bound, lora
):
    norms, gradients = [], []
    for dtype in ("float32", half):
        policy = load_policy(str(tiny_model), device="cpu", dtype=dtype, lora_rank=lora)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # zero at first
                generator = torch.Generator().manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.05, generator=generator)
        optimizer = sgd(policy, 0.0)
        optimizer.step = lambda: None  # the gradients stay
        metrics = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
        norms.append(metrics["grad_norm"])
        gradients.append(torch.cat([master.grad.flatten() for master in optimizer.masters]))
    assert gradients[1].dtype == torch.float32
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert torch.cosine_similarity(*gradients, dim=0) > bound


# Operations that multiply matrices; the last one on AMD's CPUs.
PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a PyTorch without oneDNN")
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_gradients_may_come_from_bfloat16_products(tiny_model, groups, dtype, monkeypatch):
    """The log-probabilities may not. The setting of the whole process is put back."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    policy = load_policy(str(tiny_model), device="cpu", dtype=dtype)
    settings, seen = torch.backends.mkldnn.matmul, {"forward": set(), "backward": set()}
    before = settings.fp32_precision

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            if operation.name().startswith(PRODUCTS):
                is_backward = torch._C._current_graph_task_id() >= 0
                seen["backward" if is_backward else "forward"].add(settings.fp32_precision)
            return operation(*arguments, **(keywords or {}))

    with Spy():
        update(policy, sgd(policy, 0.0), groups, kind="dapo", **SETTINGS)
    assert seen == {"forward": {before}, "backward": {"bf16" if dtype == "auto" else before}}
    assert settings.fp32_precision == before


@pytest.mark.parametrize("dtype, is_clipped", [("float32", True), ("bfloat16", False)])
def test_in_half_precision_gspo_clips_no_rounding_of_the_sampler(
    tiny_model, groups, dtype, is_clipped
):
    """The ratio is taken to the first pass, which the second one has left by its step."""
    policy = load_policy(str(tiny_model), device="cpu", dtype=dtype)
    for group in groups:
        group.completions = [
            replace(each, logprobs=tuple(x + 0.01 for x in each.logprobs))
            for each in group.completions
        ]

    optimizer = sgd(policy, 0.0)

    def clipped(first_pass, rate):
        optimizer.inner.param_groups[0]["lr"] = rate
        settings = dict(SETTINGS, clip_low=3e-4, clip_high=4e-4)
        metrics = update(policy, optimizer, groups, before=first_pass, kind="gspo", **settings)
        return metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]

    assert (clipped({}, 0.0) > 0) == is_clipped
    first_pass = {}
    clipped(first_pass, 1.0)
    assert clipped(first_pass, 0.0) > 0

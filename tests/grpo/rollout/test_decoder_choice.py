"""Which decoder a policy gets on a GPU, without one."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import loading, make_tiny_model

from grpo.model.load import load_policy
from grpo.rollout import cuda_decoder


@pytest.fixture
def policy(tmp_path):
    return load_policy(str(make_tiny_model(tmp_path)), device="cpu", options=loading(lora_rank=4))


def b_matrices(policy):
    return [w for name, w in policy.model.named_parameters() if ".lora_B." in name]


@pytest.mark.parametrize(("difference", "is_used"), [(1e-5, True), (0.5, False)])
def test_the_comparison_does_not_see_what_the_adapters_have_learned(
    policy, monkeypatch, difference, is_used
):
    """It sees the same small adapters in every run; afterwards the policy is as before."""
    for weight in b_matrices(policy):
        weight.data.fill_(7.0)
    policy.fast_model.refresh()
    copies = [copy for layer in policy.fast_model.copies.layers for copy in layer.copies()]
    merged = [copy.target.clone() for copy in copies]
    seen = []

    def compare(step):
        policy.fast_model.refresh()  # as a rollout does
        seen.extend(weight.std().item() for weight in b_matrices(policy))
        return difference

    monkeypatch.setattr(cuda_decoder, "CudaStep", lambda policy: "the step")
    monkeypatch.setattr(cuda_decoder, "disagreement", compare)
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"), fast_model=policy.fast_model, causal=policy.causal
    )
    monkeypatch.setattr(policy.fast_model, "D", 32)
    if is_used:
        assert cuda_decoder.new_cuda_step(on_gpu) == "the step"
    else:
        with pytest.warns(
            UserWarning, match="the fused decoder disagrees with the model by 5.0e-01"
        ):
            assert cuda_decoder.new_cuda_step(on_gpu) is None

    assert len(seen) == len(b_matrices(policy)) and all(0.01 < each < 0.05 for each in seen)
    assert all((weight == 7.0).all() for weight in b_matrices(policy))
    assert all(torch.equal(copy.target, old) for copy, old in zip(copies, merged, strict=True))

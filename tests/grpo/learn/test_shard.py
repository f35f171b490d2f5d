"""Two processes update a policy, whole or divided, as one process does."""

import os

import pytest
import torch
from tiny_architectures import ARCHITECTURES, write
from tiny_models import FAMILIES, make_tiny_model, write_model
from updates import one_batch, update

from grpo.data.errors import UserError
from grpo.distributed import Ranks
from grpo.learn.batch import completion_logprobs
from grpo.learn.optimizer import Optimizer
from grpo.learn.shard import Sharding, whole
from grpo.model.load import load_policy
from grpo.records import Completion, Group
from grpo.tasks.base import Problem

LEARN = dict(kind="cispo", clip_low=1.0, clip_high=1.0, max_length=24, max_grad_norm=0.2, beta=0.1)
CASES = {  # how the policy is loaded, and by how much rounding may change what is learned
    "whole": ({}, 2e-5),
    "adapter": ({"lora_rank": 3, "dtype": "bfloat16"}, 2e-2),  # two ranks divide 3 unevenly
    "bloom": ({}, 2e-5),
    "qwen3_next": ({"lora_rank": 4}, 2e-5),
    "gpt_oss": ({}, 2e-5),
    "lfm2": ({}, 2e-5),
}

# Families of fast models, and ranks of their adapters.
FAST = (
    ("llama-3 rotary scaling", 0),  # ties its embeddings
    ("qwen2", 4),  # has biases
    ("qwen3", 0),  # has norms of queries and keys
    ("qwen3", 4),
)


def group_of(policy, size):
    """Of three completions the second rank has one, and so fewer micro-batches, of one none."""
    completions = [
        Completion(tuple(range(20 + i, 30 + 3 * i)), (-5.0,) * (10 + 2 * i), "", "length")
        for i in range(size)
    ]
    problem, prompt = Problem("t", 1, "A", "x", "0"), policy.encode("A: the owl")
    return Group(0, problem, prompt, 1.0, completions, advantages=[1.0, -1.5, 0.5][:size])


def updated(folder, options, ranks, micro_tokens=1000, is_divided=False):
    """Two updates of a model: their metrics, the policy, its optimizer and log-probabilities."""
    policy = load_policy(str(folder), device="cpu", keep_reference=True, **options)
    sharding = Sharding(policy, ranks) if is_divided else None
    if sharding:
        sharding.is_short = not policy.is_lora  # else frozen weights stay where they are
        policy.learner.run.set_reshard_after_forward(sharding.is_short)
        policy.enable_gradient_checkpointing()
    optimizer = Optimizer(policy.parameters, 1e-3, ranks=ranks, sharding=sharding)
    # Else rounding alone decides steps of gradients that are 0, such as those of a key's bias.
    optimizer.inner.param_groups[0]["eps"] = 1e-4
    learn = LEARN | {"micro_tokens": micro_tokens}
    steps = [[group_of(policy, size)] for size in (3, 1)]
    metrics = [update(policy, optimizer, groups, **learn) for groups in steps]
    return metrics, policy, optimizer, completion_logprobs(policy, one_batch(steps[0]))[0]


def child(rank, folder):
    where = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    compare_updates(folder, Ranks(rank, 2))
    compare_gradients(folder, Ranks(rank, 2))
    torch.distributed.barrier()
    os._exit(0)  # an interpreter that ends may be aborted by gloo's threads (pytorch#179291)


def compare_updates(folder, ranks):
    for name, (options, rounding) in CASES.items():
        close = {"atol": rounding, "rtol": 10 * rounding}
        metrics, policy, optimizer, logprobs = updated(folder / name, options, Ranks())
        assert metrics[0]["grad_norm"] > LEARN["max_grad_norm"] and metrics[1]["kl"] > 1e-4

        repeated = updated(folder / name, options, ranks)
        divided = updated(folder / name, options, ranks, 20, is_divided=True)
        for found in (repeated, divided):
            for mine, other in zip(found[0], metrics, strict=True):
                assert mine == pytest.approx(other, rel=5 * rounding, abs=rounding), (mine, other)
            for mine, other in zip(found[1].model.parameters(), policy.model.parameters()):
                torch.testing.assert_close(mine, other, atol=rounding / 10, rtol=0)
            torch.testing.assert_close(found[3], logprobs, **close)
            moments = found[2].state_dict()["moments"]
            if ranks.is_rank0:
                torch.testing.assert_close(moments, optimizer.state_dict()["moments"], **close)
        # A checkpoint is written while the next step is made.
        count = divided[2].inner.state_dict()["state"][0]["step"]
        assert ranks.rank or moments["0/step"] is not count

        for weight, master in zip(divided[1].parameters, divided[2].masters):
            torch.testing.assert_close(weight, whole(master).to(weight.dtype), atol=0, rtol=0)
        held = sum(part.to_local().numel() for _, part in divided[2].sharding.pairs)
        assert held < 0.6 * policy.model.num_parameters()


def results(policy):
    """Log-probabilities, those of the reference if there is one, and all gradients."""
    learner, batch, found = policy.learner, one_batch([group_of(policy, 3)]), []
    if policy.is_lora:
        with policy.reference() as reference:
            found += reference.run(completion_logprobs, reference, batch)[:1]
    logprobs, _ = learner.run(completion_logprobs, learner, batch)
    (logprobs * torch.arange(logprobs.numel()).view_as(logprobs)).sum().backward()
    return [*found, logprobs.detach()], [whole(each.grad) for each in learner.parameters]


def compare_gradients(folder, ranks):
    for family, lora_rank in FAST:
        policy = load_policy(str(folder / family), device="cpu", lora_rank=lora_rank)
        torch.manual_seed(0)
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name or "bias" in name or "norm" in name:  # 0 or 1 in a new model
                weight.data += 0.1 * torch.randn(weight.shape)
        logprobs, gradients = results(policy)
        assert all(gradient.norm() > 0 for gradient in gradients)

        Sharding(policy, ranks)
        assert policy.learner.forward.llama
        for _ in range(2):
            found_logprobs, found_gradients = results(policy)
            torch.testing.assert_close(found_logprobs, logprobs, atol=1e-4, rtol=0)
            for found, gradient in zip(found_gradients, gradients, strict=True):
                # Both ranks have the same completions, and the sum is over the ranks.
                assert (found - 2 * gradient).norm() <= 2e-5 * gradient.norm()
            for weight in policy.learner.parameters:
                weight.grad = None
            policy.enable_gradient_checkpointing()  # for the second time


def test_two_ranks_have_the_gradient_of_one_and_update_a_policy_as_one_does(tmp_path):
    make_tiny_model(tmp_path / "whole")
    make_tiny_model(tmp_path / "adapter")
    for each in ARCHITECTURES:
        if each.name in CASES:
            write(each, tmp_path / each.name)
    for family in {family for family, _ in FAST}:
        write_model(FAMILIES[family](), tmp_path / family)
    torch.multiprocessing.spawn(child, (tmp_path,), nprocs=2)


def test_one_rank_is_told_to_bring_others(tiny_policy):
    with pytest.raises(UserError, match="several ranks; start with torchrun"):
        Sharding(tiny_policy, Ranks())

"""`examples/grpo_in_one_file.py` computes what the trainer computes, and learns."""

import ast
import copy
import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from updates import loss_and_gradients

from grpo.learn.advantages import advantages
from grpo.model.load import load_policy
from grpo.records import Completion, Group
from grpo.tasks.base import Score
from grpo.tasks.interleave import Interleave

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "grpo_in_one_file.py"


@pytest.fixture(scope="module")
def one():
    """The example as a module, with small groups."""
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GROUP_SIZE = 6
    yield module
    del sys.modules[spec.name]


def problem_of(number):
    """Problems of different lengths, so that their groups weigh differently."""
    return Interleave().make(3 + number, "train", random.Random(number))


def moved(model, seed, share):
    """A copy of `model` whose weights have changed by a share of their size."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += share * weight.std() * noise if weight.dim() > 1 else 0
    return other


@pytest.fixture(scope="module")
def sampler_and_groups(one):
    """A policy, and two groups of ragged completions with distinct rewards that it sampled."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(one.MODEL)
    reference = AutoModelForCausalLM.from_pretrained(one.MODEL, dtype=torch.float32)
    sampler = moved(reference, seed=1, share=0.03)
    problems = [problem_of(number) for number in (0, 1)]
    groups = [one.collect(sampler, reference, tokenizer, problem) for problem in problems]
    assert all(len(group.rewards_G.unique()) > 1 for group in groups)
    assert not all(group.mask_GT.all() for group in groups)
    return sampler, groups


@pytest.fixture(scope="module")
def trained(sampler_and_groups):
    """The policy some updates later, as a plain model and as the trainer's policy."""
    sampler, _ = sampler_and_groups
    model = moved(sampler, seed=5, share=0.04)
    policy = load_policy("builtin", device="cpu", dtype="float32", keep_reference=True)
    policy.model.load_state_dict(model.state_dict())
    return model, policy


@pytest.fixture(scope="module")
def of_trainer(sampler_and_groups):
    """The groups as the trainer's records, with its advantages."""
    _, groups = sampler_and_groups
    records = [record(number, group) for number, group in enumerate(groups)]
    for group, values in zip(records, advantages([group.rewards for group in records])):
        group.advantages = values
    return records


def record(number, group):
    completions = [
        Completion(tuple(tokens_T[mask_T].tolist()), tuple(old_T[mask_T].tolist()), text, "stop")
        for tokens_T, mask_T, old_T, text in zip(
            group.tokens_GT, group.mask_GT, group.old_GT, group.texts
        )
    ]
    scores = [Score(reward) for reward in group.rewards_G.tolist()]
    prompt = tuple(group.prompt_P.tolist())
    problem = problem_of(number)
    return Group(number, problem, prompt, 1.0, completions, scores=scores)


def test_the_prompt_and_the_tokens_are_the_trainers(trained, of_trainer):
    _, policy = trained
    for group in of_trainer:
        assert group.prompt == policy.encode(group.problem)
        for completion in group.completions:
            assert completion.text == policy.decode(completion.tokens)


def test_the_cache_gives_the_logprobs_of_a_pass_over_all_tokens(one, sampler_and_groups):
    sampler, groups = sampler_and_groups
    for group in groups:
        with torch.no_grad():
            logp_GT = one.completion_logprobs(sampler, group.prompt_P, group.tokens_GT)
        torch.testing.assert_close(logp_GT, group.old_GT, atol=1e-4, rtol=1e-5)


def test_the_rewards_are_the_tasks(sampler_and_groups, of_trainer):
    task = Interleave(reward="similarity")
    for group in of_trainer:
        scores = task.score(group.problem, group.texts)
        assert group.rewards == pytest.approx([score.reward for score in scores])


def test_the_advantages_are_the_trainers(one, sampler_and_groups, of_trainer):
    for group, theirs in zip(sampler_and_groups[1], of_trainer):
        assert one.advantages(group.rewards_G).tolist() == pytest.approx(
            theirs.advantages, abs=1e-5
        )


def test_the_bounds_take_effect_on_both_sides(one, sampler_and_groups, trained):
    """Otherwise the next test would not see them."""
    clipped = []
    for group in sampler_and_groups[1]:
        with torch.no_grad():
            logp_GT = one.completion_logprobs(trained[0], group.prompt_P, group.tokens_GT)
        ratio_GT = (logp_GT - group.old_GT).exp()
        is_good_G1 = one.advantages(group.rewards_G)[:, None] > 0
        clipped += [
            ((ratio_GT < 1 - one.CLIP_LOW) & ~is_good_G1 & group.mask_GT).sum(),
            ((ratio_GT > 1 + one.CLIP_HIGH) & is_good_G1 & group.mask_GT).sum(),
        ]
    assert sum(clipped[::2]) > 0 and sum(clipped[1::2]) > 0


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_loss_and_its_gradient_are_the_trainers(
    one, sampler_and_groups, trained, of_trainer, beta, monkeypatch
):
    """The policy, the sampler and the reference are three different models."""
    monkeypatch.setattr(one, "BETA", beta)
    model, policy = trained
    model.zero_grad()
    loss = one.step_loss(model, sampler_and_groups[1])
    loss.backward()

    expected, gradients = loss_and_gradients(
        policy, of_trainer, "dapo", beta=beta, clip_low=one.CLIP_LOW, clip_high=one.CLIP_HIGH
    )
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    for (name, weight), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_it_stands_alone():
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) <= 200
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    own = {node.module for node in imports if node.module.startswith("grpo")}
    assert own == {"grpo.align.needleman", "grpo.tasks.interleave"}


@pytest.mark.slow
def test_it_learns_three_words():
    command = [sys.executable, EXAMPLE, "--words", "3", "--steps", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", done.stdout)]
    assert len(rewards) == 10
    assert rewards[0] < 0.8 and min(rewards[-3:]) > 0.9

"""Groups of the tiny model, and float64."""

import random

import pytest
import torch
from tiny_models import VOCABULARY
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from updates import HEAT, PROMPTS

from grpo.learn.advantages import advantages
from grpo.records import Group
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key
from grpo.tasks.base import Problem, Score


@pytest.fixture()
def groups(tiny_policy):
    """Three groups of four ragged completions with distinct rewards."""
    tiny_policy.stops = tuple(range(0, VOCABULARY, 15))
    ids = [tiny_policy.encode(prompt) for prompt in PROMPTS]
    keys = [[sample_key(5, prompt, sample) for sample in range(4)] for prompt in PROMPTS]
    answers = [
        generate(tiny_policy, RolloutRequest([prompt], [own], HEAT, [24]))[0]
        for prompt, own in zip(ids, keys)
    ]
    rng = random.Random(0)
    made = [
        Group(
            i,
            Problem("t", 1, p, "x", str(i)),
            ids[i],
            HEAT,
            completions,
            scores=[Score(rng.random()) for _ in completions],
        )
        for i, (p, completions) in enumerate(zip(PROMPTS, answers))
    ]
    for group, values in zip(made, advantages([group.rewards for group in made], scale="group")):
        group.advantages = values
    assert len({len(c.tokens) for group in made for c in group.completions}) > 3
    return made


@pytest.fixture()
def float64(tiny_policy, monkeypatch):
    """The policy in float64 throughout: transformers computes this norm in float32 whatever the
    model's precision.
    """
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ),
    )
    tiny_policy.model.double()

"""Scorers that fail or return odd numbers, and models of odd sizes."""

import math

import pytest
import torch
from copying import SMALL, Copy, trainer_for
from tiny_models import make_tiny_model
from transformers import AutoTokenizer, LlamaForCausalLM

from data.errors import UserError
from grpo.model.load import load_policy
from grpo.records import Completion
from grpo.rollout import generate as engine
from grpo.run.logs import load_run
from grpo.tools import train
from tasks.base import Problem, Score
from tasks.scoring import scores_of


@pytest.mark.parametrize(
    "answer, fault",
    [
        (
            lambda texts: [1 / 0],
            r": score\(\) raised ZeroDivisionError: division by zero \(.*line \d",
        ),
        (lambda texts: [Score(0.5)], r": score\(\) returned 1 scores for 3 completions"),
        (lambda texts: None, r": score\(\) raised TypeError"),
        (lambda texts: [0.5 for _ in texts], r", completion 1: score\(\) returned .*float"),
        (
            lambda texts: [Score(0.5), Score(math.nan), Score(0.5)],
            ", completion 2: .* reward of nan",
        ),
        (lambda texts: [Score("1") for _ in texts], ", completion 1: .* reward of '1'"),
        (lambda texts: [Score(0.5, value=math.nan)] * 3, ", completion 1: .* value of nan"),
    ],
)
def test_a_scorer_that_fails_is_named(answer, fault):
    problem = Problem("copy", 1, "p", "t", "k" * 16)
    with pytest.raises(UserError, match=f"task copy, problem {'k' * 16}{fault}"):
        scores_of(Copy(answer), problem, ["a", "b", "c"])


OTHER_NUMBERS = """
import numpy as np

from tasks.base import Problem, Score, key_of


class Penalty:
    name, rewards, default_level, reward_range = "penalty", (), 2, (-1.0, 0.0)

    def make(self, level, split, rng):
        number = rng.randrange(10**9)
        prompt, key = f"Copy text A.\\nA: {number}", key_of(split, number)
        return Problem(self.name, level, prompt, str(number), key)

    def score(self, problem, completions):
        lengths = np.array([len(text) for text in completions])
        rewards = -(lengths % 7) / np.float32(7)
        parts = [{"length": length, "label": np.str_("a")} for length in lengths]
        return [Score(*pair, exact=pair[0] == 0) for pair in zip(rewards, parts)]
"""


def test_a_run_on_numpys_numbers_and_a_scale_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OTHER_NUMBERS)
    arguments = ["--task", "own.py:Penalty", "--name", "own"]
    assert train.main([*SMALL, *arguments]) == 3  # identical completions

    run = load_run(tmp_path / "runs" / "own")
    assert all(-1 <= line["reward"] < 0 for line in run.metrics)
    assert all(line["value"] == pytest.approx(1 + line["reward"]) for line in run.metrics)
    assert all(0 <= line["mean"] <= 1 for line in run.reports)


def test_completions_of_no_text_are_scored_and_learned_from(tiny_policy, monkeypatch):
    stop = next(iter(tiny_policy.stops))
    original = engine.generate

    def empty(*arguments):
        groups = original(*arguments)
        return [[Completion((stop,), (-1.0,), "", "stop"), *group[1:]] for group in groups]

    monkeypatch.setattr("grpo.rollout.generate.generate", empty)
    report = trainer_for(tiny_policy).step()
    assert math.isfinite(report.metrics["loss"]) and report.metrics["groups/kept"] == 2
    assert all(group.texts[0] == "" for group in report.groups)


def test_a_vocabulary_larger_than_the_tokenizers(tmp_path):
    folder = make_tiny_model(tmp_path / "wide")
    model = LlamaForCausalLM.from_pretrained(folder)
    tokens = len(AutoTokenizer.from_pretrained(folder))
    model.resize_token_embeddings(tokens + 128, mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens:] = (
            3 * model.model.embed_tokens.weight[:128]
        )  # so that they are drawn
    model.save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu")
    report = trainer_for(policy).step()
    drawn = [
        token
        for group in report.groups
        for completion in group.completions
        for token in completion.tokens
    ]
    assert (
        max(drawn) >= tokens
        and math.isfinite(report.metrics["loss"])
        and report.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    )

"""Windows of long answers: where they are, and what their whole answers are expected to score."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from forced import trainer_for
from transformers import AutoModelForCausalLM

from grpo import curriculum
from grpo.config import Config
from grpo.curriculum import answer_logprobs, expected_share, right_answer
from grpo.tasks.interleave import Interleave
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer


def test_windows_are_where_the_policy_goes_wrong(tiny_policy, monkeypatch):
    """All tokens of an answer are certain but one."""
    config = Config(task="interleave", level=10, window=4, steps=4, prompts=64)
    trainer = Trainer(config, Supply(Interleave(), seed=0), tiny_policy)
    wrong: dict[int, str] = {}  # the text up to the uncertain token, by the problem's index

    def logprobs(policy, answers, *_):
        rows = []
        for answer in answers:
            tokens = answer.completions[0].tokens
            place = random.Random(answer.index).randrange(len(tokens))
            wrong[answer.index] = policy.decode(tokens[: place + 1])
            rows.append([math.log(0.5) if at == place else 0.0 for at in range(len(tokens))])
        return rows

    monkeypatch.setattr(curriculum, "answer_logprobs", logprobs)
    problems = trainer.problems(1)
    places = Counter()
    for index, problem in problems:
        place = len(wrong[index].split()) - len(problem.begun.split())
        assert 1 <= place <= 4, "the window has the word"
        places[place] += 1
    assert len(problems) == 64 and min(places.values()) > 5, "anywhere in it"

    short = [(0, trainer.stream.at(0, 2)[1])]
    assert curriculum.doubtful_parts(trainer.stream, short, 1 << 30) == short


def test_the_log_probabilities_of_answers_are_the_unmodified_models(tiny_policy, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    stream = trainer_for(tiny_policy).stream
    answers = [right_answer(tiny_policy, i, stream.at(i, 1)[1], 0.7) for i in range(3)]
    found = answer_logprobs(tiny_policy, answers, 1 << 30)
    for answer, logprobs in zip(answers, found, strict=True):
        tokens = answer.completions[0].tokens
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*answer.prompt, *tokens]])).logits[0]
        logp_TV = logits_TV.div(0.7).log_softmax(-1)
        right = [logp_TV[len(answer.prompt) + at - 1, x].item() for at, x in enumerate(tokens)]
        assert logprobs == pytest.approx(right, abs=1e-4)
    for answer, logprobs in zip(answers, found, strict=True):
        (alone,) = answer_logprobs(tiny_policy, [answer], 1)
        assert alone == pytest.approx(logprobs, abs=1e-5)


def test_the_first_word_may_have_a_space_before_it(tiny_policy):
    """Tokenizers have other tokens for it, and both score alike."""
    stream = trainer_for(tiny_policy).stream
    answers = [right_answer(tiny_policy, i, stream.at(i, 10)[1]) for i in range(3)]
    both = [curriculum.two_spellings(answer, tiny_policy) for answer in answers]
    spaced = [replace(each, completions=each.completions[1:], advantages=[1.0]) for each in both]
    rows = (answer_logprobs(tiny_policy, each, 1 << 30) for each in (answers, spaced, both))
    for answer, old, other, new in zip(answers, *rows, strict=True):
        word = answer.problem.target.split()[0]
        tokens, size = tiny_policy.target_tokens(f" {word}"), len(tiny_policy.target_tokens(word))
        assert len(other) == len(tokens) > size, "this tokenizer has a token for a second space"
        either = torch.tensor([sum(old[:size]), sum(other)]).logsumexp(0).item()
        assert new[:size] == pytest.approx([either, *[0.0] * (size - 1)], abs=1e-3)
        assert new[size:] == pytest.approx(old[size:], abs=1e-4)


def test_the_expected_share_is_the_mean_before_the_first_mistake():
    rng = random.Random(0)
    chances = [0.9, 0.5, 1.0, 0.8, 0.3]
    before = []
    for _ in range(20_000):
        wrong = (at for at, chance in enumerate(chances) if rng.random() >= chance)
        before.append(next(wrong, len(chances)) / len(chances))
    expected = expected_share([math.log(chance) for chance in chances])
    assert expected == pytest.approx(sum(before) / len(before), abs=0.01)

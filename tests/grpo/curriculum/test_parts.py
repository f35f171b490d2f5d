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
from grpo.evaluate import budgets
from grpo.learn.update import UpdateMemory
from grpo.rollout.sampling import truncation
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

    short = trainer.stream.take(0, [2])
    assert curriculum.doubtful_parts(trainer.stream, short, trainer.update_memory) == short


def test_the_prompts_of_windows_are_read_with_the_answers_and_not_by_other_weights(tiny_policy):
    config = Config(task="interleave", level=10, window=4, steps=4, prompts=4, dynamic_sampling=0)
    trainer = Trainer(config, Supply(Interleave(), seed=0), tiny_policy)
    passes, sample = tiny_policy.forward, trainer.sample

    def sample_what_was_read(step, problems):
        for _, problem in problems:
            assert any(read.places(tiny_policy.encode(problem)) for read in passes.kept)
        return sample(step, problems)

    trainer.sample = sample_what_was_read
    problems, _ = trainer.collect(1)
    prompts = [tiny_policy.encode(problem) for _, problem in problems]
    with torch.no_grad():
        for weight in tiny_policy.parameters:  # by an update of the user's own
            weight.mul_(0.5)
        torch.testing.assert_close(passes.prefill(prompts)[0], passes._together(prompts)[0])


def test_a_window_of_more_tokens_than_fit_is_left_whole(tiny_policy, monkeypatch):
    """Many tokenizers have more tokens for a word without a space before it."""
    tokens = tiny_policy.target_tokens
    monkeypatch.setattr(tiny_policy, "target_tokens", lambda text: (7, 7, *tokens(text)))
    stream = Trainer(
        Config(task="interleave", level=10, window=19, steps=4, prompts=4),
        Supply(Interleave(), seed=0),
        tiny_policy,
    ).stream
    whole = 0
    for index in range(8):
        ((_, problem),) = stream.take(index, [10])
        needed = len(tiny_policy.target_tokens(problem.target)) + 1
        tiny_policy.context = len(tiny_policy.encode(problem)) + needed
        memory = UpdateMemory(tiny_policy)
        ((_, found),) = curriculum.doubtful_parts(stream, [(index, problem)], memory)
        ((_, drawn),) = stream.windows([(index, problem)])
        for each in (found, drawn):
            budgets(tiny_policy, stream.task, [each], None)
        whole += found == problem
    assert 0 < whole < 8


def answers_of(policy, count, level=10, temperature=1.0):
    problems = trainer_for(policy).stream.take(0, [level] * count)
    return [right_answer(policy, i, problem, temperature) for i, problem in problems]


def test_the_log_probabilities_of_answers_are_the_unmodified_models(tiny_policy, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    answers = answers_of(tiny_policy, 3, level=1, temperature=0.7)
    found = answer_logprobs(tiny_policy, answers, UpdateMemory(tiny_policy))
    for answer, logprobs in zip(answers, found, strict=True):
        tokens = answer.completions[0].tokens
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*answer.prompt, *tokens]])).logits[0]
        logp_TV = logits_TV.div(0.7).log_softmax(-1)
        right = [logp_TV[len(answer.prompt) + at - 1, x].item() for at, x in enumerate(tokens)]
        assert logprobs == pytest.approx(right, abs=1e-4)
    memory = UpdateMemory(tiny_policy)
    memory.micro_tokens = 1
    for answer, logprobs in zip(answers, found, strict=True):
        (alone,) = answer_logprobs(tiny_policy, [answer], memory)
        assert alone == pytest.approx(logprobs, abs=1e-5)


def test_the_first_word_may_have_a_space_before_it(tiny_policy):
    """Tokenizers have other tokens for it, and both score alike."""
    answers = answers_of(tiny_policy, 3)
    both = [curriculum.two_spellings(answer, tiny_policy) for answer in answers]
    spaced = [replace(each, completions=each.completions[1:], advantages=[1.0]) for each in both]
    rows = (
        answer_logprobs(tiny_policy, each, UpdateMemory(tiny_policy))
        for each in (answers, spaced, both)
    )
    for answer, old, other, new in zip(answers, *rows, strict=True):
        word = answer.problem.target.split()[0]
        tokens, size = tiny_policy.target_tokens(f" {word}"), len(tiny_policy.target_tokens(word))
        assert len(other) == len(tokens) > size, "this tokenizer has a token for a second space"
        either = torch.tensor([sum(old[:size]), sum(other)]).logsumexp(0).item()
        assert new[:size] == pytest.approx([either, *[0.0] * (size - 1)], abs=1e-3)
        assert new[size:] == pytest.approx(old[size:], abs=1e-4)


def test_a_spelling_that_is_the_same_counts_once(tiny_policy, monkeypatch):
    (answer,) = answers_of(tiny_policy, 1)
    tokens = tiny_policy.target_tokens
    monkeypatch.setattr(tiny_policy, "target_tokens", lambda text: tokens(text.strip()))
    assert curriculum.two_spellings(answer, tiny_policy) == answer


def test_tokens_that_the_sampler_excludes_are_wrong(tiny_policy):
    answers = answers_of(tiny_policy, 1)
    (values,) = answer_logprobs(tiny_policy, answers, UpdateMemory(tiny_policy), truncation(1e-6))
    assert set(values) <= {0.0, -math.inf} and -math.inf in values
    assert expected_share(values) < 1


def test_memory_that_runs_out_is_saved(tiny_policy, monkeypatch):
    answers = answers_of(tiny_policy, 4)
    memory = UpdateMemory(tiny_policy)
    found, run = answer_logprobs(tiny_policy, answers, memory), curriculum.completion_logprobs

    def full(policy, batch, *options):
        if len(batch.prompts) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(policy, batch, *options)

    monkeypatch.setattr(curriculum, "completion_logprobs", full)
    again = answer_logprobs(tiny_policy, answers, memory)
    assert sum(again, []) == pytest.approx(sum(found, []), abs=1e-5)
    assert "out of memory" in tiny_policy.take_events()[0]


def test_the_expected_share_is_the_mean_before_the_first_mistake():
    rng = random.Random(0)
    chances = [0.9, 0.5, 1.0, 0.8, 0.6]  # the last token ends the answer
    before = []
    for _ in range(20_000):
        wrong = (at for at, chance in enumerate(chances) if rng.random() >= chance)
        before.append(next(wrong, len(chances)) / len(chances) * (rng.random() < chances[-1]))
    expected = expected_share([math.log(chance) for chance in chances])
    assert expected == pytest.approx(sum(before) / len(before), abs=0.01)

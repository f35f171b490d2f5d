"""The engine against a plain `transformers` forward pass, and against itself in other company."""

from dataclasses import replace

import pytest
import torch
from forced import trainer_for
from tiny_architectures import Architecture, write
from tiny_models import OTHERS, PROMPTS, VOCABULARY, make_tiny_model, rollout, write_model
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grpo.curriculum import demonstration
from grpo.data.errors import UserError
from grpo.learn.batch import completion_logprobs, micro_batches
from grpo.model import load, rows
from grpo.model.load import load_policy
from grpo.model.rows import CachedRows, CachedRowsOfOneLength, PlainRows
from grpo.records import Group
from grpo.rollout.generate import (
    Drafting,
    RolloutRequest,
    budget_for,
    fitting,
    generate,
    sample_groups,
)
from grpo.rollout.sampling import sample_key, truncation
from grpo.tasks.base import Problem
from grpo.tasks.interleave import Interleave


def plain_logprobs(model, prompt, tokens, temperature):
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def drawn_logprobs(model, prompt, tokens, temperature=1.0):
    every = plain_logprobs(model, prompt, tokens, temperature)
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def unmodified(folder):
    options = dict(dtype=torch.float32, attn_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def other_policy(folder, family, **options):
    return load_policy(write_model(OTHERS[family](), folder), device="cpu", **options)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 1)])
def test_sampler_logprobs_are_those_of_a_plain_forward(tmp_path, heads, kv_heads):
    policy = load_policy(str(make_tiny_model(tmp_path, heads=(heads, kv_heads))), device="cpu")
    plain = unmodified(tmp_path)
    for prompt, answers in zip(*rollout(policy, temperature=0.8)):
        for answer in answers:
            expected = drawn_logprobs(plain, prompt, answer.tokens, 0.8)
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_what_is_sampled_does_not_depend_on_company(tiny_policy):
    # Early ends, so that rows retire and the batch is compacted.
    tiny_policy.stops = tuple(range(0, VOCABULARY, 40))
    _, together = rollout(tiny_policy, samples=8)
    for prompt, group in zip(PROMPTS, together):
        _, (alone,) = rollout(tiny_policy, [prompt], samples=8)
        assert [a.tokens for a in alone] == [a.tokens for a in group]


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_completion_ends_with_its_first_end_token_or_its_budget(tiny_model, is_fast, monkeypatch):
    if not is_fast:  # as if `grpo/fast` had been deleted
        monkeypatch.setattr(load, "accelerate", lambda *_, **__: None)
    policy = load_policy(str(tiny_model), device="cpu")
    policy.stops = tuple(range(0, VOCABULARY, 40))
    for group in rollout(policy, samples=8)[1]:
        for answer in group:
            ends = [token in policy.stops for token in answer.tokens]
            assert not any(ends[:-1])
            assert (answer.finish == "stop") == ends[-1]
            assert ends[-1] or len(answer.tokens) == 24
            assert len(answer.logprobs) == len(answer.tokens)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("reward", ["pairs", "prefix"])
def test_sampling_ends_where_nothing_counts(tiny_model, is_fast, reward, monkeypatch):
    if not is_fast:
        monkeypatch.setattr(load, "accelerate", lambda *_, **__: None)
    policy, task = load_policy(str(tiny_model), device="cpu"), Interleave(reward)
    whole = task.problem("the owl saw a boat".split(), "it rains on my hat".split())
    problems = [whole, part := task.window(whole, 3, 2)]
    to_the_end = [whole, replace(part, data=part.data | {"goes_on": False})]
    drawn = []
    for asked, stops in (to_the_end, False), (problems, True), (problems, False):
        drawn += [
            sample_groups(
                policy,
                task,
                asked,
                indices=[0, 1],
                keys=[[sample_key(0, index, n) for n in range(8)] for index in range(2)],
                temperature=1.0,
                budgets=[40] * 2,
                drafting=Drafting(),
                stops_early=stops,
            )
        ]

    # An evaluation stops behind windows alone, whatever else is in the batch.
    for group, alike in zip(drawn[2], (drawn[0][0], drawn[1][1]), strict=True):
        for one, other in zip(group.completions, alike.completions, strict=True):
            assert replace(one, logprobs=()) == replace(other, logprobs=())
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    finishes = set()
    for every, group, problem in zip(drawn[0], drawn[1], problems, strict=True):
        assert policy.decode(group.prompt).endswith(problem.begun)
        for longer, answer in zip(every.completions, group.completions, strict=True):
            assert answer.tokens == longer.tokens[: len(answer.tokens)]
            texts = [policy.decode(longer.tokens[:n]) for n in range(1, len(longer.tokens) + 1)]
            enough = [task.is_enough(problem, text) for text in texts]
            length = enough.index(True) + 1 if any(enough) else len(longer.tokens)
            assert (len(answer.tokens), answer.text) == (length, texts[length - 1])
            assert answer.finish == ("enough" if any(enough) else longer.finish)
            finishes.add((problem.begun, answer.finish))
    assert (problems[1].begun, "enough") in finishes
    assert (("", "enough") in finishes) == (reward == "prefix")


def test_a_demonstration_fills_the_window(tiny_policy):
    task = Interleave()
    whole = task.problem("the owl saw a boat".split(), "it rains on my hat".split())
    for start, end in ((0, False), (3, False), (6, True)):
        window = task.window(whole, 4, start)
        shown = demonstration(tiny_policy, tiny_policy.answer_tokens(window))
        tokens = tiny_policy.encode(window) + shown.tokens
        assert tiny_policy.decode(tokens).endswith(f"{window.begun} {window.target}".strip())
        assert (shown.tokens[-1] == tiny_policy.end, shown.finish == "stop") == (end, end)


def test_temperature_zero_is_greedy(tiny_policy, tiny_model):
    plain = unmodified(tiny_model)
    ids, groups = rollout(tiny_policy, temperature=0.0, samples=1)
    for prompt, (answer,) in zip(ids, groups):
        best = plain_logprobs(plain, prompt, answer.tokens, 1.0).argmax(-1)
        assert best.tolist() == list(answer.tokens)


def test_truncated_sampling_stays_inside_and_is_renormalised(tiny_policy, tiny_model):
    plain = unmodified(tiny_model)
    truncate = truncation(0.5)
    ids, groups = rollout(tiny_policy, truncate=truncate)
    for prompt, answers in zip(ids, groups):
        for answer in answers:
            every = plain_logprobs(plain, prompt, answer.tokens, 1.0)
            drawn = torch.tensor(answer.tokens)[:, None]
            expected = truncate(every).log_softmax(-1).gather(1, drawn)[:, 0]
            assert expected.isfinite().all()
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [CachedRows, CachedRowsOfOneLength, PlainRows])
@pytest.mark.parametrize("family, lora_rank", [("bloom", 4), ("mamba", 0)])
def test_all_rows_sample_from_the_models_own_distribution(tmp_path, family, lora_rank, kind):
    policy = other_policy(tmp_path, family, lora_rank=lora_rank)
    policy.stops = tuple(range(0, VOCABULARY, 10))  # early ends, so that rows retire
    plain = unmodified(tmp_path)
    assert policy.path == "cached" and policy.rows is CachedRows
    policy.rows = kind
    ids, groups = rollout(policy, samples=4, budget=12)
    assert len({len(answer.tokens) for answers in groups for answer in answers}) > 2
    for prompt, answers in zip(ids, groups):
        for answer in answers:
            ends = [token in policy.stops for token in answer.tokens]
            assert not any(ends[:-1]) and (ends[-1] or len(ends) == 12)
            expected = drawn_logprobs(plain, prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
    for prompt, answers in zip(PROMPTS, groups):
        for samples in (1, 4):
            _, (alone,) = rollout(policy, [prompt], samples=samples, budget=12)
            assert [a.tokens for a in alone] == [a.tokens for a in answers[:samples]]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_multiply_by_token_only_while_decoding(tmp_path, monkeypatch, kind):
    write(Architecture(kind, ""), tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    policy.stops, ways = (), []

    def note(_):
        ways.append(policy.causal.get_experts_implementation()[""])
        return False

    request = RolloutRequest([(5, 6, 7)], [[1, 2, 3]], 1.0, [12], is_enough=[note])
    (grouped,) = generate(policy, request)
    assert set(ways) == {"grouped_mm"}

    monkeypatch.setattr(rows, "GROUPED_IS_FASTER", ())  # as on a GPU
    ways.clear()
    (by_token,) = generate(policy, request)
    assert set(ways[:36]) == {"batched_mm"} and set(ways[36:]) == {"grouped_mm"}
    for one, other in zip(grouped, by_token):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    with pytest.raises(ZeroDivisionError):
        generate(policy, replace(request, is_enough=[lambda tokens: len(tokens) == 5 and 1 / 0]))
    assert policy.causal.get_experts_implementation() == {"": "grouped_mm"}

    # More rows stay grouped, also when some have ended.
    ways.clear()
    policy.stops = tuple(range(0, 4096, 12))
    generate(policy, replace(request, keys=[range(rows.FEW_ROWS + 1)]))
    assert set(ways) == {"grouped_mm"}

    # The check of a model runs it in the same way.
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "batched_mm", lambda _, hidden, *__: hidden)
    assert load_policy(str(tmp_path), device="cpu").path == "plain"


def test_the_fallback_learns_with_the_gradient_of_a_plain_forward(tmp_path):
    policy = other_policy(tmp_path, "bloom")
    plain = unmodified(tmp_path)
    ids, groups = rollout(policy, samples=2, budget=6)
    made = [
        Group(i, Problem("any", 1, "", "", ""), prompt, 1.0, answers, advantages=[1.0, -1.0])
        for i, (prompt, answers) in enumerate(zip(ids, groups))
    ]
    (batch,) = micro_batches(made, "grpo", max_length=6, device=policy.device)
    logp_RT, _ = completion_logprobs(policy, batch)
    weights = torch.linspace(1, 2, logp_RT.numel()).view_as(logp_RT)
    (logp_RT * weights).sum().backward()
    total = sum(
        drawn_logprobs(plain, prompt, answer.tokens) @ weights[2 * i + j, : len(answer.tokens)]
        for i, (prompt, answers) in enumerate(zip(ids, groups))
        for j, answer in enumerate(answers)
    )
    total.backward()
    for (name, one), (_, other) in zip(
        policy.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_a_model_that_takes_no_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.model.load.MAMBA", ())
    refusal = "--lora-rank 4: .*incompatible with Mamba.*; give --lora-rank 0"
    with pytest.raises(UserError, match=refusal):
        other_policy(tmp_path, "mamba", lora_rank=4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0, 1.2])
def test_prompts_in_lots_are_answered_as_all_at_once(tiny_policy, monkeypatch, temperature):
    prompts = [tiny_policy.encode(text) for text in ("A", "Copy B.", "A: one two", "B: three", "C")]
    settings = dict(
        keys=[[sample_key(3, p, g) for g in range(3)] for p in range(5)],
        temperature=temperature,
        budgets=[9, 4, 12, 7, 9],
    )
    whole = generate(tiny_policy, RolloutRequest(prompts, **settings))
    asked = []
    monkeypatch.setattr(tiny_policy, "prompts_at_once", lambda *sizes: asked.append(sizes) or 2)
    assert [
        [c.tokens for c in group]
        for group in generate(tiny_policy, RolloutRequest(prompts, **settings))
    ] == [[c.tokens for c in group] for group in whole]
    ((completions, prompt, room),) = set(asked)
    assert completions == 3 and prompt == max(map(len, prompts)) and room >= 12


def short_of_memory(policy, monkeypatch, most):
    """Let rollouts of more than `most` prompts fail; return the numbers of prompts tried."""
    plain, tried = policy.decoder.decode, []

    def hungry(request):
        tried.append(len(request.prompts))
        assert len(tried) < 20, "it is tried for ever"
        if len(request.prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(request)

    monkeypatch.setattr(policy.decoder, "decode", hungry)
    return tried


def tokens_of(groups):
    return [[completion.tokens for completion in group] for group in groups]


def test_out_of_memory_halves_the_prompts_at_a_time_and_changes_no_sample(tiny_policy, monkeypatch):
    _, expected = rollout(tiny_policy, samples=3)
    tried = short_of_memory(tiny_policy, monkeypatch, most=1)
    _, found = rollout(tiny_policy, samples=3)
    assert tokens_of(found) == tokens_of(expected)
    assert len(expected) == 3 and tried == [3, 1, 1, 1]

    (note,) = tiny_policy.take_events()
    assert note.startswith("out of memory: rollouts of at most 3 completions of ")
    assert tiny_policy.take_events() == []

    # The next rollout does not try what failed.
    _, again = rollout(tiny_policy, samples=3)
    assert tokens_of(again) == tokens_of(expected) and tried[4:] == [1, 1, 1]


def test_a_single_prompt_that_does_not_fit_is_an_error(tiny_policy, monkeypatch):
    short_of_memory(tiny_policy, monkeypatch, most=0)
    with pytest.raises(UserError, match="out of memory in the rollout of 3 completions of up to"):
        rollout(tiny_policy, samples=3)


def test_the_console_says_that_memory_ran_out(tiny_policy, monkeypatch):
    trainer = trainer_for(tiny_policy)
    short_of_memory(tiny_policy, monkeypatch, most=1)
    assert trainer.step().events[0].startswith("out of memory: rollouts of at most ")


# Budgets: what a completion may take, and which problems fit the context.


def test_budget(tiny_policy):
    target = "one two three"
    needed = len(tiny_policy.target_tokens(target)) + 1
    assert budget_for(tiny_policy, (1,), target) >= needed * 1.25
    assert budget_for(tiny_policy, (1,), target, asked=needed) == needed
    with pytest.raises(UserError, match=f"the right answer takes {needed} tokens"):
        budget_for(tiny_policy, (1,), target, asked=needed - 1)
    assert (
        budget_for(tiny_policy, (1,) * (1024 - needed), target)
        == needed
        == budget_for(tiny_policy, (1,) * (1024 - needed), target, asked=99)
    )
    assert budget_for(tiny_policy, (1,) * (1023 - needed), target) == needed + 1
    with pytest.raises(UserError, match="its context of 1024 tokens is too short"):
        budget_for(tiny_policy, (1,) * (1025 - needed), target)


def test_problems_too_long_for_the_context_are_passed_over_and_counted(tiny_policy):
    short, long = Problem("t", 1, "p", "one two", "s"), Problem("t", 1, "p", "one " * 1100, "l")
    passed = []
    assert list(fitting(tiny_policy, [short, long, long, short], passed)) == [
        short,
        short,
    ] and passed == [long, long]
    assert len(list(fitting(tiny_policy, ([long] * 15 + [short]) * 2, []))) == 2
    with pytest.raises(UserError, match="its context of 1024 tokens is too short"):
        list(fitting(tiny_policy, [short] + [long] * 16, []))

"""The engine against a plain `transformers` forward pass, and against itself in other company."""

import os
from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, PROMPTS, SHAPE, VOCABULARY, loading, make_tiny_model, rollout
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    MambaConfig,
    MistralConfig,
)

from data.errors import UserError
from grpo.learn.batch import micro_batches
from grpo.learn.update import completion_logprobs
from grpo.model import prefix_cache
from grpo.model.load import BUILTIN, load_policy
from grpo.records import Group
from grpo.rollout.budget import budget_for, fitting, room_warning
from grpo.rollout.cuda_graph import cublaslt
from grpo.rollout.eager_decoder import EagerDecoder, accepted
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key, truncation
from tasks.base import Problem


def plain_logprobs(model, prompt, tokens, temperature):
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_sampler_logprobs_are_those_of_a_plain_forward(tmp_path, heads, kv_heads):
    policy = load_policy(str(make_tiny_model(tmp_path, heads=(heads, kv_heads))), device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, answers in zip(*rollout(policy, temperature=0.8)):
        for answer in answers:
            every = plain_logprobs(plain, prompt, answer.tokens, 0.8)
            expected = every.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_ragged_lengths_are_exercised(tiny_policy):
    # the tests of this file are only worth something if rows end at different places, by the end
    # token and by the budget
    tiny_policy.stops = tuple(range(0, VOCABULARY, 40))
    lengths = {
        len(answer.tokens) for group in rollout(tiny_policy, samples=8)[1] for answer in group
    }
    assert len(lengths) > 4


def test_what_is_sampled_does_not_depend_on_company(tiny_policy):
    tiny_policy.stops = tuple(
        range(0, VOCABULARY, 40)
    )  # early ends, so that rows retire and the batch is compacted
    _, together = rollout(tiny_policy, samples=8)
    for prompt, group in zip(PROMPTS, together):
        _, (alone,) = rollout(tiny_policy, [prompt], samples=8)
        assert [a.tokens for a in alone] == [a.tokens for a in group]


def test_rows_may_stand_in_any_order(tiny_policy):
    prompts, tokens = (
        [tiny_policy.encode(prompt) for prompt in PROMPTS[:2]],
        torch.tensor([[5], [9]]),
    )
    hidden = []
    for order in (torch.tensor([0, 1]), torch.tensor([1, 0])):
        _, shared = tiny_policy.prefill(prompts)
        shared.allocate(2, 8)
        tiny_policy.extend(tokens, shared)
        shared.reorder(order, torch.tensor([1, 1]))
        hidden.append(tiny_policy.extend(tokens[order], shared)[order])
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_long_rows_attend_as_short_ones_do(tiny_policy, monkeypatch, samples):
    """To prompts and rows of several lengths, by PyTorch's attention and by products."""
    prompts, rows = [tiny_policy.encode(prompt) for prompt in PROMPTS], len(PROMPTS) * samples
    hidden = []
    for many in (1, 1 << 40):
        monkeypatch.setattr(prefix_cache, "LONG_ROW_SCORES", many)
        _, shared = tiny_policy.prefill(prompts)
        shared.allocate(rows, 16)
        hidden.append([])
        for order, filled in (
            (range(rows), [0] * rows),
            (range(rows), [5, 3, 4] * samples),
            (range(rows - 1), [7, 6, 5] * samples),
        ):
            shared.reorder(torch.tensor(order), torch.tensor(filled)[: len(order)])
            tokens = torch.arange(5 * rows).view(rows, 5)[: len(order)] + filled[0]
            hidden[-1].append(tiny_policy.extend(tokens, shared))
    for one, other in zip(*hidden, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_completion_ends_with_its_first_end_token_or_its_budget(tiny_policy):
    tiny_policy.stops = tuple(range(0, VOCABULARY, 40))
    for group in rollout(tiny_policy, samples=8)[1]:
        for answer in group:
            ends = [token in tiny_policy.stops for token in answer.tokens]
            assert not any(ends[:-1])
            assert (answer.finish == "stop") == ends[-1]
            assert ends[-1] or len(answer.tokens) == 24
            assert len(answer.logprobs) == len(answer.tokens)


def test_temperature_zero_is_greedy(tiny_policy, tiny_model):
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="eager"
    )
    ids, groups = rollout(tiny_policy, temperature=0.0, samples=1)
    for prompt, (answer,) in zip(ids, groups):
        best = plain_logprobs(plain, prompt, answer.tokens, 1.0).argmax(-1)
        assert best.tolist() == list(answer.tokens)


def test_truncated_sampling_stays_inside_and_is_renormalised(tiny_policy, tiny_model):
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="eager"
    )
    ids, groups = rollout(tiny_policy, truncate=truncation(top_k=3))
    for prompt, answers in zip(ids, groups):
        for answer in answers:
            every = plain_logprobs(plain, prompt, answer.tokens, 1.0)
            top = every.topk(3, -1)
            inside = (top.indices == torch.tensor(answer.tokens)[:, None]).any(-1)
            assert inside.all()
            expected = every.gather(1, torch.tensor(answer.tokens)[:, None])[
                :, 0
            ] - top.values.logsumexp(-1)
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama-3 rotary scaling", "bloom"])
def test_completions_that_agree_so_far_are_one_row(tmp_path, family, monkeypatch):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config((FAMILIES | OTHERS)[family]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    policy.stops = tuple(range(0, VOCABULARY, 40))
    rows, extend = [], policy.extend
    monkeypatch.setattr(
        policy, "extend", lambda tokens, shared: rows.append(len(tokens)) or extend(tokens, shared)
    )
    _, groups = rollout(policy, samples=8, temperature=0.15)
    texts = [(p, answer.tokens) for p, group in enumerate(groups) for answer in group]
    assert rows == [
        len({(p, tokens[:n]) for p, tokens in texts if len(tokens) > n})
        for n in range(1, 1 + len(rows))
    ]
    assert rows[0] < max(rows) < len(texts) > rows[-1] > 0  # some agree, go apart, and end
    keys = [[sample_key(0, 1, prompt, sample, 0) for sample in range(8)] for prompt in PROMPTS]
    for prompt, row, group in zip(PROMPTS, keys, groups):
        alone = [
            generate(
                policy,
                RolloutRequest(
                    [policy.encode(prompt)], keys=[[key]], temperatures=[0.15], budgets=[24]
                ),
            )[0][0]
            for key in row
        ]
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in group]


def test_what_counts_of_a_draft_by_hand():
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 4], [5, 2, 3, 4], [9, 9, 9, 9]])
    drafts = torch.tensor([[1, 2, 3], [1, 7, 3], [1, 9, 3], [1, 2, 3], [9, 9, 9]])
    # all as drafted, and the one behind; the first that differs is the sample; 9 ends the text;
    # the first differs; ended at once
    assert accepted(chosen, drafts, torch.tensor([9])).tolist() == [4, 2, 2, 1, 1]
    assert (
        accepted(chosen[:, :1], drafts[:, :0], torch.tensor([9])).tolist() == [1] * 5
    )  # without drafts


@pytest.mark.parametrize(
    "row, written, last, sources, row_then, first",
    [
        # two go on from row 0 with the same token, but one has read more; row 3 has ended, and
        # gives its place
        (
            [0, 0, 1, 2, 2],
            [5, 6, 5, 5, 5],
            [1, 1, 1, 2, 2],
            [0, 1, 2, 0],
            [0, 3, 1, 2, 2],
            [0, 2, 3, 1],
        ),
        # row 1 goes on with three tokens; the first part stays
        (
            [0, 1, 1, 1, 1],
            [5, 5, 5, 5, 5],
            [7, 9, 8, 9, 6],
            [0, 1, 1, 1],
            [0, 3, 2, 3, 1],
            [0, 4, 2, 1],
        ),
        # rows 0 and 1 have ended
        ([2, 3, 3], [5, 5, 5], [1, 1, 1], [2, 3], [0, 1, 1], [0, 1]),
    ],
)
def test_splitting_rows_by_hand(row, written, last, sources, row_then, first):
    decoder = EagerDecoder.__new__(EagerDecoder)
    decoder.row, decoder.written, decoder.last = (
        torch.tensor(row),
        torch.tensor(written),
        torch.tensor(last),
    )
    assert decoder._split_rows().tolist() == sources
    assert decoder.row.tolist() == row_then and decoder.first.tolist() == first


def test_budget(tiny_policy):
    target = "one two three"
    needed = tiny_policy.target_length(target)
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


def test_a_prompt_that_leaves_less_than_half_of_the_budget_is_named(tiny_policy):
    problem = Problem("t", 1, "p", "", "k", {"where": "rows.jsonl, line 3"})
    prompt = len(tiny_policy.encode(problem))
    tiny_policy.context = prompt + 32
    line = room_warning(tiny_policy, problem, declared=65)
    taken = f"its prompt takes {prompt} of the model's {prompt + 32} tokens"
    assert line.startswith(f"rows.jsonl, line 3: {taken}")
    assert "leaves a completion 32 instead of 65, as in every such problem; give shorter" in line
    assert room_warning(tiny_policy, problem, asked=65, declared=1) == line
    assert room_warning(tiny_policy, replace(problem, data={}), 65).startswith("problem k: its p")

    # Half of it is left, or the budget is that of the answer alone.
    assert room_warning(tiny_policy, problem, declared=64) == ""
    assert room_warning(tiny_policy, problem, asked=64, declared=99) == ""
    tiny_policy.context = prompt + 1
    assert room_warning(tiny_policy, problem) == ""


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


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_sample_from_their_own_distribution(tmp_path, family):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, answers in zip(*rollout(policy)):
        for answer in answers:
            expected = plain_logprobs(plain, prompt, answer.tokens, 1.0).gather(
                1, torch.tensor(answer.tokens)[:, None]
            )[:, 0]
            torch.testing.assert_close(
                torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=2e-6
            )


def test_a_sliding_window_that_is_outgrown_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=50)).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="its attention window is 50 tokens, but prompt and completion have 51"
    ):
        rollout(load_policy(str(tmp_path), device="cpu"), budget=60)


OTHERS = {  # they do not pass attention arguments on
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        eos_token_id=3,
        initializer_range=0.3,
    ),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        eos_token_id=3,
        initializer_range=0.3,
    ),
}


@pytest.mark.parametrize("family, lora_rank", [("bloom", 0), ("bloom", 4), ("mamba", 0)])
def test_the_fallback_samples_from_the_models_own_distribution(tmp_path, family, lora_rank):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHERS[family]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu", options=loading(lora_rank=lora_rank))
    policy.stops = tuple(range(0, VOCABULARY, 10))  # early ends, so that rows retire
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert policy.is_plain
    ids, groups = rollout(policy, samples=4, budget=12)
    assert len({len(answer.tokens) for answers in groups for answer in answers}) > 2
    for prompt, answers in zip(ids, groups):
        for answer in answers:
            expected = plain_logprobs(plain, prompt, answer.tokens, 1.0).gather(
                1, torch.tensor(answer.tokens)[:, None]
            )[:, 0]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
    for prompt, answers in zip(PROMPTS, groups):
        assert [a.tokens for a in rollout(policy, [prompt], budget=12)[1][0]] == [
            a.tokens for a in answers
        ]


def test_the_fallback_learns_with_the_gradient_of_a_plain_forward(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHERS["bloom"]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
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
        (
            plain_logprobs(plain, prompt, answer.tokens, 1.0).gather(
                1, torch.tensor(answer.tokens)[:, None]
            )[:, 0]
            * weights[2 * i + j, : len(answer.tokens)]
        ).sum()
        for i, (prompt, answers) in enumerate(zip(ids, groups))
        for j, answer in enumerate(answers)
    )
    total.backward()
    for (name, one), (_, other) in zip(
        policy.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_a_model_that_takes_no_adapter(tmp_path):
    AutoModelForCausalLM.from_config(OTHERS["mamba"]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="--lora-rank 4: .*incompatible with Mamba.*; give --lora-rank 0"
    ):
        load_policy(str(tmp_path), device="cpu", options=loading(lora_rank=4))


@pytest.mark.parametrize("wanted", [True, False])
def test_the_library_of_products_is_chosen_for_a_while_and_in_silence(monkeypatch, capfd, wanted):
    chosen = ["cublas"]

    def preferred(name=None):  # torch's, which writes to the process's stderr past Python's
        if name and name != "cublas":
            os.write(2, b"experimental\n")
        chosen.append(name or chosen[-1])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    with pytest.raises(ZeroDivisionError), cublaslt(wanted):
        inside = chosen[-1]
        os.write(2, b"ours\n")
        1 / 0  # noqa: B018
    assert (inside, chosen[-1]) == ("cublaslt" if wanted else "cublas", "cublas")
    assert capfd.readouterr().err == "ours\n"

"""The fused decoder against the eager one: the same tokens in float32, the same distribution in
bfloat16. On a GPU only.
"""

import random

import pytest
import torch
from tiny_models import (
    FAMILIES,
    PROMPTS,
    VOCABULARY,
    Sampling,
    assert_same_samples,
    rollout,
    rounding_of_logits,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.fast import decoder as fast_decoder
from grpo.fast.decoder import CudaRows, disagreement
from grpo.fast.speculative import DraftPlans
from grpo.model.load import BUILTIN, load_policy
from grpo.rollout.generate import Drafting, RolloutRequest, generate
from grpo.rollout.sampling import truncation

pytestmark = pytest.mark.gpu

# Mean difference of a log-probability in nats that rounding may make.
HALVES = [("bfloat16", 0.05), ("float16", 0.01)]
FUSED = ("llama-3 rotary scaling", "qwen2", "qwen3", "mistral")


def write_model(folder, family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    for (
        name,
        parameter,
    ) in model.named_parameters():  # which are 0 and 1 in a new model, and would hide mistakes
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)


def policy_of(folder, family, lora=0, dtype="float32", stops=tuple(range(0, VOCABULARY, 40))):
    write_model(folder, family)
    policy = load_policy(str(folder), device="cuda", dtype=dtype, lora_rank=lora)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # 0 in a new adapter
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    policy.stops = stops
    assert policy.decoder.step is not None
    return policy


@pytest.mark.parametrize("truncate", [None, truncation(0.5)], ids=["all", "top-p"])
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FUSED)
def test_fused_samples_what_eager_samples(tmp_path, family, lora, truncate):
    policy = policy_of(tmp_path, family, lora)
    for temperature in (0.3, 0.15, 0.0):  # cold: see test_drafting
        ids, found = rollout(policy, samples=8, temperature=temperature, truncate=truncate)
        kept, policy.decoder.step = policy.decoder.step, None  # eagerly
        expected = rollout(policy, samples=8, temperature=temperature, truncate=truncate)[1]
        policy.decoder.step = kept
        rounding = rounding_of_logits(policy, ids, expected)
        assert rounding < 3e-4  # not that of a lower precision
        sampling = Sampling(temperature, truncate, rounding)
        assert_same_samples(policy, ids, found, expected, sampling)


@pytest.mark.parametrize("length, budget", [(1, 24), (7, 60), (31, 60), (50, 200), (127, 300)])
@pytest.mark.parametrize("family", ["qwen3", "llama-3 rotary scaling"])
def test_fused_drafts_change_no_sample(tmp_path, monkeypatch, family, length, budget):
    policy = policy_of(tmp_path, family, 4, stops=(3,))
    ids, plain = rollout(policy, samples=8, budget=budget, temperature=0.15)
    truth = [answer.tokens for group in plain for answer in group]

    class Planned(DraftPlans):  # texts of random models do not survive decoding and encoding
        def _plan(self, rows, tokens, written, k):
            for row, n in zip(rows.tolist(), written.tolist()):
                plan = [token if i % 70 < 69 else 7 for i, token in enumerate(truth[row])]
                self._set([row], n, plan[n:], True)

    monkeypatch.setattr(fast_decoder, "DraftPlans", Planned)
    drafting = Drafting(length)
    _, drafted = rollout(
        policy,
        samples=8,
        budget=budget,
        temperature=0.15,
        guesses=[str] * len(ids),
        drafting=drafting,
    )
    assert_same_samples(policy, ids, drafted, plain, Sampling(0.15))
    assert drafting.acceptance > 0.9


@pytest.mark.parametrize("rows", [4, 24, 64])
def test_fused_attends_to_long_texts(tmp_path, rows):
    """To prompts and rows of several stretches, for few, some and many tokens; the last are read
    one by one.
    """
    policy = policy_of(tmp_path, "qwen3")
    policy.context, length = 2048, 1083
    torch.manual_seed(0)
    prompts, tokens = (
        [tuple(range(5, 705)), tuple(range(20, 220))],
        torch.randint(VOCABULARY, (rows, length), device="cuda"),
    )
    with torch.no_grad():
        _, shared = policy.forward.prefill(prompts)
        shared.allocate(rows, length)
        expected = policy.forward.extend(tokens, shared)
        model = policy.decoder.step
        request = RolloutRequest(prompts, [[1] * (rows // 2)] * 2, 1.0, [length] * 2)
        decoder = CudaRows(model, request, length)
        for place in (*range(0, 1080, 60), *range(1080, length)):
            T = 60 if place < 1080 else 1
            model.memory.feed[:rows, :T] = tokens[:, place : place + T]
            model.memory.state.written[:rows] = 1 + place
            found = model.layers.forward(rows, T, decoder._lay_out(T), model.memory).view(
                rows, T, -1
            )
            torch.testing.assert_close(found, expected[:, place : place + T], atol=1e-3, rtol=1e-3)


def test_fused_sees_what_the_optimizer_changes(tmp_path):
    for lora in (0, 4):
        policy = policy_of(tmp_path, "qwen2", lora)
        assert disagreement(policy.decoder.step) < 1e-4
        for parameter in policy.parameters:
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert disagreement(policy.decoder.step) < 1e-4


def test_a_trained_adapter_keeps_the_fused_decoder(tmp_path):
    """In bfloat16 a large adapter makes the hidden states differ by more than is accepted."""
    policy = policy_of(tmp_path, "qwen2", lora=4, dtype="bfloat16")
    for name, weight in policy.model.named_parameters():
        if ".lora_B." in name:
            weight.data = 30 * torch.randn_like(weight)
    kept = [weight.clone() for weight in policy.parameters]
    del policy.decoder.step
    assert policy.decoder.step is not None
    assert all(torch.equal(old, new) for old, new in zip(kept, policy.parameters, strict=True))


def test_fused_models_are_saved_whole(tmp_path):
    policy = policy_of(tmp_path, "llama-3 rotary scaling")
    before = rollout(policy)[1]
    policy.save(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved"), device="cuda", dtype="float32")
    again.stops = policy.stops
    assert [[a.tokens for a in group] for group in rollout(again)[1]] == [
        [a.tokens for a in group] for group in before
    ]


@pytest.mark.parametrize("half, bound", HALVES)
def test_fused_half_precision_samples_from_the_models_distribution(tmp_path, half, bound):
    policy = policy_of(tmp_path, "llama-3 rotary scaling", dtype=half)
    prompts, groups = rollout(policy, samples=64)
    precise = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).cuda()
    differences = []
    for prompt, group in zip(prompts, groups):
        for answer in group:
            logits = precise(input_ids=torch.tensor([[*prompt, *answer.tokens]]).cuda()).logits[
                0, len(prompt) - 1 : -1
            ]
            expected = logits.log_softmax(-1).gather(
                1, torch.tensor(answer.tokens).cuda()[:, None]
            )[:, 0]
            differences.append(torch.tensor(answer.logprobs) - expected.detach().cpu())
    assert len(PROMPTS) * 64 == len(differences)
    assert torch.cat(differences).abs().mean() < bound


@pytest.mark.parametrize("samples", [1, 8, 16, 64])
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("half, bound", HALVES)
def test_fused_half_precision_agrees_with_the_update(tmp_path, half, bound, family, samples):
    """With 3, 24, 48 and 192 rows, and with adapters."""
    policy = policy_of(tmp_path, family, 4, dtype=half)
    prompts, groups = rollout(policy, samples=samples)
    differences = []
    for prompt, group in zip(prompts, groups):
        for answer in group:
            with torch.no_grad():
                logits = policy.head(
                    policy.forward.predict(policy.forward.pack([prompt], [answer.tokens]))
                ).float()
            expected = (
                logits.log_softmax(-1)
                .gather(1, torch.tensor(answer.tokens).cuda()[:, None])[:, 0]
                .cpu()
            )
            differences.append(torch.tensor(answer.logprobs) - expected)
    assert torch.cat(differences).abs().mean() < bound


def least_p(one, other):
    """Return the least p-value of a place after the first, times the number of these places."""
    found = []
    for t in range(1, one.shape[1]):
        counts = torch.stack(
            [torch.bincount(x[:, t], minlength=VOCABULARY) for x in (one, other)]
        ).double()
        often = counts.sum(0) >= 40
        bins = torch.cat([counts[:, often], counts[:, ~often].sum(1, keepdim=True)], 1)
        bins = bins[:, bins.sum(0) > 0]
        expected = bins.sum(0) * bins.sum(1, keepdim=True) / bins.sum()
        statistic, freedom = ((bins - expected) ** 2 / expected).sum(), bins.shape[1] - 1
        found.append(
            torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2).item()
        )
    return min(found) * len(found)


def test_drafted_bfloat16_samples_have_the_distribution_of_undrafted_ones(tmp_path, monkeypatch):
    """Chi-square tests of homogeneity, one a place, at level 0.001 in all, 16,384 completions each.

    Power: samplers that write the drafted token in place of 3 % of the tokens are found out, each
    of 50.
    """
    policy = policy_of(tmp_path, "llama-3 rotary scaling", dtype="bfloat16", stops=())
    prompt, places = policy.encode(PROMPTS[0]), 8
    plan = generate(
        policy, RolloutRequest([prompt], keys=[[0]], temperature=0.0, budgets=[places])
    )[0][0].tokens

    class Planned(DraftPlans):
        def _plan(self, rows, tokens, written, k):
            for row, n in zip(rows.tolist(), written.tolist()):
                self._set([row], n, plan[n:], True)

    monkeypatch.setattr(fast_decoder, "DraftPlans", Planned)

    def sample(seed, length):
        rng, drafting = random.Random(seed), Drafting(length)
        answers = [
            answer
            for _ in range(16)
            for answer in generate(
                policy,
                RolloutRequest(
                    [prompt],
                    keys=[[rng.getrandbits(62) for _ in range(1024)]],
                    temperature=0.3,
                    budgets=[places],
                    guesses=[str],
                    drafting=drafting,
                ),
            )[0]
        ]
        return torch.tensor([answer.tokens for answer in answers]), drafting

    (plain, _), (drafted, drafting), (third, _) = sample(1, 0), sample(2, 7), sample(3, 0)
    assert 0.05 < drafting.acceptance < 0.95
    assert least_p(plain, drafted) > 0.001
    torch.manual_seed(0)
    for _ in range(50):
        assert (
            least_p(plain, torch.where(torch.rand(third.shape) < 0.03, torch.tensor(plan), third))
            < 0.001
        )

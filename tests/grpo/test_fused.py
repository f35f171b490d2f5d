"""The fused decoder against the eager one: the same tokens in float32, the same distribution in bfloat16. On a GPU only."""
import pytest
import torch
from families import FAMILIES, PROMPTS, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.policy import BUILTIN, load_policy
from grpo.rollout.drafting import Drafting
from grpo.rollout.fused import disagreement
from grpo.rollout.sampling import truncation

pytestmark = pytest.mark.gpu
FUSED = ("llama-3 rotary scaling", "qwen2", "qwen3", "mistral")


def write_model(folder, family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    for name, parameter in model.named_parameters():  # which are 0 and 1 in a new model, and would hide mistakes
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)


def policy_of(folder, family, lora=0, dtype="float32"):
    write_model(folder, family)
    policy = load_policy(str(folder), device="cuda", dtype=dtype, lora_rank=lora)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:  # 0 in a new adapter
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    policy.stops = tuple(range(0, 2048, 40))
    assert policy.fused is not None
    return policy


def eagerly(policy):
    policy.__dict__["fused"] = None
    return policy


@pytest.mark.parametrize("truncate", [None, truncation(top_k=5), truncation(top_k=4, top_p=0.8)], ids=["all", "top-k", "top-p"])
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FUSED)
def test_fused_samples_what_eager_samples(tmp_path, family, lora, truncate):
    policy = policy_of(tmp_path, family, lora)
    for temperature in (0.3, 0.15, 0.0):  # cold: see test_drafting
        policy.fused  # noqa: B018
        found = rollout(policy, samples=8, temperature=temperature, truncate=truncate)[1]
        kept, policy = policy.fused, eagerly(policy)
        expected = rollout(policy, samples=8, temperature=temperature, truncate=truncate)[1]
        policy.__dict__["fused"] = kept
        assert [[a.tokens for a in group] for group in found] == [[a.tokens for a in group] for group in expected]
        for ours, theirs in zip((a for group in found for a in group), (a for group in expected for a in group)):
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", ["1", "7", "31"])
def test_fused_drafts_change_no_sample(tmp_path, length):
    policy = policy_of(tmp_path, "qwen3", 4)
    policy.stops = (3,)
    _, plain = rollout(policy, samples=8)
    texts = [group[0].text for group in plain]
    guesses = [lambda text, whole=whole: whole[len(text):] if whole.startswith(text) else whole for whole in texts]
    drafting = Drafting(length)
    _, drafted = rollout(policy, samples=8, guesses=guesses, drafting=drafting)
    assert [[a.tokens for a in group] for group in plain] == [[a.tokens for a in group] for group in drafted]
    assert drafting.matched > 0


def test_fused_sees_what_the_optimizer_changes(tmp_path):
    for lora in (0, 4):
        policy = policy_of(tmp_path, "qwen2", lora)
        assert disagreement(policy.fused) < 1e-4
        for parameter in policy.parameters:
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert disagreement(policy.fused) < 1e-4


def test_fused_models_are_saved_whole(tmp_path):
    policy = policy_of(tmp_path, "llama-3 rotary scaling")
    before = rollout(policy)[1]
    policy.save(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved"), device="cuda")
    again.stops = policy.stops
    assert [[a.tokens for a in group] for group in rollout(again)[1]] == [[a.tokens for a in group] for group in before]


def test_fused_bfloat16_samples_from_the_models_distribution(tmp_path):
    policy = policy_of(tmp_path, "llama-3 rotary scaling", dtype="bfloat16")
    prompts, groups = rollout(policy, samples=64)
    precise = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).cuda()
    differences = []
    for prompt, group in zip(prompts, groups):
        for answer in group:
            logits = precise(input_ids=torch.tensor([[*prompt, *answer.tokens]]).cuda()).logits[0, len(prompt) - 1:-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens).cuda()[:, None])[:, 0]
            differences.append(torch.tensor(answer.logprobs) - expected.detach().cpu())
    assert len(PROMPTS) * 64 == len(differences)
    assert torch.cat(differences).abs().mean() < 0.05

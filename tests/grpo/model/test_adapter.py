"""A LoRA adapter made elsewhere is one policy for every program: its base with it merged."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from small_runs import FEW
from small_train import fails
from tiny_models import hidden_states
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import export, load_model
from grpo.data.errors import UserError
from grpo.model.load import load_policy, read_tokenizer
from grpo.tools import evaluation, train

SMALL = [*FEW, *"--words 2 --steps 1 --reward similarity".split()]
SMALL += "--config {'eval_problems':2,'on_degenerate':'keep'}".split()


def model_with(base, tokens):
    """Return the model `base` with so many more tokens."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens:
        model.resize_token_embeddings(model.config.vocab_size + tokens, mean_resizing=False)
    return model


def make_adapter(base, folder, tokens=0, **kind):
    """Write a folder as PEFT does: an adapter on some layers, without a tokenizer."""
    kind = {"target_modules": ["q_proj"]} | kind
    settings = LoraConfig(r=3, lora_alpha=12, task_type="CAUSAL_LM", **kind)
    adapted = get_peft_model(model_with(base, tokens), settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapter"))


def logits(policy):
    with torch.no_grad():
        return policy.logits(hidden_states(policy))


@pytest.fixture(scope="module")
def wanted(tiny_model, adapter):
    return peft_logits(tiny_model, adapter)


def peft_logits(model, adapter, tokens=0):
    """The logits by PEFT alone, without merging."""
    base = model_with(model, tokens)
    tokens = torch.tensor([[40, 41, 42, 50, 51, 52]])
    with torch.no_grad():
        plain = base(tokens).logits[0, 2:5]
        found = PeftModel.from_pretrained(base, adapter)(tokens).logits[0, 2:5]
    assert not torch.allclose(plain, found, atol=0.1)  # the adapter matters
    return found


def test_its_base_with_it_merged_is_the_policy_of_every_program(
    adapter, wanted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name = str(adapter)
    policy = load_policy(name, device="cpu", lora_rank=None, keep_reference=True)
    assert policy.lora_rank == 0  # for models as small as its base
    (note,) = policy.notes
    assert note.startswith(f"--model {name}: an adapter; it is merged into its base model, ")
    loaded = load_model(name, device="cpu")._policy
    assert export.main([name, "out"]) == 0
    assert "adapter merged" in capsys.readouterr().out
    for each in (policy, loaded, load_policy("out", device="cpu")):
        torch.testing.assert_close(logits(each), wanted, atol=1e-4, rtol=1e-4)
    with policy.reference() as reference:
        torch.testing.assert_close(logits(reference), wanted, atol=1e-4, rtol=1e-4)

    evaluate = ["--words", "2", "--problems", "2", "--json"]
    assert evaluation.main(["--model", name, *evaluate, "a.json"]) == 0
    assert capsys.readouterr().err.strip() == f"eval.py: warning: {note}"
    assert evaluation.main(["--model", "out", *evaluate, "b.json"]) == 0
    ours, theirs = (json.loads((tmp_path / file).read_text()) for file in ("a.json", "b.json"))
    assert ours[0]["mean"] == theirs[0]["mean"]


KINDS = [
    {"use_dora": True},
    {"use_rslora": True},
    {"tokens": 3},
    {"tokens": 3, "modules_to_save": ["embed_tokens"]},
]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_are_not_trained_here_are_merged_too(tiny_model, tmp_path, kind):
    make_adapter(tiny_model, tmp_path, **kind)
    policy = load_policy(str(tmp_path), device="cpu", lora_rank=2)
    wanted = peft_logits(tiny_model, tmp_path, kind.get("tokens", 0))
    torch.testing.assert_close(logits(policy), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", ["2", pytest.param("0", marks=pytest.mark.slow)])
def test_a_run_starts_from_it_is_resumed_and_exported(adapter, wanted, tmp_path, monkeypatch, rank):
    monkeypatch.chdir(tmp_path)
    rate = ["--learning-rate", "1e-30"]
    flags = [*SMALL, "--model", str(adapter), "--lora-rank", rank, "--name", "run", *rate]
    assert train.main(flags) in (0, 3)
    assert "merged into its base model" in (tmp_path / "runs/run/warnings.log").read_text()
    assert train.main(["--resume", "runs/run", "--steps", "2"]) in (0, 3)
    assert export.main(["runs/run", "out"]) == 0
    for name in ("runs/run", "out"):
        found = load_model(name, device="cpu")._policy
        torch.testing.assert_close(logits(found), wanted, atol=1e-4, rtol=1e-4)


def test_its_own_tokenizer_comes_before_its_bases(adapter, tiny_model, tmp_path):
    assert (
        read_tokenizer(str(adapter))[0].chat_template
        == read_tokenizer(str(tiny_model))[0].chat_template
    )
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    own = AutoTokenizer.from_pretrained(tiny_model)
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(folder)
    assert read_tokenizer(str(folder))[0].chat_template == own.chat_template


def change(folder, **values):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_what_cannot_be_merged_is_one_line(adapter, tiny_model, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "config.json").write_text("{}")
    for base, said in [
        (str(folder), "adapter_config.json: names no base model"),
        (None, "adapter_config.json: names no base model"),
        ("/no/such", "--model /no/such: no such directory"),
        (str(tmp_path), f"--model {folder}: its base model {tmp_path}: cannot be loaded"),
    ]:
        change(folder, base_model_name_or_path=base)
        with pytest.raises(UserError, match=said):
            load_policy(str(folder), device="cpu")

    make_adapter(tiny_model, tmp_path / "head", target_modules=["embed_tokens"])
    with pytest.raises(UserError, match="which are one in LlamaForCausalLM"):
        load_policy(str(tmp_path / "head"), device="cpu")

    settings = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    get_peft_model(base, settings).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="does not fit"):
        load_policy(str(tmp_path / "other"), device="cpu")

    line = fails(capsys, adapter, tmp_path / "out", "--adapter", main=export.main)
    assert "is an adapter already" in line


def test_fewer_bits_under_it_are_refused(adapter, monkeypatch):
    monkeypatch.setattr("grpo.model.load._device", lambda _: "cuda:0")
    with pytest.raises(UserError, match="--config: quantise nf4: needs a GPU, and a whole"):
        load_policy(str(adapter), lora_rank=2, quantise="nf4")


def test_an_adapter_of_the_hub_is_to_be_fetched(tiny_model, adapter, monkeypatch):
    """`transformers` would put its layers into the base, and only some programs would see them."""
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        "grpo.model.load.AutoModelForCausalLM.from_pretrained", lambda _, **o: load(adapter, **o)
    )
    with pytest.raises(
        UserError, match="^--model me/lora: is an adapter on the hub; fetch it with hf"
    ):
        load_policy("me/lora", device="cpu")

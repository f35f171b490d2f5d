"""A model in a GGUF file is an ordinary model once it is loaded, and ends its answers as its chat
template does.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models import hidden_states
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from grpo import export
from grpo.data.errors import UserError
from grpo.model.load import load_policy, read_tokenizer, resolve
from grpo.model.prompts import text_of
from grpo.tools import evaluation, train

gguf_files = pytest.importorskip("gguf_files", reason="gguf is not installed")

SMALL = (
    "--words 2 --prompts 2 --group-size 4 --steps 1 --config {'eval_problems':2} --device cpu "
    "--learning-rate 0.01 "
    "--reward similarity --config {'on_degenerate':'keep'}"
).split()


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model as a file with the embedded model's chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    template = (tiny_model / "chat_template.jinja").read_text()
    return str(gguf_files.write_gguf(tiny_model, path, eos=3, template=template))


def test_it_is_the_model_that_was_written(tiny_model, tmp_path, model):
    wanted = hidden_states(load_policy(str(tiny_model), device="cpu"))
    exact = tmp_path / "exact.gguf"
    gguf_files.write_gguf(tiny_model, exact, precision=gguf_files.GGMLQuantizationType.F32)
    found = load_policy(str(exact), device="cpu")
    torch.testing.assert_close(hidden_states(found), wanted, atol=1e-5, rtol=1e-5)
    assert found.path == "fast" and found.context == 1024

    rough = load_policy(model, device="cpu")
    difference = (hidden_states(rough) - wanted).norm() / wanted.norm()
    assert 1e-4 < difference < 0.1  # eight bits


@pytest.mark.parametrize("has_template", [False, True])
def test_the_file_says_which_token_ends_an_answer(tiny_model, model, tmp_path, has_template):
    """The reader takes <|user|> for it."""
    plain = gguf_files.write_gguf(tiny_model, tmp_path / "plain.gguf", eos=3, eot=5)
    policy = load_policy(model if has_template else str(plain), device="cpu", lora_rank=None)
    assert policy.stops == ((3,) if has_template else (3, 5))
    assert policy.end == 3 and policy.notes == []
    assert policy.lora_rank == 0


@pytest.mark.parametrize("rank", [2, 0])
def test_what_is_saved_is_loaded_again(model, tmp_path, rank):
    policy = load_policy(model, device="cpu", lora_rank=rank)
    with torch.no_grad():
        for weight in policy.parameters:
            weight.add_(0.01)
    policy.save(tmp_path)
    again = load_policy(model, device="cpu", weights=tmp_path)
    assert torch.equal(hidden_states(again), hidden_states(policy)) and again.stops == policy.stops
    if rank:
        saved = json.loads((tmp_path / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == model
    else:
        saved = json.loads((tmp_path / "config.json").read_text())
        assert "quantization_config" not in saved and "_model_name_or_path" not in saved


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["2", "0"])
def test_a_run_is_resumed_evaluated_and_exported(model, tmp_path, monkeypatch, rank):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SMALL, "--model", model, "--lora-rank", rank, "--name", "run"]) == 0
    assert train.main(["--resume", "runs/run", "--steps", "2"]) == 0
    assert evaluation.main(["--model", "runs/run", "--problems", "2"]) == 0
    assert export.main(["runs/run", "out"]) == 0

    policy = load_policy(model, device="cpu", weights=Path("runs/run/checkpoints/step-000002"))
    exported = load_policy("out", device="cpu")
    torch.testing.assert_close(hidden_states(exported), hidden_states(policy), atol=1e-4, rtol=1e-4)
    assert exported.tokenizer.eos_token == "<|end|>" and exported.end == 3
    assert AutoTokenizer.from_pretrained("out").eos_token == "<|end|>"
    assert "base_model: tiny.gguf" not in Path("out/README.md").read_text()
    if rank == "2":  # by `peft` alone
        base = AutoModelForCausalLM.from_pretrained(
            Path(model).parent,
            gguf_file=Path(model).name,
            quantization_config=GgufConfig(dequantize=True),
        )
        assert PeftModel.from_pretrained(base, "runs/run/checkpoints/step-000002")


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: path.unlink(), "no such file; give builtin, a directory"),
        (lambda path: path.write_bytes(b""), "cannot be loaded"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be loaded"),
        (
            lambda path: path.write_bytes(
                path.read_bytes().replace("Ġt".encode(), "Ġ?".encode(), 1)
            ),
            "cannot be loaded .*out of vocabulary",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(model, tmp_path, damage, said):
    path = tmp_path / "bad.gguf"
    path.write_bytes(Path(model).read_bytes())
    damage(path)
    with pytest.raises(UserError, match=f"--model {path}: .*{said}") as error:
        load_policy(str(path), device="cpu")
    assert "\n" not in str(error.value)


def test_what_is_missing_is_named(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match=r"extra|\[gguf\]"):
        resolve(model)


def test_a_vocabulary_that_would_be_read_as_another_is_refused(tmp_path):
    """`transformers` reads Gemma's as a unigram model, which prefers " a" + "bc" to " abc"."""
    with pytest.raises(
        UserError, match="vocabulary .*llama.* is not byte-level; give the directory"
    ):
        read_tokenizer(str(gguf_files.write_gemma_vocabulary(tmp_path / "gemma.gguf")))[0]


@pytest.mark.parametrize(
    "pre, numbers",
    [
        ("gpt-2", ["1234", "Ġ", "Ġ", "1"]),
        ("smollm", ["1", "2", "3", "4", "ĠĠ", "1"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "Ġ", "1"]),
        ("llama-bpe", ["123", "4", "Ġ", "Ġ", "1"]),
    ],
)
def test_a_byte_level_vocabulary_is_read_as_its_directory_is(tmp_path, pre, numbers):
    """`transformers` splits all of them as GPT-2 does, and drops the first blank of a text."""
    path = gguf_files.write_byte_level_vocabulary(tmp_path / "bytes.gguf", pre, add_bos_token=False)
    tokenizer, _ = read_tokenizer(str(path))

    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert pieces("1234  1") == numbers
    assert pieces(" ab<think>") == ["Ġa", "b", "<think>"]
    assert pieces("xyz") == (["xyz"] if pre == "llama-bpe" else ["x", "y", "z"])
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in (" ab", "  ab 1234 .", "ab\n a"):
        ids = tokenizer(text).input_ids
        assert text_of(tokenizer, ids) == text_of(again, ids) == text
        assert again(text).input_ids == ids


@pytest.mark.parametrize(
    "pre, fields, pieces",
    [
        ("gpt-2", {"add_bos_token": True}, ["<s>", "a"]),
        ("gpt-2", {"add_bos_token": False}, ["a"]),
        ("gpt-2", {}, ["a"]),
        ("gpt-2", {"add_eos_token": True, "add_space_prefix": False}, ["a", "</s>"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("llama-bpe", {}, ["<s>", "a"]),  # as llama.cpp does
    ],
)
def test_the_file_says_which_tokens_are_around_a_text(tmp_path, pre, fields, pieces):
    path = gguf_files.write_byte_level_vocabulary(tmp_path / "bytes.gguf", pre, **fields)
    tokenizer, _ = read_tokenizer(str(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids) == pieces


@pytest.mark.parametrize("name", ["add_space_prefix", "remove_extra_whitespaces"])
def test_a_file_that_changes_texts_is_refused(tmp_path, name):
    path = gguf_files.write_byte_level_vocabulary(tmp_path / "bytes.gguf", "gpt-2", **{name: True})
    with pytest.raises(UserError, match=f"changes texts \\({name}\\), .* give the directory in"):
        read_tokenizer(str(path))


def test_an_unknown_way_of_splitting_words_is_said(tmp_path):
    path = str(gguf_files.write_byte_level_vocabulary(tmp_path / "bytes.gguf", "tekken"))
    _, (note,) = read_tokenizer(path)
    assert "how it splits texts into words ('tekken') is not known here" in note

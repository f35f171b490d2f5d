"""An exported policy is read by transformers, peft and vLLM alone, and answers as the checkpoint
does.
"""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from small_runs import FEW
from small_train import fails
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import export
from grpo.config import load_config
from grpo.export import card
from grpo.run.logs import load_run
from grpo.tools import train

FLAGS = [*FEW, *"--words 10 --steps 2 --config {'eval_problems':2}".split()]
LORA = "--lora-rank 4 --learning-rate 0.01".split()
TEXT = "Copy text A.\nA: the owl saw"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, quick_flags):
    """A run of the tiny model in full, and one by LoRA, at a rate that moves it."""
    home = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name, more in (("full", ()), ("lora", LORA)):
            assert train.main([*FLAGS, *quick_flags, *more, "--name", name]) == 0
    return home / "runs"


def logits(model, tokenizer):
    with torch.no_grad():
        return model(tokenizer(TEXT, return_tensors="pt").input_ids).logits


def test_a_full_model(runs, tmp_path, tiny_model, capsys):
    assert export.main([str(runs / "full"), str(tmp_path / "out")]) == 0
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    saved = AutoModelForCausalLM.from_pretrained(runs / "full" / "checkpoints" / "step-000002")
    assert torch.equal(logits(model, tokenizer), logits(saved, tokenizer))
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(logits(model, tokenizer), logits(base, tokenizer))
    assert "model of step 2" in capsys.readouterr().out


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing(runs, tmp_path, capsys, monkeypatch, exists):
    """Half a model would be refused as a folder that is not empty, or loaded."""

    def full(model, folder):
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_model", full)
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    line = fails(capsys, runs / "full", folder, main=export.main)
    assert line.startswith(f"grpo.export: {folder}: cannot be written (Error while serializing")
    assert list(tmp_path.iterdir()) == [folder] * exists and not any(tmp_path.rglob("*.json"))


def test_an_empty_folder_is_filled_also_from_within(runs, tmp_path, monkeypatch):
    """A shell that stands in it would stand in a removed folder if another took its place."""
    monkeypatch.chdir(tmp_path)
    assert export.main([str(runs / "full"), "."]) == 0
    assert Path("model.safetensors").is_file() and not [*Path().glob(".export-*")]


def test_an_adapter_is_merged_or_written_by_itself(runs, tmp_path, tiny_model):
    assert (
        export.main([str(runs / "lora" / "checkpoints" / "step-000002"), str(tmp_path / "merged")])
        == 0
    )
    assert export.main([str(runs / "lora"), str(tmp_path / "adapter"), "--adapter"]) == 0
    base = lambda: AutoModelForCausalLM.from_pretrained(tiny_model)  # noqa: E731
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    before = logits(base(), tokenizer)
    wanted = logits(
        PeftModel.from_pretrained(base(), runs / "lora" / "checkpoints" / "step-000002"), tokenizer
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, tokenizer), wanted, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert torch.equal(
        logits(PeftModel.from_pretrained(base(), tmp_path / "adapter"), tokenizer), wanted
    )
    assert (wanted - before).abs().max() > 1e-3  # the adapter does something


def test_a_run_on_four_bits_is_exported_on_a_machine_without_a_gpu(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "lora", run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("quantise: none", "quantise: nf4"))
    assert load_config(run).quantise == "nf4"
    assert export.main([str(run), str(tmp_path / "merged")]) == 0


def test_the_card_has_the_runs_figures(runs, tmp_path, tiny_model):
    assert export.main([str(runs / "lora"), str(tmp_path / "out"), "--adapter"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    first, last = load_run(runs / "lora").reports
    before, after = (
        f"{line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"
        for line in (first, last)
    )
    assert f"\n- before training, held-out score at level 10: {before} (n = " in text
    assert f"\n- after training, held-out score at level 10: {after} (n = " in text
    assert text.startswith("---\nlibrary_name: peft\n")
    assert f"`{tiny_model.name}` trained by GRPO for 2 steps" in text
    assert str(tiny_model.parent) not in text
    assert "lora_rank 4" in text


def test_the_card_has_the_verdict(runs):
    run = load_run(runs / "lora")
    run.config["reward"] = "similarity"
    text = card(run, 2, adapter=True)
    assert "\nTOO SHORT TO TELL: held-out score at level 10 " in text
    assert "steps that updated the weights: " in text and "reward similarity, loss" in text


def test_the_card_of_an_earlier_checkpoint_has_no_later_figures(runs):
    text = card(load_run(runs / "lora"), 1, adapter=True)
    assert "- before training" in text
    assert "- after training" not in text and "TOO SHORT" not in text


def test_the_card_names_no_folder_of_this_machine(runs):
    run = load_run(runs / "lora")
    run.config["loss"] = "/home/me/own.py:loss"
    for task, shown in (("/home/me/own.py:Own", "own.py:Own"), ("gsm8k:/home/me/gsm", "gsm8k:gsm")):
        run.config["task"] = task
        text = card(run, 2, adapter=True)
        assert f"`{shown}`" in text and "loss own.py:loss" in text and "/home/me" not in text


def test_what_cannot_be_exported_is_said(runs, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for argv, words in [
        ((runs / "full", tmp_path / "full"), "exists already"),
        ((runs / "full", tmp_path / "a", "--adapter"), "has no adapter"),
        ((tmp_path / "none", tmp_path / "a"), f"grpo.export: {tmp_path / 'none'}: not a run"),
        ((runs / "full",), "the following arguments are required: folder"),
    ]:
        assert words in fails(capsys, *argv, main=export.main)
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "full" / "mine").exists()

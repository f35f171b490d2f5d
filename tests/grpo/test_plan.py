"""The forecast: figures measured once on an H200, what must follow from what, and mistakes in one
line.
"""

import json
from dataclasses import replace

import pytest
import torch
from bench_model import SHAPES
from make_llama import CONFIG
from transformers import AutoTokenizer, GPT2Config

from grpo.model.load import BUILTIN
from grpo.tools import measure, plan
from grpo.tools.estimate import GPUS, LINK, Gpu, Work, forecast
from grpo.tools.measure import copy_rate, measure_gpu, product_rate
from tasks.base import UserError

H200 = GPUS["H200"]
# A GPU of 24 GB, by its data sheet (an RTX 4090).
SMALL = Gpu(25.3e9, 0.91e12, 149e12, 20e9)

SAVING = "--lora-rank 16 --gradient-checkpointing"

# Model, flags, GPUs, GB of each, (prompts, prompt, group, tokens, room), seconds of a step, GB:
# bench_step.py on H200s, 2026-11-23 to 2026-11-26, see docs/large-models.md.
MEASURED = [
    ("135m", "--lora-rank 64", 1, 150, (16, 105, 16, 128, 128), 0.48, 17.8),
    ("135m", "--lora-rank 64", 2, 150, (32, 105, 16, 128, 128), 0.55, 17.8),
    ("3b", "--lora-rank 16", 1, 150, (4, 105, 16, 128, 128), 0.67, 26.9),
    ("3b", "--lora-rank 16", 2, 150, (8, 106, 16, 128, 128), 0.69, 27.0),
    ("3b", "--lora-rank 16", 1, 24, (4, 105, 16, 128, 128), 0.94, 13.3),
    ("3b", "--lora-rank 16", 1, 150, (16, 105, 16, 128, 128), 1.72, 35.8),
    ("3b", "--lora-rank 16 --beta 0.04", 1, 150, (1, 796, 16, 1024, 1024), 3.60, 28.4),
    ("3b", "--lora-rank 16", 1, 150, (1, 1995, 16, 1400, 1400), 5.32, 32.6),
    ("3b", "--lora-rank 16", 2, 150, (2, 2015, 16, 1400, 1400), 5.37, 32.6),
    ("3b", "--lora-rank 0", 1, 80, (4, 107, 16, 128, 128), 0.87, 65.3),
    ("3b", "--lora-rank 0", 1, 80, (1, 1995, 16, 1400, 1400), 6.57, 70.0),
    ("3b", "--lora-rank 0 --shard", 2, 80, (8, 104, 16, 128, 128), 0.81, 50.5),
    ("8b", SAVING, 1, 24, (1, 2013, 16, 2048, 2048), 18.08, 22.9),
    ("8b", SAVING, 1, 80, (1, 14094, 16, 2048, 2048), 28.10, 35.4),
]


def folder_of(folder, **shape):
    """Write a Llama's directory without its weights, which are not needed, and with a smaller
    tokenizer; return its name.
    """
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fixed | shape))
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of Llama-3.2-3B."""
    return folder_of(tmp_path_factory.mktemp("llama"), num_hidden_layers=28, **CONFIG)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directories of the models that were measured, by the names of their shapes."""
    return {
        name: folder_of(tmp_path_factory.mktemp(name), **SHAPES[name])
        for name in {row[0] for row in MEASURED}
    }


def foretold(llama, flags, gpus, work, gpu=H200):
    config, _ = plan.parse(["--model", llama, *flags.split()])
    return forecast(config, plan.model_of(config), Work(*work), gpu, gpus)


@pytest.mark.parametrize("size, flags, gpus, memory, work, seconds, gigabytes", MEASURED)
def test_what_was_measured_is_foretold_within_15_percent(
    models, size, flags, gpus, memory, work, seconds, gigabytes
):
    gpu = replace(H200, memory=memory * 1e9)
    taken, time = foretold(models[size], flags, gpus, work, gpu)
    assert sum(time.values()) == pytest.approx(seconds, rel=0.15)
    assert sum(taken.values()) / 1e9 == pytest.approx(gigabytes, rel=0.15)


def test_the_model_is_counted_without_its_weights(llama):
    config, _ = plan.parse(["--model", llama])
    model = plan.model_of(config)
    assert (model.size, model.trained, model.context) == (3_212_749_824, 97_255_424, 131_072)
    assert model.head == 128_256 * 3072


def test_precision_is_that_in_which_the_model_would_be_loaded(llama):
    for flags, number in (
        ("--lora-rank 0", 2),
        ("--lora-rank 0 --dtype float32", 4),
        ("--lora-rank 16", 2),
    ):
        config, _ = plan.parse(["--model", llama, *flags.split()])
        assert plan.model_of(config).shape.number == number
    config, _ = plan.parse([])  # the embedded model
    assert plan.model_of(config).shape.number == 4


def test_a_model_of_another_family_is_refused(tmp_path):
    GPT2Config(n_layer=1, n_embd=8, n_head=2).save_pretrained(tmp_path)
    config, _ = plan.parse(["--model", str(tmp_path)])
    with pytest.raises(UserError, match="there is no estimate for gpt2, only for llama"):
        plan.model_of(config)


def test_more_work_takes_longer_and_more_gpus_less(llama):
    work = (8, 500, 16, 500, 600)
    memory, time = foretold(llama, "--lora-rank 0", 1, work)
    shared, faster = foretold(llama, "--lora-rank 0 --shard", 4, work)
    assert (
        sum(faster.values()) < 0.5 * sum(time.values())
        and faster["communication"] > 0 == time["communication"]
    )
    assert shared["optimizer"] == pytest.approx(memory["optimizer"] / 4, rel=1e-6)
    longer = foretold(llama, "--lora-rank 0", 1, (8, 500, 16, 1000, 1200))[1]
    assert longer["decoding"] > 2 * time["decoding"] and longer["update"] > 2 * time["update"]
    referred, slower = foretold(llama, "--lora-rank 0 --beta 0.1", 1, work)
    assert slower["update"] > 1.2 * time["update"] and referred["weights"] == 2 * memory["weights"]
    eight = foretold(llama, "--lora-rank 0 --optimizer adamw8bit", 1, work)[0]
    assert memory["optimizer"] - eight["optimizer"] == 6 * 3_212_749_824
    small = foretold(llama, "--lora-rank 16", 1, work, SMALL)
    assert sum(small[0].values()) < 25e9 and sum(small[1].values()) > 3 * sum(
        foretold(llama, "--lora-rank 16", 1, work)[1].values()
    )


@pytest.fixture
def small_gpu(monkeypatch):
    """The command measures a GPU of 24 GB."""
    monkeypatch.setattr(plan, "measure_gpu", lambda: SMALL)
    monkeypatch.setattr(plan.torch.cuda, "get_device_name", lambda: "RTX")


def test_the_command(llama, small_gpu, capsys):
    assert plan.start(["--model", llama, "--words", "25", "--gpus", "2xH100", "--steps", "30"]) == 0
    said = capsys.readouterr().out
    assert (
        "3,213 M parameters, LoRA rank 64, 97.3 M trained; interleave, level 25" in said
        and "on 2xH100" in said
        and "30 steps" in said
    )
    assert plan.start(["--model", llama, "--words", "25", "--gpus", "3", "--lora-rank", "0"]) == 1
    said = capsys.readouterr().out
    assert "on 3xRTX (0.91 TB/s, 149 TFLOP/s measured)" in said
    assert "of 25 GB on each GPU" in said
    assert "does not fit: give --optimizer adamw8bit" in said


def test_what_would_make_a_lora_run_fit(llama, small_gpu, monkeypatch, capsys):
    monkeypatch.setattr(plan, "measure_gpu", lambda: replace(SMALL, memory=16e9))
    flags = ["--model", llama, "--words", "1000", "--gpus", "1", "--lora-rank", "16"]
    assert plan.start(flags) == 1
    said = capsys.readouterr().out
    assert "does not fit: give --gradient-checkpointing, a smaller --group-size, or" in said

    flags.append("--gradient-checkpointing")
    assert plan.start(flags) == 0
    assert plan.start([*flags, "--group-size", "64"]) == 1
    assert "does not fit: give a smaller --group-size, or a lower" in capsys.readouterr().out


def test_keys_and_values_are_freed_before_a_run_does_not_fit(llama, small_gpu, monkeypatch, capsys):
    """With less and less memory: all fits, then one part after the other, then nothing."""
    flags = ["--model", llama, "--words", "1000", "--gpus", "1", "--lora-rank", "16"]
    flags += ["--gradient-checkpointing", "--prompts", "1"]
    outcomes = []
    for gigabytes in range(24, 6, -3):
        gpu = replace(SMALL, memory=gigabytes * 1e9)
        monkeypatch.setattr(plan, "measure_gpu", lambda gpu=gpu: gpu)
        status = plan.start(flags)
        said = capsys.readouterr().out
        freed = "because keys and values are freed before each update" in said
        outcomes.append((status, freed))
        assert ("does not fit" in said) == bool(status)
    assert outcomes == sorted(outcomes) and set(outcomes) == {(0, False), (0, True), (1, False)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "H200"], "--gpus H200: give a number of GPUs like the one here, or a number"),
        (["--gpus", "0xH200"], "--gpus 0xH200: give a number"),
        (["--gpus", "0"], "--gpus 0: give a number"),
        (["--completion-tokens", "0"], "--completion-tokens 0: give 1 or more"),
        (["--gpus", "2xTPU"], "one of H200"),
        (
            ["--model", "builtin", "--words", "900", "--no-ramp"],
            "its context of 4096 tokens is too short",
        ),
        (["--model", "/nowhere"], "/nowhere"),
        (["--words", "many"], "--words"),
        (["--nonsense"], "--nonsense: no such flag"),
        (["--quantise", "nf4", "--lora-rank", "4"], "there is no estimate for it"),
        (["--dataset", "set.jsonl"], "--dataset set.jsonl: give --words too"),
    ],
)
def test_a_mistake_is_one_line(flags, said, capsys):
    assert plan.main(flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_examples_and_a_system_turn_are_counted(llama):
    def prompt_of(*flags):
        config, _ = plan.parse(["--model", llama, "--words", "10", *flags])
        return plan.work_of(config, plan.model_of(config)).prompt

    alone = prompt_of()
    assert prompt_of("--shots", "3") > 4 * alone
    assert prompt_of("--system", "word " * 50) > alone + 50
    with pytest.raises(UserError, match="--chat-template-kwargs: a: .* has no such variable"):
        prompt_of("--chat-template-kwargs", '{"a": 1}')


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan.main(["--gpus", "2"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "there is no GPU here to measure; name a kind, e.g. --gpus 1xH200" in line

    assert plan.main(["--words", "10"]) == 0
    assert "on 1xH200" in capsys.readouterr().out


def test_rates_are_work_by_time(monkeypatch):
    done = []

    def two_seconds(work):
        done.append(work())
        return 2.0

    monkeypatch.setattr(measure, "least_time", two_seconds)
    assert copy_rate("cpu", size=1000) == 1000  # bytes read and written, by seconds
    assert product_rate("cpu", torch.float32, side=10) == 1000
    assert [tuple(result.shape) for result in done] == [(1000,), (10, 10)]


def test_the_shortest_time_counts_but_not_the_first(monkeypatch):
    clock = iter([0, 1, 10, 15, 20, 23] + [30, 40] * measure.REPEATS)
    monkeypatch.setattr(measure, "_now", lambda: next(clock))
    assert measure.least_time(lambda: None) == 3


@pytest.mark.gpu
def test_a_gpu_is_measured(llama, capsys):
    gpu = measure_gpu()
    assert gpu.memory == torch.cuda.get_device_properties(0).total_memory
    assert 1e11 < gpu.bandwidth < 2e13 and 1e13 < gpu.rate < 1e16
    assert (gpu.link == LINK) == (torch.cuda.device_count() == 1)

    assert plan.start(["--model", llama, "--words", "25"]) == 0
    assert f"on 1x{torch.cuda.get_device_name()} (" in capsys.readouterr().out

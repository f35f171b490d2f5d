"""Settings: their defaults and limits, from a file and from the command line."""

import dataclasses
from types import SimpleNamespace

import pytest
from refusals import refused
from transformers import PretrainedConfig, TrainingArguments

from grpo.config import (
    ELSEWHERE,
    FOUND,
    ON_RESUME,
    SETTINGS,
    Config,
    checked,
    load_config,
    parse,
    resolve_config,
    spelled,
)
from grpo.data.errors import UserError
from grpo.model.load import BITS_OPTIONS
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.base import Problem
from grpo.tasks.interleave import Interleave
from grpo.trainer import resolve_for_model

FLAGS = {name: spec for name, spec in SETTINGS.items() if spec.metadata["kind"] != "setting"}


def test_few_settings_and_flags_and_each_is_explained():
    assert len(SETTINGS) <= 46 and len(FLAGS) + 1 <= 35  # and --config
    assert all(len(spec.metadata["help"]) > 5 for spec in SETTINGS.values())
    assert set(ON_RESUME) < SETTINGS.keys()
    assert set(SETTINGS["quantise"].metadata["choices"]) == {"none", *BITS_OPTIONS}


def test_every_setting_stands_in_the_documents_or_the_help(capsys):
    said = help_of("--help-all", capsys)
    for name, spec in SETTINGS.items():
        if name not in FLAGS:
            choices = "".join(f"{choice}, " for choice in spec.metadata.get("choices", ()))
            start = f"{choices[:-2]}: " if choices else ""
            assert f" {name} {start}{spec.metadata['help']}" in said
        else:
            assert f" {spelled(name)} " in said or f" {spelled(name)}, " in said
    assert not any(f"--{name}" in said for name in FOUND)
    assert "completions of each prompt (default: 16)" in said
    assert "of --task arithmetic: --family: chain or product" in said


def help_of(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_help_lists_the_basic_flags_alone(capsys):
    said = help_of("--help", capsys).split("examples:")[0]
    for name, spec in SETTINGS.items():
        assert (spelled(name) in said) == (spec.metadata["kind"] == "basic flag"), name


def test_only_a_task_that_climbs_begins_with_easier_levels():
    climbing, other = Interleave(), Arithmetic()
    assert parse(["--curriculum"])[0].levels_for(climbing) == [10, 25, 50, 100, 200, 500]
    assert Config(level=25).levels_for(climbing) == [10, 25]
    assert Config(level=25, dataset="set.jsonl").levels_for(climbing) == [25]
    assert Config(level=25, window=50).levels_for(climbing) == [25]
    assert Config(level=25, task="arithmetic").levels_for(other) == [25]


def test_clips_are_those_of_the_losses_paper_unless_given():
    assert Config(loss="dapo").clips == (0.2, 0.28) and Config(loss="grpo").clips == (0.2, 0.2)
    assert Config(loss="gspo", clip=[0.1, 0.5]).clips == (0.1, 0.5)


def test_configuration_survives_its_file(tmp_path):
    config = Config(level=40, reward="clipped", learning_rate=3e-5, clip=[0.1, 0.2])
    config.save(tmp_path / "config.yaml", torch="2.13")
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    "content, line",
    [
        ("level: 3\ncolour: red\n", "unknown key colour"),
        ("- 1\n", "not a mapping of names"),
        ("a: [", "not valid YAML"),
    ],
)
def test_what_is_no_configuration(tmp_path, content, line):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=line):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        dict(group_size=1),  # a group of one has no variance
        dict(top_p=0.0),
        dict(learning_rate=1.0),
        dict(temperature=0.0),
        dict(temperature=float("inf")),
        dict(loss="mse"),
        dict(device="tpu"),
        dict(name="a/b"),
        dict(track="wandb,mlflow"),
        dict(on_degenerate="resample"),
        dict(clip=[0.2, -1]),
        dict(chat_template_kwargs="enable_thinking=false"),
        dict(chat_template_kwargs="[1]"),
        dict(quantise="fp4"),
    ],
)
def test_bad_values_name_their_flag(bad):
    (name,) = bad
    assert refused(Config, **bad).startswith(f"{spelled(name)} {bad[name]}: give ")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (dict(demonstrate=True, top_p=0.9), "--config: demonstrate True: right answers are not"),
        (dict(demonstrate=True, control="constant-reward"), "--config: demonstrate True: right"),
        (dict(demonstrate=True, reward_alone=True), "--config: demonstrate True: right"),
        (dict(credit="alignment", loss="gspo"), "--credit alignment: gspo weighs whole sequences"),
        (dict(quantise="nf4", lora_rank=0), "--config: quantise nf4: give --lora-rank 16: q"),
    ],
)
def test_what_does_not_go_together_is_one_line(given, line):
    assert refused(Config, **given).startswith(line)


@pytest.mark.parametrize(
    "given, prompts, varied, schedule, steps",
    [
        (dict(curriculum="10,25"), 8, 4, "constant", 60),
        (dict(level=25, prompts=7), 7, 4, "constant", 60),
        (dict(level=25, model="some/where"), 32, 8, "cosine", 800),
        (dict(curriculum="10,25", model="some/where", prompts=6), 6, 2, "cosine", 800),
        (dict(level=25, control="constant-reward"), 8, 0, "constant", 60),
    ],
)
def test_what_is_left_to_defaults(given, prompts, varied, schedule, steps):
    config = resolve_for_model(
        resolve_config(Config(**given), Interleave()), Interleave(), policy_of_size(896)
    )
    assert config.level == 25
    assert (config.prompts, config.dynamic_sampling) == (prompts, varied)
    assert (config.schedule, config.steps) == (schedule, steps)


@pytest.mark.parametrize(
    "model, hidden_size, prompts, epochs",
    [("some/where", 576, 64, 2), ("some/where", 577, 32, 1), ("builtin", 192, 8, 1)],
)
def test_a_small_model_of_the_users_learns_more_from_a_step(model, hidden_size, prompts, epochs):
    config = resolve_for_model(
        Config(model=model, level=10), Interleave(), policy_of_size(hidden_size)
    )
    assert (config.prompts, config.epochs) == (prompts, epochs)


@pytest.mark.parametrize(
    "task, is_lora, rate",
    [
        (Interleave(), True, 1e-3),
        (Interleave(), False, 2e-4),
        (Arithmetic(), True, 1e-3 / 3),
        (Arithmetic(), False, 2e-4),
    ],
)
def test_lora_learns_arithmetic_at_a_third_of_the_rate(task, is_lora, rate):
    policy = policy_of_size(576, is_lora=is_lora)
    config = resolve_for_model(Config(model="some/where"), task, policy)
    assert config.learning_rate == pytest.approx(rate)
    given = resolve_for_model(Config(model="some/where", learning_rate=0.01), task, policy)
    assert given.learning_rate == 0.01


def policy_of_size(hidden_size, is_lora=False):
    causal = SimpleNamespace(config=PretrainedConfig(hidden_size=hidden_size))
    return SimpleNamespace(causal=causal, lora_rank=0, is_lora=is_lora)


def test_flags_override_settings_and_later_settings_override_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text("epochs: 2\nbeta: 0.1\nsteps: 7\n")
    config, given = parse(
        [
            *("--steps", "9", "--config", str(tmp_path / "a.yaml")),
            *("--config", "{beta: 0.2, top_p: 0.5}"),
        ]
    )
    assert given == {"epochs": 2, "beta": 0.2, "steps": 9, "top_p": 0.5}
    assert config == Config(epochs=2, beta=0.2, steps=9, top_p=0.5)


def test_a_runs_own_configuration_starts_the_same_training_again(tmp_path):
    first = resolve_config(Config(level=7, name="first", epochs=2), Interleave())
    first.save(tmp_path / "config.yaml", torch="2.13")
    config, given = parse(["--config", str(tmp_path / "config.yaml"), "--seed", "3"])
    assert config == dataclasses.replace(first, name=None, seed=3) and "name" not in given


@pytest.mark.parametrize("flags, level, mixed", [([], 2, True), (["--level", "1"], 1, False)])
def test_a_run_of_all_levels_of_its_data_has_them_all_again(tmp_path, flags, level, mixed):
    """Found as a repeated run that trained on the hardest level alone."""
    first = resolve_config(Config(dataset="a.jsonl"), Interleave(), [1, 2])
    assert first.mixed and first.level == 2
    first.save(tmp_path / "config.yaml", torch="2.13")
    config, _ = parse(["--config", str(tmp_path / "config.yaml"), *flags])
    again = resolve_config(config, Interleave(), [1, 2])
    assert (again.level, again.mixed) == (level, mixed)


def test_mixed_levels_are_measured_at_the_hardest_that_is_held_out():
    def task(*levels):
        held_out = [Problem("t", level, "p", "x", key=str(level)) for level in levels]
        return SimpleNamespace(name="t", problems=lambda split: held_out)

    for held_out, level in (((1, 2), 2), ((), 3), ((7,), 3)):
        assert resolve_config(Config(task="t"), task(*held_out), [1, 2, 3]).level == level
    assert resolve_config(Config(task="t", curriculum="1,3"), task(1), [1, 2, 3]).level == 3


def test_a_run_from_an_earlier_run_starts_from_its_checkpoint_again(tmp_path):
    Config(model="base", start="runs/a/checkpoints/step-000002").save(tmp_path / "config.yaml", x=1)
    config, _ = parse(["--config", str(tmp_path / "config.yaml")])
    assert (config.model, config.start) == ("runs/a/checkpoints/step-000002", None)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{", "--config {: not YAML; give '{name: value, ...}' (ParserError: while parsing"),
        ("{temprature: 1}", "--config: unknown key temprature (did you mean temperature?)"),
        (
            "{save_steps: 8, seed: x, top_k: 2, log_level: 1}",
            "--config: unknown key save_steps (did you mean save_every?); seed is 'x', and should "
            "be int; unknown key top_k (there is none; leave it out); unknown key log_level (leave "
            "it out, nothing here needs it)",
        ),
        ("{epochs: many}", "--config: epochs is 'many', and should be int"),
        ("{learning_rate: fast}", "--config: learning_rate is 'fast', and should be float"),
        ("{temperature: .inf}", "temperature inf: give a finite number"),
        (f"{{steps: 1{'0' * 400}}}", "0000: give 1000000000 or less"),
        ("{seed: true}", "seed is True, and should be int"),
        ("{seed: 1, seed: 2}", "seed stands twice in a mapping"),
        ("{start: x}", "--config: unknown key start"),
    ],
)
def test_bad_settings_are_named(source, line):
    assert line in refused(parse, ["--config", source])


def test_names_of_trl_are_not_taken_for_others():
    names = TrainingArguments.__dataclass_fields__.keys() - {*SETTINGS, *ELSEWHERE}
    assert "did you mean" not in refused(checked, dict.fromkeys(names), "train()")


def test_settings_are_taken_as_they_are_meant():
    """YAML reads off as False, and 1e-4 as a text."""
    text = "{control: none, preflight: off, learning_rate: 1e-4, task_options: {a: 2}}"
    config, _ = parse(["--config", text])
    assert (config.control, config.preflight) == ("none", "off")
    assert config.learning_rate == 1e-4 and config.task_options == {"a": "2"}


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--top-p", "--top-p: no such flag; did you mean --config '{top_p: ...}'?"),
        ("--lora_rank", "--lora_rank: no such flag; did you mean --lora-rank?"),
        ("--num-generations", "--num-generations: no such flag; did you mean --group-size?"),
        ("--lr", "--lr: no such flag; did you mean --learning-rate?"),
        ("--qqqqqq", "--qqqqqq: no such flag; python train.py --help-all lists all"),
    ],
)
def test_an_unknown_flag_is_told_what_to_give(flag, line):
    assert refused(parse, [flag, "4"]) == line

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.errors import UserError
from grpo.config import (
    FOUND,
    QUANTISED,
    SETTINGS,
    Config,
    load_config,
    make_parser,
    parse,
    resolve_config,
    spelled,
)
from grpo.evaluate import summarise
from grpo.fast.speculative import LENGTHS
from grpo.model.load import BITS_OPTIONS
from grpo.records import Group
from tasks.arithmetic import Arithmetic
from tasks.base import Problem, Score
from tasks.interleave import Interleave

ROOT = Path(__file__).resolve().parents[3]


def test_every_flag_is_documented():
    assert all(len(field.metadata["help"]) > 5 for field in SETTINGS.values())


def test_what_was_given_is_known():
    config, given = parse(["--words", "7", "--no-ramp", "--seed=0"])
    assert given == {"level": 7, "ramp": False, "seed": 0}
    assert config == Config(level=7, ramp=False)


def test_curriculum_alone_is_the_whole_ladder():
    task = Interleave()
    assert parse(["--curriculum"])[0].levels_for(task) == [10, 25, 50, 100, 200, 500]
    assert parse(["--curriculum", "6,12"])[0].levels_for(task) == [6, 12]


def test_only_a_task_that_climbs_begins_with_easier_levels():
    climbing, other = Interleave(), Arithmetic()
    assert Config(level=25).levels_for(climbing) == [10, 25]
    assert Config(level=25, ramp=False).levels_for(climbing) == [25]
    assert Config(level=25, dataset="set.jsonl").levels_for(climbing) == [25]
    assert Config(level=25, task="arithmetic").levels_for(other) == [25]


def test_clips_are_those_of_the_losses_paper_unless_given():
    assert Config(loss="dapo").clips == (0.2, 0.28) and Config(loss="grpo").clips == (0.2, 0.2)
    assert Config(loss="gspo", clip_high=0.5).clips == (3e-4, 0.5)


def test_configuration_survives_its_file(tmp_path):
    config = Config(level=40, reward="clipped", learning_rate=3e-5, clip_low=0.1)
    config.save(tmp_path / "config.yaml", torch="2.13")
    assert load_config(tmp_path / "config.yaml") == config


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
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "bad",
    [
        dict(group_size=1),
        dict(prompts=0),
        dict(top_p=0.0),
        dict(loss="mse"),
        dict(replay=1.0),
        dict(on_degenerate="ignore"),
        dict(beta=-1.0),
        dict(epochs=0),
        dict(temperature_factor=0.5),
        dict(level=-1),
        dict(draft="on"),
        dict(credit="word"),
        dict(truncated="drop"),
        dict(on_alarm="panic"),
        dict(importance_limit=-1.0),
        dict(step_tokens=-1),
        dict(promote_every=0),
        dict(promote_problems=0),
        dict(promote_by="luck"),
        dict(promote_at=1.5),
        dict(dynamic_sampling=-2),
    ],
)
def test_bad_values_name_their_flag(bad):
    (name,) = bad
    with pytest.raises(UserError, match=f"^{spelled(name)} {bad[name]}: "):
        Config(**bad)


def test_token_credit_and_a_ratio_of_sequences_exclude_each_other():
    with pytest.raises(UserError) as error:
        Config(credit="alignment", loss="gspo")
    assert (
        str(error.value)
        == "--credit alignment: gspo weighs whole sequences, not tokens; give another --loss"
    )


@pytest.mark.parametrize(
    "given, settled",
    [
        (dict(curriculum="10,25"), ("heldout", 0.97, 4, 25, 60)),
        (dict(level=50), ("running", 0.9, 4, 50, 60)),
        (
            dict(
                curriculum="10,25",
                promote_by="running",
                promote_at=0.5,
                dynamic_sampling=3,
                steps=7,
            ),
            ("running", 0.5, 3, 25, 7),
        ),
        (dict(curriculum="10,25", dynamic_sampling=0), ("heldout", 0.97, 0, 25, 60)),
    ],
)
def test_what_is_left_to_defaults(tmp_path, given, settled):
    config = resolve_config(Config(**given), Interleave())
    assert (
        config.promote_by,
        config.promote_at,
        config.dynamic_sampling,
        config.level,
        config.steps,
    ) == settled


@pytest.mark.parametrize(
    "given, prompts, varied",
    [
        (dict(), 8, 4),
        (dict(prompts=6), 6, 0),
        (dict(prompts=6, promote_by="heldout"), 6, 3),
        (dict(prompts=1, promote_by="heldout"), 1, 1),
        (dict(prompts=32, promote_by="heldout"), 32, 8),
        (dict(dynamic_sampling=0), 8, 0),
        (dict(model="somewhere/else"), 16, 0),
        (dict(model="somewhere/else", promote_by="heldout"), 16, 8),
    ],
)
def test_few_prompts_at_first_for_the_embedded_model(given, prompts, varied):
    config = resolve_config(Config(level=25, **given), Interleave())
    assert (config.prompts, config.dynamic_sampling) == (prompts, varied)


@pytest.mark.parametrize(
    "given, schedule, steps",
    [
        (dict(), "constant", 60),
        (dict(schedule="cosine"), "cosine", 60),
        (dict(model="somewhere/else"), "cosine", 800),
        (dict(model="somewhere/else", schedule="constant", steps=7), "constant", 7),
    ],
)
def test_models_that_are_not_ours_anneal_their_learning_rate(tmp_path, given, schedule, steps):
    config = resolve_config(Config(level=25, **given), Interleave())
    assert (config.schedule, config.steps) == (schedule, steps)


def groups(values):
    return [
        Group(i, Problem("t", 1, "p", "x", "k"), (1,), 1.0, [], scores=[Score(v, exact=v == 1)])
        for i, v in enumerate(values)
    ]


def test_a_summary_counts_on_what_was_not_seen():
    # 64 of 64 right: the rate p at which that has a probability of 0.025 is 0.025 ** (1 / 64)
    low = pytest.approx(0.025 ** (1 / 64))
    assert summarise(groups([1.0] * 64)) == {
        "n": 64,
        "mean": 1.0,
        "ci_low": low,
        "ci_high": 1.0,
        "exact": 1.0,
        "exact_low": low,
        "exact_high": 1.0,
    }
    line = summarise(groups([0.5] * 9))
    assert line["ci_low"] < line["mean"] == 0.5 < line["ci_high"]
    assert (line["exact"], line["exact_low"]) == (0, 0) and line["exact_high"] == pytest.approx(
        1 - 0.025 ** (1 / 9)
    )


def test_the_interval_of_many_scores_is_that_of_the_normal_approximation():
    values = np.random.default_rng(1).beta(5, 2, size=2500)
    line = summarise(groups(values.tolist()))
    half = 1.96 * values.std() / 50  # many values: what was not seen hardly counts
    assert line["mean"] == pytest.approx(values.mean())
    assert line["ci_low"] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert line["ci_high"] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_a_dataset_and_a_fixed_supply_exclude_each_other():
    with pytest.raises(UserError, match="--problems fixed:5: leave it out"):
        Config(problems="fixed:5", dataset="set.jsonl")


def help_of(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_all_of_the_help_names_every_setting_with_its_default_and_the_tasks_flags(capsys):
    said = help_of("--help-all", capsys)
    for field in SETTINGS.values():
        name = field.name.replace("_", "-")
        if field.name in FOUND:
            assert f"--{name}" not in said
        elif field.metadata["kind"] == "setting":
            assert f" {field.name} {field.metadata['help']}" in said
        elif field.name == "ramp":
            assert " --no-ramp " in said
        else:
            assert f" {spelled(field.name)} " in said or f" {spelled(field.name)}, " in said
    assert "completions of each prompt (default: 16)" in said
    assert "of --task arithmetic: --family: chain or product" in said


def test_the_help_lists_the_basic_flags_alone(capsys):
    said = help_of("--help", capsys)
    basic = {f.name for f in SETTINGS.values() if f.metadata["kind"] == "basic flag"}
    assert len(basic) == 14  # and --config
    for field in SETTINGS.values():
        is_listed = spelled(field.name) in said.split("examples:")[0]
        assert is_listed == (field.name in basic), field.name


def test_there_are_at_most_45_flags():
    actions = make_parser()._actions
    asks_for_help = {"help", "help_all"}
    assert len([action for action in actions if action.dest not in asks_for_help]) <= 45


@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help_does_not_load_torch(flag, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    found = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--words", "3", flag],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": found},
    )
    assert (done.returncode, done.stderr) == (0, "") and "--group-size N" in done.stdout


def test_the_choices_are_those_that_the_code_implements():
    assert set(QUANTISED) == set(BITS_OPTIONS)
    assert Config(draft=str(LENGTHS[-1])).draft  # the longest is allowed, and no longer one
    with pytest.raises(UserError, match="up to 127"):
        Config(draft=str(LENGTHS[-1] + 1))


def test_flags_override_settings_and_later_settings_override_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text("epochs: 2\nbeta: 0.1\nsteps: 7\n")
    config, given = parse(
        ["--steps", "9", "--config", str(tmp_path / "a.yaml"), "--config", "{beta: 0.2, top_k: 5}"]
    )
    assert given == {"epochs": 2, "beta": 0.2, "steps": 9, "top_k": 5}
    assert config == Config(epochs=2, beta=0.2, steps=9, top_k=5)


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


def test_a_run_from_an_earlier_run_starts_from_its_checkpoint_again(tmp_path):
    Config(model="base", start="runs/a/checkpoints/step-000002").save(tmp_path / "config.yaml", x=1)
    config, _ = parse(["--config", str(tmp_path / "config.yaml")])
    assert (config.model, config.start) == ("runs/a/checkpoints/step-000002", None)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{", "--config {: not YAML; give '{name: value, ...}'"),
        ("{temprature: 1}", "--config: unknown key temprature; did you mean temperature?"),
        ("{num_generations: 8}", "unknown key num_generations; did you mean group_size?"),
        ("{epochs: many}", "--config: epochs is 'many', and should be int"),
        ("{epochs: 0}", "--config: epochs 0: give 1 or more"),
        ("{learning_rate: fast}", "--config: learning_rate is 'fast', and should be float"),
        ("{temperature: .inf}", "temperature inf: give a finite number"),
        ("{clip_high: 1.0e+300}", "clip_high 1e+300: give 1,000,000,000 or less"),
        ("{task_options: {operands: [2]}}", "task_options has operands: [2]; give it as on the"),
        ("{seed: 1, seed: 2}", "--config: seed stands twice in a mapping"),
        ("{start: x}", "--config: start is filled in by the run; leave it out"),
        ("none.yaml", "none.yaml"),
    ],
)
def test_bad_settings_are_named(source, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        parse(["--config", source])
    assert line in str(error.value) and "\n" not in str(error.value)


def test_settings_are_taken_as_they_are_meant():
    """YAML reads off as False, 8 as a number, and 1e-4 as a text."""
    text = "{draft: 8, preflight: off, warm_start: off, learning_rate: 1e-4, task_options: {a: 2}}"
    config, _ = parse(["--config", text])
    assert (config.draft, config.preflight, config.warm_start) == ("8", "off", "off")
    assert config.learning_rate == 1e-4 and config.task_options == {"a": "2"}


def test_a_setting_used_as_a_flag_is_explained():
    with pytest.raises(UserError) as error:
        parse(["--top-p", "0.9"])
    assert "--top-p: this setting has no flag; give --config '{top_p: ...}'" in str(error.value)


def test_a_flag_with_an_underscore_is_told_its_spelling():
    with pytest.raises(UserError, match="--lora_rank: no such flag; did you mean --lora-rank?"):
        parse(["--lora_rank", "4"])


@pytest.mark.parametrize("in_config", [("task",), ("wording",), ("task", "wording"), ()])
def test_a_wording_is_checked_against_the_task_wherever_both_are_given(in_config, tmp_path):
    (tmp_path / "wording.txt").write_text("How much is {expression}?")
    values = {"task": "arithmetic", "wording": str(tmp_path / "wording.txt")}
    argv = ["--config", json.dumps({name: values[name] for name in in_config})]
    for name in values.keys() - set(in_config):
        argv += [f"--{name}", values[name]]
    assert parse(argv)[0].wording == "How much is {expression}?"
    with pytest.raises(UserError, match="expression"):
        parse(["--config", json.dumps({"wording": values["wording"]})])  # of interleave


def test_a_mark_of_zero_is_not_the_automatic_one():
    assert Config(promote_at=0.0).promotion == ("running", 0.0)
    assert Config(curriculum="2,3").promotion == ("heldout", 0.97)

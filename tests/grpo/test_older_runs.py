"""Files that older versions wrote are read and resumed under today's names."""

import json
from dataclasses import fields, replace

import pytest
import yaml

from data.files import read_jsonl_zst, write_jsonl_zst
from grpo import older_runs
from grpo.config import Config
from grpo.config_file import load_config
from grpo.curriculum.ladder import Ladder
from grpo.curriculum.warm_start import WarmStart
from grpo.model.load import load_policy
from grpo.records import CLASSES, Completion, Decision, Group, StepSummary
from grpo.run.reader import load_run
from grpo.run.rollouts import groups_of, write_rollouts
from grpo.trainer import Trainer
from grpo.training.build import Parts, ladder_settings
from tasks.base import Problem, Score, UserError
from tasks.interleave import Interleave

VALUES = {"rung_minutes": 2.5, "rung_tokens": 300, "forget_activations": True}


def aged(values, names):
    """Return `values` under the names that older versions wrote."""
    older = {new: old for old, new in names.items()}
    assert set(older) <= set(values), "every name is part of what is written today"
    return {older.get(name, name): value for name, value in values.items()}


@pytest.mark.parametrize("old, new", older_runs.SETTINGS.items())
def test_each_setting_is_read_under_its_new_name(tmp_path, old, new):
    value = VALUES.get(old, 1.5)
    (tmp_path / "config.yaml").write_text(f"{old}: {value}\n")
    assert new in {field.name for field in fields(Config)}
    assert getattr(load_config(tmp_path / "config.yaml"), new) == value


def test_a_setting_that_is_gone_is_read_only_as_its_default(tmp_path):
    (tmp_path / "config.yaml").write_text("variance_threshold: 1.0e-06\n")
    assert load_config(tmp_path / "config.yaml") == Config()
    (tmp_path / "config.yaml").write_text("variance_threshold: 0.6\n")
    with pytest.raises(UserError, match="unknown key variance_threshold; this version has no such"):
        load_config(tmp_path / "config.yaml")


def test_groups_of_older_rollouts(tmp_path):
    path = tmp_path / "step-000001.jsonl.zst"
    problem = Problem("t", 1, "p", "x", "k", {})
    completion = Completion((1,), (-0.5,), "x", "stop")
    group = Group(0, problem, (1,), 1.0, [completion], scores=[Score(0.5)], class_name="tied")
    write_rollouts(path, [group], step=1)

    lines = [aged(line, older_runs.GROUP) for line in read_jsonl_zst(path)]
    assert lines[0]["verdict"] == "tied" and "class" not in lines[0]
    write_jsonl_zst(path, lines)
    assert groups_of(path) == [group]


def test_facts_and_decisions_of_an_older_run(tmp_path):
    config = {"heat": 1.3, "facts": {"rungs": [3, 5], "ranks": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    figures = [{"rungs": [3, 5], "start": 3}, {"looks": [[0, 0.1]], "updates": 2}]
    lines = [Decision(0, 5, 3, "preflight", "why", each).to_json() for each in figures]
    (tmp_path / "curriculum.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    run = load_run(tmp_path)
    assert run.config == {
        "temperature_factor": 1.3,
        "facts": {"training_levels": [3, 5], "ranks": 1},
    }
    assert [line["figures"] for line in run.decisions] == [
        {"training_levels": [3, 5], "start": 3},
        {"validation_scores": [[0, 0.1]], "updates": 2},
    ]


def test_a_trainer_goes_on_from_an_older_checkpoint(tiny_model):
    def trainer():
        policy = load_policy(str(tiny_model), device="cpu")
        config = Config(level=2, ramp=False, learning_rate=1e-3, steps=3, prompts=16)
        trainer = Trainer(config, Parts(Interleave()), policy)
        rules = replace(ladder_settings(config), window=1, collapse_steps=1)
        trainer.curriculum = Ladder([1, 2, 3], rules)
        return trainer

    before, after = trainer(), trainer()
    before.imitation = WarmStart(2, 64, 900, [2.9, 2.5], [[0, 0.1], [2, 0.5]], "why")
    before.curriculum.observe(StepSummary(1, {1: [1.0] * 60}))
    before.curriculum.observe(StepSummary(2, {2: [0.0] * 9}, {2: [True] * 9}, tokens=70))
    assert before.curriculum.steps_back == [0, 1, 0]
    before.monitor.classes.append({name: float(name == "tied") for name in CLASSES})
    before.early_stop.classes.update(masked=3, tied=1)

    state = json.loads(json.dumps(before.state()))
    state["curriculum"] = aged(state["curriculum"], older_runs.CURRICULUM)
    del state["monitor"]["classes"][0]["masked"]
    for name in older_runs.HEAT:
        del state["monitor"][name]
    classes = state["progress"]["classes"]
    state["progress"]["classes"] = aged(classes, older_runs.UNTRAINED_CLASSES)
    state["drafting"] = aged(state["drafting"], older_runs.DRAFTING)
    state["imitation"] = aged(state["imitation"], older_runs.WARM_START)
    state = aged(state, older_runs.TRAINER)
    assert state["curriculum"]["rungs"] == [1, 2, 3] and state["started"]["looks"]

    after.restore(older_runs.trainer_state_of(state))
    assert after.state()["monitor"].pop("level") == -1
    after.monitor.level = None
    assert after.state() == before.state()
    assert after.imitation == before.imitation


def test_an_older_run_has_trained_on_all_problems_that_it_has_seen(tiny_policy):
    trainer = Trainer(
        Config(level=2, ramp=False, learning_rate=1e-3, steps=3, prompts=2),
        Parts(Interleave()),
        tiny_policy,
    )
    state = trainer.state() | {"seen": ["k", "l", "m"]}
    del state["inherited"], state["trained"]
    trainer.restore(state)
    assert trainer.stream.inherited == 0 and trainer.stream.trained == {2: 3}


def test_metrics_of_an_older_run(tmp_path):
    (tmp_path / "config.yaml").write_text("task: interleave\n")
    old = {"step": 1, "reward_std": 0.1, "group_std": 0.1, "clip_ratio/low": 0.2}
    new = {"step": 2, "reward_std": 0.3, "group_std": 0.1, "clip_ratio/low_mean": 0.2}
    lines = [old | {"parity/max_abs_logprob_diff": 0.5}, new]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_run(tmp_path).metrics == [
        {
            "step": 1,
            "group_std": 0.1,
            "clip_ratio/low_mean": 0.2,
            "sampling/sampling_logp_difference/max": 0.5,
        },
        new,
    ]

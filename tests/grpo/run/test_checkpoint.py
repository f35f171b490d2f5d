import errno
import json
import os
import random
import resource
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data.errors import UserError
from grpo.learn.optimizer import Optimizer
from grpo.run import checkpoint as store
from grpo.run.checkpoint import (
    checkpoints,
    find_resume,
    load_optimizer,
    prune,
    remove_after,
    remove_partial,
    save_checkpoint,
    save_optimizer,
    verify,
)
from grpo.run.checkpoint_rules import CheckpointRules, spacing_for
from grpo.run.random_state import load_rng, rng_state


def write(folder):
    (folder / "sub").mkdir()
    (folder / "weights.bin").write_bytes(b"weights" * 100)
    (folder / "sub" / "state.json").write_text("{}")


def save(run, step):
    (run / "config.yaml").touch()
    return save_checkpoint(run, step, write, note=lambda _: {"why": "test"})


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_has_a_manifest_and_verifies(tmp_path):
    path = save(tmp_path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (
        path.name == "step-000020"
        and manifest["step"] == 20
        and manifest["note"] == {"why": "test"}
    )
    assert manifest["files"]["sub/state.json"]["bytes"] == 2
    # printf '{}' | sha256sum
    assert manifest["files"]["sub/state.json"]["sha256"].startswith(
        "44136fa355b3678a1146ad16f7e8649e"
    )
    assert verify(path) is None


def test_a_step_made_again_replaces_the_old_one(tmp_path):
    save(tmp_path, 20)
    path = save_checkpoint(
        tmp_path, 20, lambda folder: (folder / "new").write_text("new"), note=lambda _: {}
    )
    assert verify(path) is None and not (path / "weights.bin").exists() and (path / "new").exists()


def test_a_step_made_again_gives_way_only_to_a_whole_one(tmp_path, monkeypatch):
    old, replace = save(tmp_path, 20), os.replace

    def fails_on_the_new(source, target):
        if Path(source).name == ".tmp-step-000020":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", fails_on_the_new)
    with pytest.raises(UserError, match="Input/output error"):
        save(tmp_path, 20)
    assert names(tmp_path) == ["step-000020"] and verify(old) is None


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    synced, replace = [], os.replace
    monkeypatch.setattr(
        store, "sync", lambda path: synced.append(str(path.relative_to(tmp_path / "checkpoints")))
    )
    monkeypatch.setattr(
        store.os, "replace", lambda *paths: (synced.append("rename"), replace(*paths))
    )
    save(tmp_path, 20)
    inside = [
        ".tmp-step-000020" + name
        for name in ("", "/manifest.json", "/sub", "/sub/state.json", "/weights.bin")
    ]
    assert sorted(synced[:5]) == inside and synced[5:] == ["rename", "."]


def test_a_failure_in_the_middle_leaves_nothing_and_takes_nothing(tmp_path):
    save(tmp_path, 20)

    def dies(folder):
        write(folder)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        save_checkpoint(tmp_path, 40, dies, note=lambda _: {})
    assert (
        names(tmp_path) == ["step-000020"]
        and verify(tmp_path / "checkpoints" / "step-000020") is None
    )


@pytest.mark.parametrize("where", ["write", "safetensors", "fsync", "replace"])
def test_a_full_disk_is_one_line_and_the_old_ones_stay(tmp_path, monkeypatch, where):
    old = save(tmp_path, 20)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_):
        if where == "safetensors":  # as its older versions word it
            raise RuntimeError('IoError(Os { code: 28, message: "No space left on device" })')
        raise full

    if where in ("fsync", "replace"):
        monkeypatch.setattr(store.os, where, fails)
    with pytest.raises(UserError) as error:
        save_checkpoint(
            tmp_path, 40, fails if where in ("write", "safetensors") else write, note=lambda _: {}
        )
    monkeypatch.undo()
    assert "No space left on device" in str(error.value) and "--resume" in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-000020"] and verify(old) is None


def test_a_write_that_safetensors_cannot_finish_is_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limits[1])
    )  # bytes a file: the system itself refuses
    try:
        with pytest.raises(UserError, match="step-000020: cannot be written .*File too large"):
            save_checkpoint(
                tmp_path,
                20,
                lambda folder: save_file({"w": torch.zeros(1000)}, folder / "w"),
                note=lambda _: {},
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    save(tmp_path, 20)
    write_to = tmp_path / "checkpoints" / ".tmp-step-000040"
    write_to.mkdir()
    write(write_to)
    assert checkpoints(tmp_path)[0] == [tmp_path / "checkpoints" / "step-000020"]
    remove_partial(tmp_path)
    assert names(tmp_path) == ["step-000020"]


def test_files_that_were_being_written_are_removed(tmp_path):
    (tmp_path / "rollouts").mkdir()
    report = tmp_path / ".report.html.7.partial"  # perhaps another process writes it now
    for path in (tmp_path / ".config.yaml.7.partial", tmp_path / "rollouts" / ".x.7.partial"):
        path.touch()
    report.touch()
    remove_partial(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [report]


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path):
    left = tmp_path / "checkpoints" / ".tmp-step-000020"
    left.mkdir(parents=True)
    (left / "half.bin").touch()
    assert not (save(tmp_path, 20) / "half.bin").exists()
    assert names(tmp_path) == ["step-000020"]


DAMAGE = [
    ("weights.bin has 3 bytes", lambda path: (path / "weights.bin").write_bytes(b"wei")),
    ("weights.bin has 0 bytes", lambda path: (path / "weights.bin").write_bytes(b"")),
    (
        "weights.bin is damaged",
        lambda path: (path / "weights.bin").write_bytes(b"Weights" + b"weights" * 99),
    ),
    ("sub/state.json is missing", lambda path: (path / "sub" / "state.json").unlink()),
    ("not a checkpoint", lambda path: (path / "manifest.json").unlink()),
    ("manifest.json is damaged", lambda path: (path / "manifest.json").write_text('{"files"')),
    (
        "manifest.json is damaged",
        lambda path: (path / "manifest.json").write_text("[" * 100_000),
    ),  # too deep to parse
    (
        "not a checkpoint that this version",
        lambda path: (path / "manifest.json").write_text('{"name": "of a web page"}'),
    ),
    (
        "manifest.json names a file outside",
        lambda path: (path / "manifest.json").write_text(
            json.dumps(
                {"format": 1, "files": {"../step-000020/weights.bin": {"bytes": 700, "sha256": ""}}}
            )
        ),
    ),
]


@pytest.mark.parametrize("reason, damage", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path, reason, damage):
    good, bad = save(tmp_path, 20), save(tmp_path, 40)
    damage(bad)
    store._verified.clear()
    assert reason in verify(bad)
    path, warnings = find_resume(tmp_path)
    assert path == good and len(warnings) == 1 and reason in warnings[0]
    with pytest.raises(UserError, match="--resume .*step-000040"):
        find_resume(bad)


def test_where_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_resume(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a run"):
        find_resume(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="no valid checkpoint"):
        find_resume(tmp_path)


@pytest.mark.parametrize(
    ("here", "name"),
    [
        ("checkpoints", "step-000020"),
        ("checkpoints/step-000020", "."),
        ("checkpoints/step-000040", "../step-000020"),
    ],
)
def test_a_checkpoint_named_from_within_its_run(tmp_path, monkeypatch, here, name):
    path = save(tmp_path, 20)
    save(tmp_path, 40)
    monkeypatch.chdir(tmp_path / here)
    assert find_resume(name) == (path, [])


@pytest.mark.parametrize("name", ["step-000020", "renamed"])
def test_a_checkpoint_copied_without_its_run(tmp_path, name):
    """The folders above it are not searched for links, because they are no run's."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "unrelated").symlink_to("/nowhere")
    (home / "data").mkdir()
    copy = save(tmp_path, 20).replace(home / "data" / name)
    (copy / "trainer.json").touch()
    with pytest.raises(UserError, match=f"--resume .*{name}: a checkpoint without its run"):
        find_resume(copy)


@settings(deadline=None, max_examples=25)  # each example waits for the disk
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 7))
def test_first_second_to_last_last_and_best_stay(tmp_path_factory, valid, best):
    run = tmp_path_factory.mktemp("run")
    paths = [save(run, 10 * (i + 1)) for i in range(len(valid))]
    for path, good in zip(paths, valid):
        if not good:
            (path / "weights.bin").unlink()
    store._verified.clear()
    good = [path for path, ok in zip(paths, valid) if ok]
    best = good[best % len(good)] if good else None
    lines = prune(run, keep_best=best)
    stay = {*good[:1], *good[-2:], *([best] if best else [])}
    assert {path for path in good if path.exists()} == stay
    assert len(lines) == len(good) - len(stay)
    assert all(path.exists() for path, ok in zip(paths, valid) if not ok)
    shutil.rmtree(run)


def test_what_was_made_after_the_step_gone_back_to_does_not_pass_for_the_latest(tmp_path):
    for step in (20, 80, 100):
        save(tmp_path, step)
    assert remove_after(tmp_path, 20) == [
        "removed checkpoint step-000080",
        "removed checkpoint step-000100",
    ]
    new = save(tmp_path, 40)
    assert prune(tmp_path) == [] and find_resume(tmp_path) == (new, [])


def test_rules_by_hand():
    rules = CheckpointRules(every=20, threshold=0.3, best_margin=0.01)
    assert rules.decide(1, 0.2, 10) == []
    assert rules.decide(2, 0.205, 10) == []  # not by the margin
    assert rules.decide(3, 0.25, 10) == ["new best reward 0.250 (was 0.200)"]
    assert rules.decide(4, 0.31, 10) == [
        "reward 0.310 first passed 0.3",
        "new best reward 0.310 (was 0.250)",
    ]
    again = CheckpointRules(every=20, threshold=0.3, best_margin=0.01)
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    assert again.decide(20, 0.3, 10) == ["every 20 steps"]


def test_saves_for_a_new_best_keep_their_spacing():
    rules = CheckpointRules(every=20, threshold=9, best_margin=0.01)
    rules.spacing = 5
    rewards = {1: 0.1, 2: 0.2, 6: 0.3, 7: 0.4, 8: 0.35, 12: 0.36, 20: 0.5, 21: 0.6, 22: 0.7}
    due = {step: rules.decide(step, reward, 10) for step, reward in rewards.items()}
    assert due == {
        1: [],
        2: ["new best reward 0.200 (was 0.100)"],
        6: [],
        7: ["new best reward 0.400 (was 0.200)"],
        8: [],
        12: [],
        20: ["every 20 steps", "new best reward 0.500 (was 0.400)"],
        21: ["new best reward 0.600 (was 0.500)"],  # one that is due anyway does not count
        22: [],
    }


def test_a_harder_level_has_a_best_reward_of_its_own():
    rules, again = (CheckpointRules(every=100, threshold=2.0, best_margin=0.01) for _ in range(2))
    rules.spacing = again.spacing = 1
    assert rules.decide(1, 0.1, 10) == []
    assert rules.decide(2, 0.9, 10) == ["new best reward 0.900 (was 0.100)"]
    assert rules.decide(3, 0.2, 25) == []

    again.load_state_dict(rules.state_dict())
    assert again.decide(4, 0.3, 25) == ["new best reward 0.300 (was 0.200)"]
    assert again.decide(5, 0.95, 10) == []  # a step back to an easier level
    assert again.decide(6, 0.4, 25) == ["new best reward 0.400 (was 0.300)"]


def test_after_the_first_save_the_spacing_must_be_known():
    rules = CheckpointRules(every=3, threshold=0.3, best_margin=0.01)
    assert rules.decide(1, 0.1, 10) == [] and len(rules.decide(3, 0.12, 10)) == 2
    assert rules.decide(4, 0.2, 10) == []
    assert rules.decide(5, 0.31, 10) == [
        "reward 0.310 first passed 0.3",  # happens once, so it waits for nothing
        "new best reward 0.310 (was 0.120)",
    ]
    again = CheckpointRules(every=3, threshold=0.3, best_margin=0.01)
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    for each in (rules, again):
        each.spacing = 6
        assert each.decide(10, 0.5, 10) == []
        assert each.decide(11, 0.5, 10) == ["new best reward 0.500 (was 0.310)"]


def test_the_spacing_by_hand():
    assert spacing_for(3.0, 3.0, [8.0]) is None  # the first step warms up
    assert spacing_for(3.0, 3.0, [8.0, 0.25, 0.5, 0.75]) == 120  # 3 s of 60 s
    assert spacing_for(0.001, 0.001, [8.0, 1.0]) == 1
    assert spacing_for(0.1, 30.0, [8.0, 1.0]) == 30  # a slow disk: the next one finds it free


def test_the_optimizer_goes_on_bit_for_bit(tmp_path):
    def make():
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        return layer, Optimizer(
            layer.parameters(),
            partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        )

    def step(layer, optimizer, seed):
        optimizer.clear()
        (
            layer(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))) ** 2
        ).sum().backward()
        optimizer.collect(0.0)
        optimizer.step()

    one, two = make(), make()
    for seed in (1, 2):
        step(*one, seed)
    save_optimizer(tmp_path, one[1].state_dict())
    two[0].load_state_dict(one[0].state_dict())
    load_optimizer(tmp_path, two[1])
    assert two[1].state_dict()["param_groups"] == one[1].state_dict()["param_groups"]
    for seed in (3, 4):
        step(*one, seed)
        step(*two, seed)
    assert all(torch.equal(a, b) for a, b in zip(one[0].parameters(), two[0].parameters()))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [
        ".json",
        ".safetensors",
    ]  # nothing pickled


def test_random_generators_go_on(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.random(), torch.rand(1).item()

    draw()
    (tmp_path / "rng.json").write_text(json.dumps(rng_state()))
    expected = draw()
    draw()
    load_rng(tmp_path)
    assert draw() == expected

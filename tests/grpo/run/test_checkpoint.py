"""Checkpoints are whole or absent, hold the state of their own step, and are found again."""

import errno
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from small_runs import OWN
from small_train import fails

from grpo.records import StepReport
from grpo.run import checkpoint as store
from grpo.run.checkpoint import (
    Saver,
    copied,
    find_resume,
    load_rng,
    new_checkpoint,
    prune,
    remove_checkpoints_after,
    rng_state,
    verify,
)
from grpo.run.logs import read_metrics
from grpo.tasks.base import UserError
from grpo.tools import train
from grpo.trainer import Trainer


def write(folder):
    (folder / "sub").mkdir()
    (folder / "weights.bin").write_bytes(b"weights" * 100)
    (folder / "sub" / "state.json").write_text("{}")


def save(run, step, write=write):
    (run / "config.yaml").touch()
    with new_checkpoint(run, step) as folder:
        write(folder)
    return run / "checkpoints" / f"step-{step:06d}"


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


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
    manifest = json.loads((tmp_path / "checkpoints/step-000020/manifest.json").read_text())
    # printf '{}' | sha256sum
    assert manifest["files"]["sub/state.json"].startswith("44136fa355b3678a1146ad16f7e8649e")


@pytest.mark.parametrize("where", ["safetensors", "fsync", "replace"])
def test_a_full_disk_is_one_line_and_the_old_ones_stay(tmp_path, monkeypatch, where):
    old = save(tmp_path, 20)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_for_rust(*_):
        raise RuntimeError('IoError(Os { code: 28, message: "No space left on device" })')

    if where != "safetensors":
        monkeypatch.setattr(store.os, where, full)
    line = refused(save, tmp_path, 40, full_for_rust if where == "safetensors" else write)
    monkeypatch.undo()
    assert "No space left on device" in line and "--resume" in line
    assert names(tmp_path) == ["step-000020"] and verify(old) is None


DAMAGE = [
    (
        "weights.bin is damaged",
        lambda path: (path / "weights.bin").write_bytes(b"Weights" + b"weights" * 99),
    ),
    ("sub/state.json is missing", lambda path: (path / "sub" / "state.json").unlink()),
    ("not a checkpoint", lambda path: (path / "manifest.json").unlink()),
    (
        "manifest.json is damaged",
        lambda path: (path / "manifest.json").write_text("[" * 100_000),
    ),  # too deep to parse
]


@pytest.mark.parametrize("reason, damage", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path, reason, damage):
    good, bad = save(tmp_path, 20), save(tmp_path, 40)
    damage(bad)
    assert reason in verify(bad)
    path, warnings = find_resume(tmp_path)
    assert path == good and len(warnings) == 1 and reason in warnings[0]
    with pytest.raises(UserError, match="--resume .*step-000040"):
        find_resume(bad)


def test_where_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        find_resume(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a run"):
        find_resume(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="no valid checkpoint"):
        find_resume(tmp_path)


def test_first_second_to_last_last_and_best_stay(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    prune(tmp_path, "step-000020")
    assert names(tmp_path) == [f"step-{step:06d}" for step in (10, 20, 40, 50)]
    prune(tmp_path, "step-000050")
    assert names(tmp_path) == [f"step-{step:06d}" for step in (10, 40, 50)]


def test_a_run_that_goes_back_removes_later_checkpoints_and_half_ones(tmp_path):
    for step in (20, 80, 100):
        save(tmp_path, step)
    half = tmp_path / "checkpoints" / ".tmp-step-000120"
    half.mkdir()
    write(half)
    assert names(tmp_path)[-1] == "step-000100"
    remove_checkpoints_after(tmp_path, 20)
    assert names(tmp_path) == ["step-000020"]


def test_random_generators_go_on(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.random(), torch.rand(1).item()

    draw()
    (tmp_path / "rng.json").write_text(rng_state())
    expected = draw()
    draw()
    load_rng(tmp_path)
    assert draw() == expected


# In the background.


@pytest.fixture()
def options(tiny_model, tmp_path, monkeypatch):
    """The flags of a run of four steps, each of which learns, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    flags = (
        "--task own.py:Own --prompts 2 --group-size 4 --steps 4 --save-every 2 "
        "--config {'eval_problems':2} "
        "--preflight off --max-new-tokens 8 --learning-rate 0.01 --lora-rank 0 --device cpu"
    )
    return [*flags.split(), "--model", str(tiny_model)]


def test_a_copy_is_of_its_moment_and_reuses_its_memory():
    weight = torch.arange(4.0)
    live = {"weight": weight, "tied": weight, "view": weight.view(2, 2).t()}
    memory = {}
    before = copied(live, memory)
    weight.add_(10)
    assert before["weight"].tolist() == [0, 1, 2, 3] and before["view"].tolist() == [[0, 2], [1, 3]]
    assert before["weight"].data_ptr() == before["tied"].data_ptr() != before["view"].data_ptr()

    after = copied(live, memory)
    assert after["weight"].tolist() == [10, 11, 12, 13]
    assert after["weight"].data_ptr() == before["weight"].data_ptr()


@pytest.fixture()
def slow_disk(monkeypatch):
    """Returns when training may go on: checkpoints of a step are written only when the next step
    has been made.
    """
    made = {}
    save_file, step = store.save_file, Trainer.step

    def wait_for_next(tensors, path):
        number = int(path.parent.name.rpartition("-")[2])
        if number < 4:
            assert made.setdefault(number + 1, threading.Event()).wait(60)
        save_file(tensors, path)

    def note(self):
        try:
            return step(self)
        finally:
            made.setdefault(self.done, threading.Event()).set()

    monkeypatch.setattr(store, "save_file", wait_for_next)
    monkeypatch.setattr(Trainer, "step", note)


def files_of(run: str) -> dict[str, bytes]:
    """Return the files of all checkpoints of a run, but for those that hold a time or the run's
    name.
    """
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in Path("runs", run, "checkpoints").rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "sources.json")
    }


def test_a_checkpoint_belongs_to_its_step_and_training_goes_on(options, monkeypatch, request):
    """The same files as where there is no memory for a copy, and training waits for the write."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "COPIED_SHARE", 0)
        assert train.main([*options, "--name", "waits"]) == 0
    request.getfixturevalue("slow_disk")
    assert train.main([*options, "--name", "goes-on"]) == 0
    files = files_of("waits")
    assert files == files_of("goes-on") and len(files) >= 16
    weights = [files[f"step-00000{step}/model.safetensors"] for step in (2, 4)]
    assert weights[0] != weights[1]


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(options, monkeypatch, capsys):
    def full(tensors, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "save_file", full)
    collect = Saver.collect
    monkeypatch.setattr(Saver, "collect", lambda self, wait=False: collect(self, wait=True))
    line = fails(capsys, *options, "--steps", "9", "--name", "a")
    assert "step-000002: cannot be written (No space left on device)" in line
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 3
    assert list(Path("runs/a/checkpoints").iterdir()) == []


def test_a_run_that_fails_finishes_the_checkpoint_under_way(
    options, monkeypatch, capsys, slow_disk
):
    step = Trainer.step

    def fails(self):
        report = step(self)
        if self.done == 3:
            raise FloatingPointError("the loss is not finite")
        return report

    monkeypatch.setattr(Trainer, "step", fails)
    assert train.main([*options, "--name", "a"]) == 1
    assert "the loss is not finite" in capsys.readouterr().err
    assert names(Path("runs/a")) == ["step-000002"]


def test_the_best_checkpoint_is_of_the_hardest_level(tmp_path):
    idle, optimizer = SimpleNamespace(is_rank0=False), SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(ranks=idle, optimizer=optimizer)
    saver = Saver(tmp_path, trainer, {})
    for step, level, reward in ((10, 10, 0.9), (20, 25, 0.2), (30, 25, 0.1)):
        trainer.done = step
        saver.save(StepReport(step, {"level": level, "reward": reward}, []))
    saver.save()
    assert saver.best == (25, 0.2, "step-000020")

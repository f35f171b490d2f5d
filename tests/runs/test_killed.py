"""Whole runs that are killed and resumed, and saves that fail."""

import errno
import os
import resource
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from frequent_checks import check_often
from small_runs import BY_PLACE
from small_train import SMALL, Killed, after_save, fails

from grpo.run.logs import read_metrics
from grpo.tools import train


@pytest.fixture(scope="module")
def quick(quick_flags):
    """Flags of a small run in which texts and scores do not matter."""
    return [*SMALL, *quick_flags]


# Decides something after the checkpoint of step 2, by what it saw before.
LADDER = "--curriculum 3,4,5,6".split()
ADAPTER = ["--lora-rank", "4", "--beta", "0.1", "--config", "{on_degenerate: resample}"]
FLOAT16 = ["--dtype", "float16"]


@pytest.mark.parametrize(
    "tuning",
    [LADDER, *(pytest.param(tuning, marks=pytest.mark.slow) for tuning in (ADAPTER, FLOAT16))],
)
def test_a_quick_run_killed_and_resumed_is_the_run_that_was_not(
    tmp_path, monkeypatch, quick, tuning
):
    _killed_and_resumed(tmp_path, monkeypatch, [*quick, *tuning], BY_PLACE)
    assert decides_late(tmp_path / "runs" / "cut") == (tuning is LADDER)


def decides_late(run):
    """Whether the run's curriculum decided something after step 2, by what it had seen before."""
    return any(decision["step"] > 2 for decision in read_metrics(run / "curriculum.jsonl"))


def _killed_and_resumed(home, monkeypatch, flags, task):
    """Make a run, and make it again with a kill after its third step, one after its checkpoint;
    the two must be the same.
    """
    check_often(monkeypatch)
    assert train.main([*flags, "--name", "whole"]) == 0

    def killed(self, report):
        if report.step == 3:
            raise Killed

    monkeypatch.setattr("grpo.run.session.Run.save_if_due", after_save(killed))
    with pytest.raises(Killed):
        train.main([*flags, "--name", "cut"])
    monkeypatch.undo()
    monkeypatch.chdir(home)
    check_often(monkeypatch)

    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # as if the process had died while writing
    assert train.main(["--resume", "runs/cut", *task]) == 0
    assert_same_run(home / "runs" / "whole", home / "runs" / "cut")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys, quick):
    assert train.main([*quick, "--name", "whole"]) == 0
    assert train.main([*quick, "--name", "hurt"]) == 0
    path = tmp_path / "runs" / "hurt" / "checkpoints" / "step-000004" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert train.main(["--resume", *BY_PLACE]) == 0  # the latest run
    assert "skipped" in capsys.readouterr().out
    assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "hurt")


def test_a_disk_without_room_at_the_start_names_the_file_and_keeps_no_folder(capsys, quick):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))  # the bytes of a file
    try:
        line = fails(capsys, *quick, "--name", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == "train.py: runs/a/config.yaml: cannot be written: File too large"
    assert not Path("runs").exists()


def test_a_disk_that_is_full_before_the_first_checkpoint_names_a_way_on(monkeypatch, capsys, quick):
    """`--resume` would be refused."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("grpo.run.logs.open_own", full)
    assert fails(capsys, *quick, "--name", "a").endswith(
        "No space left on device; free some space and start it again after rm -r runs/a, because "
        "it has no checkpoint yet"
    )

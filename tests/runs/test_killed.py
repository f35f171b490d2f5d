"""Whole runs that are killed and resumed, and saves that fail."""

import errno
import os
import resource
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from small_runs import BY_PLACE, check_often
from small_train import SMALL, Killed, after_save, fails

from grpo.run.logs import read_metrics
from grpo.tools import train


@pytest.fixture(scope="module")
def quick(quick_flags):
    """Flags of a small run in which texts and scores do not matter."""
    return [*SMALL, *quick_flags]


LADDER = "--curriculum 3,4,5,6".split()
ADAPTER = ["--lora-rank", "4", "--beta", "0.1", "--config", "{on_degenerate: resample}"]
FLOAT16 = ["--dtype", "float16"]


@pytest.mark.parametrize(
    "tuning",
    [LADDER, *(pytest.param(tuning, marks=pytest.mark.slow) for tuning in (ADAPTER, FLOAT16))],
)
def test_a_run_killed_and_resumed_is_the_run_that_was_not(tmp_path, monkeypatch, quick, tuning):
    """The kill comes after the third step, one after its checkpoint."""
    check_often(monkeypatch)
    flags = [*quick, *tuning]
    assert train.main([*flags, "--name", "whole"]) == 0

    def killed(self, report):
        if report.step == 3:
            raise Killed

    monkeypatch.setattr("grpo.run.session.Run.save_if_due", after_save(killed))
    with pytest.raises(Killed):
        train.main([*flags, "--name", "cut"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    check_often(monkeypatch)

    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # as if the process had died while writing
    assert train.main(["--resume", "runs/cut", *BY_PLACE]) == 0
    assert_same_run(Path("runs/whole"), Path("runs/cut"))
    # By what it saw before the checkpoint of step 2.
    decisions = read_metrics(Path("runs/cut/curriculum.jsonl"))
    assert any(decision["step"] > 2 for decision in decisions) == (tuning is LADDER)


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

"""A run whose folder cannot be written, from the start or from some step on, ends in one line and
loses nothing.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from small_runs import BY_PLACE, FEW, whole_run

from grpo.tools import train
from grpo.trainer import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
SMALL = [*FEW, "--steps", "4", "--eval-problems", "3", "--eval-every", "3", "--save-every", "1"]
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: why root may write everywhere


@pytest.fixture(scope="module")
def flags(quick_flags):
    return [*SMALL, *quick_flags]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The run that may write everywhere."""
    return whole_run(flags, tmp_path_factory.mktemp("whole"))


@contextlib.contextmanager
def permissions_count():
    """For as long as this lasts, root is bound by the permissions of files as everybody is
    (capabilities(7); of this thread).
    """
    libc, header, sets = (
        ctypes.CDLL(None, use_errno=True),
        (ctypes.c_uint32 * 2)(0x20080522, 0),
        (ctypes.c_uint32 * 6)(),
    )
    assert libc.capget(header, sets) == 0
    effective, sets[0] = sets[0], sets[0] & ~OVERRIDES
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0


def test_permissions_do_count(tmp_path):
    tmp_path.chmod(0o555)
    with permissions_count(), pytest.raises(PermissionError):
        (tmp_path / "x").touch()


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_done(
    tmp_path, monkeypatch, capsys, flags
):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    with permissions_count():
        assert train.main([*flags, "--name", "x"]) == 2
    said = capsys.readouterr()
    assert (
        said.err.count("\n") == 1
        and "Permission denied" in said.err
        and "runs" in said.err
        and "step" not in said.out
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["checkpoints", "rollouts", "."])
def test_permission_lost_under_way_ends_the_run_in_one_line_and_loses_nothing(
    tmp_path, monkeypatch, capsys, flags, whole, lost
):
    monkeypatch.chdir(tmp_path)
    folder, step = Path("runs/cut") / lost, Trainer.step

    def losing(self):
        if self.done == 2:
            os.chmod(folder, 0o555)
        return step(self)

    with monkeypatch.context() as patch, permissions_count():
        patch.setattr(Trainer, "step", losing)
        capsys.readouterr()
        status = train.main([*flags, "--name", "cut"])
        said = capsys.readouterr().err
        os.chmod(folder, 0o755)
    if lost == ".":  # what is appended to, and the folders below, are writable still
        assert status == 0
    else:
        assert (
            status == 2
            and said.count("\n") == 1
            and "Permission denied" in said
            and f"cut/{lost}" in said
            and "--resume" in said
        )
        assert train.main(["--resume", "runs/cut", *BY_PLACE]) == 0
    assert_same_run(whole, Path("runs/cut"))

"""A run whose folder cannot be written, from the start or from some step on, ends in one line and
loses nothing.
"""

import contextlib
import ctypes
import sys

import pytest
from small_runs import FEW

from grpo.tools import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
SMALL = [*FEW, "--steps", "4", "--eval-problems", "3", "--eval-every", "3", "--save-every", "1"]
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: why root may write everywhere


@pytest.fixture(scope="module")
def flags(quick_flags):
    return [*SMALL, *quick_flags]


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

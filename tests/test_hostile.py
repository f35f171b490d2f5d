"""Hostile command lines: one line and status 2, no traceback, and no control character anywhere."""

import random
import re

import pytest
from hostile import REFUSED, eval_flags, train_flags

import eval as evaluation
import train

CASES = [*train_flags(), *eval_flags()]
SAMPLE = random.Random(0).sample(CASES, 40)
MAINS = {"train": train.main, "eval": evaluation.main}

# C0 and C1 controls but the line feed, and marks of direction.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def check(case, capsys):
    capsys.readouterr()
    status = MAINS[case.program](case.argv)
    out, err = capsys.readouterr()
    assert not CONTROL.search(out) and not CONTROL.search(err)
    if case.outcome == REFUSED:
        assert status == 2, case
    if status == 2:
        lines = [line for line in err.splitlines() if "warning" not in line]
        assert len(lines) == 1 and lines[0].startswith(f"{case.program}.py: "), err


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_model)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: ascii(case.name))
def test_a_sample(case, capsys):
    check(case, capsys)


@pytest.mark.slow
def test_all(capsys):
    assert len(CASES) > 500
    for case in CASES:
        check(case, capsys)


def test_a_folder_for_a_file_is_refused_before_the_evaluation(capsys):
    flags = ["--model", "tiny", "--words", "2", "--problems", "2", "--device", "cpu"]
    assert evaluation.main([*flags, "--json", "."]) == 2
    out, err = capsys.readouterr()
    assert err == "eval.py: --json .: is a directory; give the path of a file\n" and not out

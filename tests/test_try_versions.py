"""The versions in setup.cfg and constraints.txt agree, and the program that tries them says what
failed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import try_versions
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PINNED = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().split()
)


@pytest.mark.parametrize(
    "extra", ["", "test", "bench", "bits", "gguf", "data", "reasoning", "report", "notebook"]
)
def test_the_pinned_versions_are_within_the_bounds(extra):
    for line in try_versions.requirements(extra):
        wanted = Requirement(line)
        version = PINNED[wanted.name.lower().replace("_", "-")]
        assert wanted.specifier.contains(version), (line, version)


def test_lower_bounds_are_taken_as_they_are_but_for_those_that_are_kept():
    bounds = try_versions.lower_bounds(["torch==2.13.0"])
    assert "torch==2.13.0" in bounds and "transformers==5.8" in bounds
    assert len(bounds) == len(try_versions.requirements())
    assert "torch==2.9" in try_versions.lower_bounds([])


def test_what_fails_is_said(tmp_path):
    broken = tmp_path / "python9.9"
    says = "test $1 = --version && echo Python 9.9.1 && exit"
    broken.write_text(f"#!/bin/sh\n{says}\necho no venv\nexit 1\n")
    broken.chmod(0o755)
    program = ROOT / "tests" / "tools" / "try_versions.py"
    done = subprocess.run([sys.executable, program, broken], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "| 9.9.1 | FAILED: no venv |  |  |"

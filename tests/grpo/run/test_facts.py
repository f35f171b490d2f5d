"""The commit of a run: of the repository that its code is a part of, where there is one."""

import shutil
import subprocess

import pytest

from grpo.run.facts import commit


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_code_itself(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    own = tmp_path / "code.py"
    own.write_text("")
    assert commit(own) is None  # no repository
    git("init", "-q")
    git("add", "code.py")
    assert commit(own) is None  # no commit
    git("commit", "-q", "-m", "first")
    assert commit(own) == git("rev-parse", "HEAD")

    # A package in an environment within the repository.
    installed = tmp_path / "venv" / "facts.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert commit(installed) is None

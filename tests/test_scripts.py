"""The commands that are written down, in runs/*.sh and the README, use flags that exist, and what
.ci/run runs is one of them.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo import inspect
from grpo import report as report_program
from grpo.tools import evaluation as program
from grpo.tools import train

ROOT = Path(__file__).resolve().parents[1]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PROGRAMS = {"train.py": train.main, "eval.py": program.main}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [*DOCUMENTS, *sorted((ROOT / "runs").glob("*.sh"))]


@pytest.fixture(scope="module")
def known():
    return {name: flags_of(main) for name, main in PROGRAMS.items()}


def flags_of(main):
    """Return the flags in a program's --help, those of the tasks among them."""
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        main(["--help-all" if main is train.main else "--help"])
    return set(FLAG.findall(said.getvalue()))


def commands(text):
    """Return (program, flags) of each command line of `text`; arrays of a script's arms belong to
    its train.py.
    """
    lines = text.replace("\\\n", " ").replace("declare -A flags", "train.py").splitlines()
    return [
        (name, set(FLAG.findall(line.partition(name)[2].partition("#")[0])))
        for line in lines
        for name in PROGRAMS
        if name in line and not line.startswith("|")
    ]


@pytest.mark.parametrize("main", PROGRAMS.values(), ids=PROGRAMS)
def test_help_begins_with_whole_sentences(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    _, description, *_ = capsys.readouterr().out.split("\n\n")
    assert description.endswith(".") and description.count("`") % 2 == 0


def test_the_flags_of_written_commands_exist(known):
    for path in WRITTEN:
        for name, flags in commands(path.read_text()):
            assert flags <= known[name], path


@pytest.mark.parametrize(
    ("name", "program", "least"), [("grpo.inspect", inspect, 8), ("grpo.report", report_program, 2)]
)
def test_the_commands_of_readers_in_the_readme_are_read(name, program, least):
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    written = re.findall(rf"^python -m {name} (.*)", text, flags=re.MULTILINE)
    assert len(written) >= least
    for line in written:
        program.parse(shlex.split(line, comments=True))


def test_a_flag_that_is_gone_is_seen(known):
    ((name, flags),) = commands("python train.py --words 25 \\\n  --no-such-flag  # --not-this\n")
    assert name == "train.py" and flags - known[name] == {"--no-such-flag"}


# Stands for python3: makes an environment whose programs tell how they are called. Pytest has the
# exit status $STATUS.
PYTHON = """#!/bin/sh
mkdir -p .venv/bin
for name in pip python ruff mypy; do
    printf '#!/bin/sh\\necho "$PWD: $0 $*" >> "$CALLS"\\n' > .venv/bin/$name
    chmod +x .venv/bin/$name
done
echo 'exit $STATUS' >> .venv/bin/python
"""


@pytest.mark.parametrize("status", [0, 1])
def test_ci_runs_the_test_command_of_the_readme_and_keeps_what_is_there(tmp_path, status):
    checkout, programs, temporary = (tmp_path / name for name in ("checkout", "bin", "tmp"))
    for path in (
        checkout / ".ci",
        checkout / ".venv",
        checkout / "runs" / "a",
        checkout / "runs" / "archive",
        programs,
        temporary,
    ):
        path.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    (checkout / "uncommitted.py").write_text("")
    (programs / "python3").write_text(PYTHON)
    (programs / "python3").chmod(0o755)
    before = sorted(checkout.rglob("*"))

    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "CALLS": str(calls),
        "STATUS": str(status),
    }
    done = subprocess.run(
        ["bash", checkout / ".ci" / "run"], env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status
    assert sorted(checkout.rglob("*")) == before and list(temporary.iterdir()) == []

    places, said = zip(*(line.split(": ") for line in calls.read_text().splitlines()))
    assert len({*places}) == 1 and Path(places[0]).parent == temporary
    (command,) = re.findall("^(python3 .* pytest .*)$", (ROOT / "README.md").read_text(), re.M)
    assert command in (ROOT / ".ci" / "run").read_text()
    first, *others = (part.replace("'", "") for part in command.split(" && "))
    assert first == "python3 -m venv .venv"
    checks = [".venv/bin/ruff format --check .", ".venv/bin/ruff check .", ".venv/bin/mypy "]
    assert list(said) == (others if status else [*others, *checks])

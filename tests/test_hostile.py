"""Hostile command lines, models, datasets, texts and run directories.

Each ends within seconds with a status, and with one line if that is 2. There is no traceback, no
control character on any output, and nothing is touched outside the run.
"""

import random
import re
import shutil
import signal
from contextlib import contextmanager

import pytest
from hostile import ACCEPTED, REFUSED, command_lines, damages, datasets, models, texts
from small_runs import BY_PLACE, FEW, whole_run

from grpo import export, inspect
from grpo import report as report_program
from grpo.tasks import audit
from grpo.tools import evaluation, train

SMALL = [*FEW, *"--lora-rank 0 --words 2 --config {'eval_problems':2}".split()]
NEXT = [*SMALL, "--steps", "1", "--max-new-tokens", "16"]
LEVEL = ["--words", "2", "--problems", "2", "--device", "cpu"]
RUN = "runs/whole"
PROGRAMS = {  # by name: the program, and flags that a case adds to
    "train": (train.main, NEXT),
    "eval": (evaluation.main, ["--model", RUN, *BY_PLACE, *LEVEL]),
    "resume": (train.main, ["--resume", RUN, "--steps", "3", *BY_PLACE]),
    "continue": (train.main, ["--model", RUN, *NEXT, *BY_PLACE, "--name", "next"]),
    "steps": (inspect.main, [RUN, "steps"]),
    "step": (inspect.main, [RUN, "step", "2"]),
    "group": (inspect.main, [RUN, "group", "2", "0"]),
    "tokens": (inspect.main, [RUN, "tokens", "2", "0", "0"]),
    "kind": (inspect.main, [RUN, "step", "0", "--kind", "eval"]),
    "replay": (inspect.main, [RUN, "replay", "2", *BY_PLACE]),
    "degenerate": (inspect.main, [RUN, "degenerate"]),
    "report": (report_program.main, [RUN, "-o", "report.html"]),
    "audit": (audit.main, [RUN, *BY_PLACE]),
    "export": (export.main, [RUN, "exported"]),
}

# C0 and C1 controls but the line feed, and marks of direction.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SECONDS = 60


def program_of(name, home):
    """Return a program and its flags, for the run below `home`."""
    main, argv = PROGRAMS[name]
    return main, [str(home / word) if word == RUN else word for word in argv]


@contextmanager
def limited(name):
    """Fail after SECONDS: a pipe that nobody writes would block for ever."""

    def fail(*_):
        raise AssertionError(f"{name}: takes more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(name, main, argv, capsys):
    """Run a program; check what is true of all. Return the status."""
    capsys.readouterr()
    with limited(name):
        status = main(argv)
    out, err = capsys.readouterr()
    assert not CONTROL.search(out) and not CONTROL.search(err), name
    if status == 2:
        lines = [line for line in err.splitlines() if "warning" not in line]
        assert len(lines) == 1, (name, err)
    return status


def check_case(case, model, home, monkeypatch, capsys, whole=None):
    """Prepare a case, with a copy of the run `whole` if it needs one, and run its program."""
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "outside").mkdir()
    (home / "outside" / "precious.txt").write_text("precious\n")
    if whole:
        shutil.copytree(whole, RUN)
    case.prepare(home)

    main, argv = program_of(case.program, home)
    if not whole:
        argv = NEXT if case.program == "train" else LEVEL
        argv = [*argv, *([] if "--model" in case.flags else ["--model", str(model)])]
    status = check(case.name, main, [*argv, *case.flags], capsys)
    assert status == 2 or case.outcome != REFUSED, case.name
    assert status != 2 or case.outcome != ACCEPTED, case.name
    (outside,) = (home / "outside").iterdir()
    assert outside.read_text() == "precious\n", case.name


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_model)


@pytest.fixture(scope="session")
def whole(tiny_model, tmp_path_factory):
    flags = ["--model", str(tiny_model), *SMALL, *BY_PLACE, "--max-new-tokens", "8"]
    rhythm = ["--steps", "2", "--eval-every", "1", "--save-every", "1"]
    return whole_run([*flags, *rhythm], tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole, tmp_path):
    """A copy of a whole run, below the folder in which the test runs."""
    shutil.copytree(whole, RUN)
    return tmp_path / RUN


def inputs(model):
    return [*models(model), *datasets(), *texts()]


def some(cases, count):
    return enumerate(random.Random(0).sample([*cases], count))


def test_some_command_lines(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in some(command_lines(), 12):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


def test_some_inputs(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in some(inputs(tiny_model), 10):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


def test_some_damaged_runs(tiny_model, whole, tmp_path, monkeypatch, capsys):
    for number, case in some(damages(), 8):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys, whole)


def test_the_whole_run_is_read_by_all_programs(run, tmp_path, capsys):
    for name in [name for name in PROGRAMS if name != "train"]:
        assert check(name, *program_of(name, tmp_path), capsys) in (0, 3), name


@pytest.mark.slow
def test_all_command_lines_and_inputs(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in enumerate([*command_lines(), *inputs(tiny_model)]):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


@pytest.mark.slow
def test_all_damaged_runs(tiny_model, whole, tmp_path, monkeypatch, capsys):
    for number, case in enumerate(damages()):
        home = tmp_path / str(number)
        check_case(case, tiny_model, home, monkeypatch, capsys, whole)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(home)


def test_a_folder_for_a_file_is_refused_before_the_evaluation(capsys):
    flags = ["--model", "tiny", "--words", "2", "--problems", "2", "--device", "cpu"]
    assert evaluation.main([*flags, "--json", "."]) == 2
    out, err = capsys.readouterr()
    assert err == "eval.py: --json .: is a directory; give the path of a file\n" and not out


@pytest.mark.parametrize(
    ("name", "program"),
    [
        *(("rollouts", "resume"), ("checkpoints", "continue"), (".lock", "resume")),
        *(("seen.jsonl", "eval"), ("metrics.jsonl", "report"), ("rollouts", "audit")),
    ],
)
def test_no_link_out_of_a_run_is_followed(name, program, run, tmp_path, capsys):
    outside = tmp_path / name
    (run / name).rename(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    (run / name).symlink_to(outside)

    assert check(program, *program_of(program, tmp_path), capsys) == 2
    assert before == {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}

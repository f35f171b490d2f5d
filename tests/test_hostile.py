"""Hostile command lines, models, datasets, texts and run directories.

Each ends within seconds with a status, and with one line if that is 2. There is no traceback, no
control character on any output, and nothing is touched outside the run.
"""

import random
import re
import signal
from contextlib import contextmanager

import pytest
from hostile import ACCEPTED, REFUSED, command_lines, datasets, models, texts
from hostile_runs import copied, damages
from small_runs import BY_PLACE, whole_run

from grpo import export, inspect
from grpo import report as report_program
from grpo.tools import train
from grpo.tools.evaluation import program as evaluation
from tasks import audit

MAINS = {"train": train.main, "eval": evaluation.main}
SMALL = (
    "--lora-rank 0 --words 2 --prompts 2 --group-size 4 --eval-problems 2 --preflight off "
    "--no-ramp --device cpu --warm-start off"
).split()
QUICK = {
    "train": [*SMALL, "--steps", "1", "--max-new-tokens", "4"],
    "eval": "--words 2 --problems 2 --device cpu".split(),
}

# C0 and C1 controls but the line feed, and marks of direction.
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SECONDS = 30


def programs(run, whole):
    """Return the programs that read `run`, by the names of `hostile_runs.READERS`."""
    name, home = str(run), run.parents[1]
    more = [*SMALL, *BY_PLACE, "--steps", "1", "--name", "next", "--max-new-tokens", "8"]
    level = ["--words", "2", "--problems", "2", "--device", "cpu"]
    return {
        "resume": (train.main, ["--resume", name, "--steps", "3", *BY_PLACE]),
        "continue": (train.main, ["--model", name, *more]),
        "eval": (evaluation.main, ["--model", name, *BY_PLACE, *level]),
        "steps": (inspect.main, [name, "steps"]),
        "step": (inspect.main, [name, "step", "2"]),
        "group": (inspect.main, [name, "group", "2", "0"]),
        "tokens": (inspect.main, [name, "tokens", "2", "0", "0"]),
        "kind": (inspect.main, [name, "step", "0", "--kind", "eval"]),
        "replay": (inspect.main, [name, "replay", "2", *BY_PLACE]),
        "degenerate": (inspect.main, [name, "degenerate"]),
        "report": (report_program.main, [name, "-o", str(home / "report.html")]),
        "audit": (audit.main, [name, *BY_PLACE]),
        "export": (export.main, [name, str(home / "exported")]),
    }


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


def check_case(case, model, home, monkeypatch, capsys):
    home.mkdir()
    monkeypatch.chdir(home)
    case.prepare(home)
    own = [] if "--model" in case.flags else ["--model", str(model)]
    argv = [*QUICK[case.program], *own, *case.flags]
    status = check(case.name, MAINS[case.program], argv, capsys)
    assert status == 2 or case.outcome != REFUSED, case.name
    assert status != 2 or case.outcome != ACCEPTED, case.name


def check_damage(damage, whole, home, monkeypatch, capsys):
    home.mkdir()
    monkeypatch.chdir(home)
    run = copied(whole, home)
    damage.apply(run)
    main, argv = programs(run, whole)[damage.program]
    check(damage.name, main, argv, capsys)

    (outside,) = (home / "outside").iterdir()
    assert outside.read_text() == "precious\n", damage.name


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_model)


@pytest.fixture(scope="session")
def whole(tiny_model, tmp_path_factory):
    flags = ["--model", str(tiny_model), *SMALL, *BY_PLACE, "--max-new-tokens", "8"]
    rhythm = ["--steps", "2", "--eval-every", "1", "--save-every", "1"]
    return whole_run([*flags, *rhythm], tmp_path_factory.mktemp("whole"))


def inputs(model):
    return [*models(model), *datasets(), *texts()]


def test_some_command_lines(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in enumerate(random.Random(0).sample([*command_lines()], 14)):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


def test_some_inputs(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in enumerate(random.Random(0).sample(inputs(tiny_model), 13)):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


def test_some_damaged_runs(whole, tmp_path, monkeypatch, capsys):
    for number, damage in enumerate(random.Random(0).sample(list(damages(whole)), 13)):
        check_damage(damage, whole, tmp_path / str(number), monkeypatch, capsys)


def test_the_whole_run_is_read_by_all_programs(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    for name, (main, argv) in programs(run, whole).items():
        assert check(name, main, argv, capsys) in (0, 3), name


@pytest.mark.slow
def test_all_command_lines_and_inputs(tiny_model, tmp_path, monkeypatch, capsys):
    for number, case in enumerate([*command_lines(), *inputs(tiny_model)]):
        check_case(case, tiny_model, tmp_path / str(number), monkeypatch, capsys)


@pytest.mark.slow
def test_all_damaged_runs(whole, tmp_path, monkeypatch, capsys):
    for number, damage in enumerate(damages(whole)):
        home = tmp_path / str(number % 2)
        check_damage(damage, whole, home, monkeypatch, capsys)
        monkeypatch.chdir(tmp_path)
        remove(home)


def remove(folder):
    """Remove a folder with everything in it, links and pipes too."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


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
def test_no_link_out_of_a_run_is_followed(name, program, whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    outside = tmp_path / "outside" / name
    (run / name).rename(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    (run / name).symlink_to(outside)

    main, argv = programs(run, whole)[program]
    assert check(program, main, argv, capsys) == 2
    assert before == {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}

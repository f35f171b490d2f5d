"""Mistakes that were once accepted, led in a circle, or ended in a traceback."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from hostile import ESCAPE
from small_runs import BY_PLACE, FEW, whole_run
from small_train import fails

from grpo import export, inspect
from grpo import report as report_program
from grpo.tasks import audit
from grpo.tools import evaluation, train

TOP = Path(__file__).resolve().parents[1]
SMALL = [*FEW, *"--words 2 --config {'eval_problems':2} --max-new-tokens 8".split()]
SMALL += "--steps 2 --save-every 1".split()


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    flags = ["--model", str(tiny_model), *SMALL, *BY_PLACE, "--lora-rank", "2"]
    return whole_run(flags, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "runs/whole")
    return Path("runs/whole")


def test_a_run_without_a_checkpoint_is_no_circle(run, tiny_model, capsys):
    shutil.rmtree(run / "checkpoints")
    resume = ["--resume", run, *BY_PLACE]
    assert "start a new run under another name" in fails(capsys, *resume)
    flags = ["--model", tiny_model, *SMALL, *BY_PLACE, "--name", "whole"]
    assert "(rm -r runs/whole)" in fails(capsys, *flags)
    shutil.rmtree(run)
    assert train.main([str(flag) for flag in flags]) in (0, 3)


def test_a_resumed_run_keeps_its_start_and_its_number_of_threads(run):
    """The number decides in which order sums are added."""
    path = run / "config.yaml"
    values = yaml.safe_load(path.read_text())
    threads = torch.get_num_threads()
    assert values["facts"]["threads"] == threads
    values["facts"] |= {"started": "long ago", "resumed": [1]}
    path.write_text(yaml.safe_dump(values))
    torch.set_num_threads(threads % 2 + 1)
    try:
        assert train.main(["--resume", str(run), "--steps", "3", *BY_PLACE]) in (0, 3)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)

    facts = yaml.safe_load(path.read_text())["facts"]
    assert (facts["started"], facts["resumed"], facts["threads"]) == ("long ago", [1, 2], threads)


@pytest.mark.slow
def test_an_adapter_is_described_alike_in_each_process(run, tiny_model):
    written = set()
    for seed in ("1", "2"):  # two orders of a set
        code = (
            "from pathlib import Path; from grpo.model.load import load_policy\n"
            f"policy = load_policy({str(tiny_model)!r}, device='cpu', lora_rank=2)\n"
            f"policy.save(Path('adapter-{seed}'))"
        )
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(TOP), "PATH": "/usr/bin"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        written.add(Path(f"adapter-{seed}/adapter_config.json").read_text())
    assert len(written) == 1


@pytest.mark.slow
def test_a_hostile_name_reaches_no_terminal(run, capsys):
    name = Path("runs") / ESCAPE.replace("/", "")
    run.rename(name)
    last = ["--words", "2", "--problems", "2", "--device", "cpu"]
    for main, argv in (
        (inspect.main, ["steps"]),
        (inspect.main, ["step", "2"]),
        (report_program.main, ["-o", "report.html"]),
        (audit.main, BY_PLACE),
        (export.main, ["exported"]),
        (train.main, ["--steps", "3", *BY_PLACE]),
        (evaluation.main, [*BY_PLACE, *last]),
    ):
        flag = {train.main: ["--resume"], evaluation.main: ["--model"]}.get(main, [])
        assert main([*flag, str(name), *argv]) != 2
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err and "\x9b" not in out + err and "\u202e" not in out + err


# Gives the process half a GB more than it has once the libraries are loaded, whatever these take.
SHORT_OF_MEMORY = """
import resource, runpy, sys
import grpo.run.session
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (1 << 29)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_lack_of_memory_is_one_line(tmp_path):
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(TOP / "train.py")]
    flags = "--words 500 --prompts 200 --preflight off --device cpu --steps 1".split()
    result = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TOP)},
    )
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert result.returncode == 2 and len(lines) == 1 and "memory" in lines[0], result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_ctrl_c_while_loading_is_one_line(program, tmp_path):
    command = [sys.executable, "-X", "importtime", str(TOP / program), "--words", "2"]
    environment = {"PYTHONPATH": str(TOP), "PATH": "/usr/bin"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "torch._" in line:  # torch takes seconds
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and f"{program}: interrupted\n" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("program", "name", "function"),
    [(train, "grpo.run.session", "start_run"), (evaluation, "grpo.tools.evaluate", "report")],
)
def test_ctrl_c_waits_for_the_end_of_an_import(program, name, function, monkeypatch, capsys):
    """One that is broken off ended in an ImportError of transformers, or crashed later."""
    imported = []

    class Slow(ModuleType):
        def __getattr__(self, wanted):
            if wanted != function:
                raise AttributeError(wanted)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # until another thread has taken a signal that this one blocks
            imported.append(wanted)

    monkeypatch.setitem(sys.modules, name, Slow(name))
    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    assert program.main([]) == 130 and imported == [function]
    assert ": interrupted\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program, flags, status",
    [
        ("train", ["--temperature", "hot"], 2),
        ("train", ["--words", "3", "--help"], 0),
        ("train", ["--help-all"], 0),
        ("evaluation", ["--help"], 0),
    ],
)
def test_flags_are_read_before_torch_is_loaded(program, flags, status):
    """Torch takes seconds to load."""
    code = (
        f"import sys, grpo.tools.{program} as tool; sys.argv = ['', *{flags}]\n"
        "try: sys.exit(tool.main())\n"
        "finally: print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (status, "False")
    assert bool(ended.stderr) == bool(status)

"""The benchmarks run at their smallest sizes, and the flags that the pages give them exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import bench_decode
import bench_learning
import bench_step
import pytest
from bench_model import device_name

FOLDER = Path(__file__).with_name("benchmarks")


def run(name, *arguments):
    """Run a benchmark; return what it printed."""
    command = [sys.executable, FOLDER / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_step_is_measured():
    sizes = "--groups 2 --group-size 2 --words 3 --new 4 --steps 2 --sides ours"
    *_, head, row = run("bench_step.py", *sizes.split()).splitlines()
    assert head.split()[:3] == ["first", "step", "s"] and row.startswith("ours ")


@pytest.mark.slow
def test_learning_is_measured(tmp_path):
    sizes = "--level 2 --minutes 0.01 --rates 1e-4 --prompts 2 --group-size 2 --eval-problems 4"
    wanted = [*sizes.split(), "--lora-rank", 0, "--trainers", "ours", "--output", tmp_path]
    *_, row = run("bench_learning.py", "builtin", *wanted).splitlines()
    assert row.startswith("| ours, 1e-4, 0 | ")


def test_lines_that_trl_prints_are_no_lines_of_a_run(tmp_path):
    line = {"step": 0, "seconds": 0.0, "tokens": 0, "score": 0.5}
    said = ["{'train_runtime': '5.542', 'train_loss': '0.007'}", json.dumps(line), "", "\t"]
    (tmp_path / "trl-1e-4-0.jsonl").write_text("\n".join(said))
    options = type("Options", (), {"output": tmp_path})
    assert bench_learning.run(options, "trl", "1e-4", "0") == [line]


@pytest.mark.slow
def test_rollouts_are_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench_decode, "KINDS", ["qwen3", "deepseek_v3"])
    monkeypatch.setattr(bench_decode, "WIDE", {"num_hidden_layers": 4})
    bench_decode.generate_table()
    name, head, _, *rows = capsys.readouterr().out.splitlines()
    assert name == device_name() and head.startswith("| model | width | path ")
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {kind}", width] for kind in ("qwen3", "deepseek_v3") for width in ("64", "1024")
    ]


@pytest.mark.parametrize("bench", [bench_decode, bench_step], ids=lambda bench: bench.__name__)
def test_the_flags_in_the_pages_exist(bench, monkeypatch, capsys):
    pages = [path.read_text() for path in sorted(FOLDER.parents[1].glob("docs/*.md"))]
    said = [
        command for page in pages for command in re.findall(rf"{bench.__name__}\.py([^`]*)`", page)
    ]
    if bench is bench_step:
        (table,) = (
            re.findall(r"and the row's flags\.(.*?)\n## ", page, re.S)
            for page in pages
            if "the row's flags" in page
        )
        said += re.findall("`(.*?)`", table[0])
    flags = {flag for command in said for flag in re.findall(r"--[a-z-]+", command)}

    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit):
        bench.main()
    assert len(flags) > 1 and flags <= {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}

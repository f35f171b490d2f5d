"""metrics.jsonl and the other logs: what is written, read, and dropped on resuming."""

import math

import pytest

from grpo.config import Config
from grpo.records import Completion, Group, StepReport
from grpo.run.logs import MetricsLog, RunFiles, load_run, read_metrics, rewind
from tasks.base import Problem, Score, UserError


def group(texts, rewards):
    return Group(
        4,
        Problem("t", 7, "prompt", "tar\x1bget", "key", {"a": ["x"]}),
        (1, 2),
        1.15,
        [Completion((3, 4), (-0.1, -0.2), text, "stop") for text in texts],
        scores=[Score(reward, {"trap": None}, reward / 2) for reward in rewards],
    )


def write_steps(folder, *steps):
    """Write steps as a run does."""
    files = RunFiles(folder, Config(), 0, print)
    for step in steps:
        groups = [
            group(["good\x1b[31m\n", "bad"], [0.9, 0.1]),
            group(["é → ж", "fair"], [0.5, 0.6]),
        ]
        files.write_step(StepReport(step, {"step": step, "reward": 0.5}, groups))


def test_metrics_are_json_lines(tmp_path):
    log = MetricsLog(tmp_path)
    log.append({"step": 1, "loss": 0.1, "kl": math.nan, "grad_norm": math.inf})
    log.append({"step": 2, "stopped": "ä\u2028"})
    assert read_metrics(log.path) == [
        {"step": 1, "loss": 0.1, "kl": None, "grad_norm": None},
        {"step": 2, "stopped": "ä\u2028"},
    ]


@pytest.mark.parametrize("damage", ['{"step": 1', "[]", '{"loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_run_goes_back_to_a_step_in_all_its_files(tmp_path):
    (tmp_path / "config.yaml").touch()
    write_steps(tmp_path, 1, 10, 11)
    write_half = ["metrics.jsonl", "groups.jsonl"]
    for name in write_half:
        with open(tmp_path / name, "ab") as file:
            file.write('{"step": 12, "é'.encode()[:-1])
    half = [tmp_path / ".config.yaml.7.partial", tmp_path / "rollouts" / ".x.7.partial"]
    report = tmp_path / ".report.html.7.partial"  # perhaps another process writes it now
    for path in (*half, report):
        path.touch()

    rewind(tmp_path, 10)
    run = load_run(tmp_path)
    assert [line["step"] for line in run.metrics] == run.steps() == [1, 10]
    assert {record["step"] for record in run.group_index} == {1, 10}
    assert not any(path.exists() for path in half) and report.exists()


def test_samples_hold_best_and_worst_of_every_tenth_step(tmp_path):
    write_steps(tmp_path, 1, 5, 10, 20)
    text = (tmp_path / "samples.log").read_text()
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("===")]
    assert heads == ["1", "10", "20"]
    assert "best: reward 0.9000, score 0.4500, stop, level 7" in text
    assert "worst: reward 0.1000" in text and "fair" not in text
    assert "good\\x1b[31m\\n" in text and "tar\\x1bget" in text and "\x1b" not in text


def test_samples_go_on_wherever_the_writer_was_stopped(tmp_path):
    """In a header, in a character of two or three bytes, anywhere."""
    path = tmp_path / "samples.log"
    write_steps(tmp_path, 1)
    first = path.read_bytes()
    write_steps(tmp_path, 10)
    whole = path.read_bytes()
    for end in range(len(first), len(whole) + 1, 3):
        path.write_bytes(whole[:end])
        rewind(tmp_path, 1)
        assert path.read_bytes() == first

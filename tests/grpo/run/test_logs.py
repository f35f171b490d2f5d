"""metrics.jsonl, eval.jsonl, samples.log and the rollout files."""

import math

import pytest

from data.files import read_jsonl_zst
from grpo.records import Completion, Group
from grpo.run.logs import MetricsLog, SamplesLog, read_metrics
from grpo.run.rollouts import write_rollouts
from tasks.base import Problem, Score, UserError


def test_metrics_are_json_lines(tmp_path):
    log = MetricsLog(tmp_path)
    log.append({"step": 1, "loss": 0.1, "kl": math.nan, "grad_norm": math.inf})
    log.append({"step": 2, "stopped": "ä\u2028"})
    assert read_metrics(log.path) == [
        {"step": 1, "loss": 0.1, "kl": None, "grad_norm": None},
        {"step": 2, "stopped": "ä\u2028"},
    ]


def test_later_lines_and_a_cut_one_are_dropped(tmp_path):
    log = MetricsLog(tmp_path, "eval.jsonl")
    for step in (0, 10, 20):
        log.append({"step": step, "purpose": "verdict"})
    with open(log.path, "a") as file:
        file.write('{"step": 30, "re')
    assert [line["step"] for line in read_metrics(log.path)] == [0, 10, 20]
    log.truncate_after(10)
    log.append({"step": 11, "purpose": "verdict"})
    assert [line["step"] for line in read_metrics(log.path)] == [0, 10, 11]


@pytest.mark.parametrize("damage", ['{"step": 1', "[]", '{"loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def group(texts, rewards, **more):
    return Group(
        4,
        Problem("t", 7, "prompt", "tar\x1bget", "key", {"a": ["x"]}),
        (1, 2),
        1.15,
        [Completion((3, 4), (-0.1, -0.2), text, "stop") for text in texts],
        scores=[Score(reward, {"trap": None}, reward / 2) for reward in rewards],
        **more,
    )


def test_samples_hold_best_and_worst(tmp_path):
    log = SamplesLog(tmp_path, every=10)
    for step in (1, 5, 10, 20):
        log.append(
            step,
            [group(["good\x1b[31m\n", "bad"], [0.9, 0.1]), group(["middling", "fair"], [0.5, 0.6])],
        )
    text = log.path.read_text()
    assert [line.split()[2] for line in text.splitlines() if line.startswith("===")] == [
        "1",
        "10",
        "20",
    ]
    assert (
        "best: reward 0.9000, score 0.4500, stop, level 7" in text
        and "worst: reward 0.1000" in text
    )
    assert (
        "good\\x1b[31m\\n" in text
        and "tar\\x1bget" in text
        and "\x1b" not in text
        and "middling" not in text
    )
    log.truncate_after(10)
    assert [
        line.split()[2] for line in log.path.read_text().splitlines() if line.startswith("===")
    ] == ["1", "10"]


def test_rollout_lines_hold_what_the_readme_says(tmp_path):
    path = tmp_path / "step-000003.jsonl.zst"
    write_rollouts(path, [group(["a", "b"], [0.9, 0.1], advantages=[1.0, -1.0])], step=3)
    (line,) = read_jsonl_zst(path)
    assert set(line) == {
        "step",
        "group",
        "index",
        "attempt",
        "task",
        "level",
        "temperature",
        "class",
        "action",
        "trap",
        "problem",
        "prompt_tokens",
        "completions",
    }
    assert line["completions"][1] == {
        "tokens": [3, 4],
        "logprobs": [-0.1, -0.2],
        "text": "b",
        "finish": "stop",
        "reward": 0.1,
        "value": 0.05,
        "exact": False,
        "advantage": -1.0,
        "parts": {"trap": None},
    }


def test_samples_go_on_wherever_the_writer_was_stopped(tmp_path):
    """In a header, in a character of two or three bytes, anywhere."""
    log = SamplesLog(tmp_path, every=1)
    log.append(1, [group(["é → ж"], [0.5])])
    first = log.path.read_bytes()
    log.append(2, [group(["é → ж"], [0.5])])
    whole = log.path.read_bytes()
    for end in range(len(first), len(whole) + 1):
        log.path.write_bytes(whole[:end])
        log.truncate_after(1)
        assert log.path.read_bytes() == first

"""Logs and rollouts: what is written, read, and dropped on resuming."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.config import Config
from grpo.data.files import read_jsonl_zst
from grpo.records import Completion, Group, StepReport
from grpo.run.logs import (
    RunFiles,
    append_lines,
    groups_of,
    load_run,
    read_metrics,
    rewind,
    write_rollouts,
)
from grpo.tasks.base import Problem, Score, UserError


def group(texts, rewards=(0.0, 1.0), logprob=-0.25):
    return Group(
        4,
        Problem("t", 7, texts[0], f"tar\x1bget {texts[-1]}", "key", {"a": texts}),
        (1, 2),
        1.15,
        [Completion(tuple(range(9)), (logprob,) * 9, text, "stop") for text in texts],
        scores=[Score(reward, {"trap": None}, reward / 2) for reward in rewards],
        advantages=[-1.0, 1.0],
    )


def write_steps(folder, *steps):
    """Write steps as a run does."""
    files = RunFiles(folder, Config())
    for step in steps:
        groups = [
            group(["good\x1b[31m\n", "bad"], [0.9, 0.1]),
            group(["é → ж", "fair"], [0.5, 0.6]),
        ]
        files.write_step(StepReport(step, {"step": step, "reward": 0.5}, groups))


def test_metrics_are_json_lines(tmp_path):
    log = tmp_path / "metrics.jsonl"
    append_lines(log, {"step": 1, "loss": 0.1, "kl": math.nan, "grad_norm": math.inf})
    append_lines(log, {"step": 2, "stopped": "ä\u2028"})
    assert read_metrics(log) == [
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
    for name in ("metrics.jsonl", "groups.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write('{"step": 12, "é'.encode()[:-1])
    half = [tmp_path / ".config.yaml.7.partial", tmp_path / "rollouts" / ".x.7.partial"]
    report = tmp_path / ".report.html.7.partial"  # perhaps another process writes it now
    for path in (*half, report):
        path.touch()

    said = rewind(tmp_path, 10)
    assert [line.partition(": ")[2] for line in said] == [
        "lacks steps or has them twice, 2 lines of 10 steps; figures of the run are computed from "
        "them"
    ] * 2
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
        assert rewind(tmp_path, 1) == []
        assert path.read_bytes() == first


# Rollouts, under damage and at the edges of what floats and texts can be.


WILD = st.text(st.characters() | st.sampled_from("\x00\x1b\r\n\x85\u2028\ufeff"))


FLOATS = st.floats(allow_nan=False)


@given(
    st.lists(WILD, min_size=2, max_size=2),
    FLOATS,
    st.lists(st.tuples(st.integers(0, 99), FLOATS), max_size=3).map(tuple),
    st.lists(FLOATS, min_size=9, max_size=9),
)
def test_wild_texts_and_extreme_floats_come_back_exactly(
    tmp_path_factory, texts, number, credits, advantages
):
    """Also where a word has a credit, and a token an advantage."""
    path = tmp_path_factory.getbasetemp() / "step-000001.jsonl.zst"
    groups = [group(texts, logprob=number), group(texts[::-1])]
    groups[1].scores = [Score(0.5, credits=credits), Score(1.0, credits=())]
    groups[1].advantages = [advantages, advantages[::-1]]
    write_rollouts(path, groups, step=1)
    back = groups_of(path)
    assert back == groups
    assert repr(back) == repr(groups)  # -0.0 and 0.0 are equal, and are not the same number


def test_no_flipped_bit_passes_for_what_was_written(tmp_path):
    path = tmp_path / "step-000001.jsonl.zst"
    groups = [group(["one two three", "three two one"])]
    write_rollouts(path, groups, step=1)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with suppress(UserError):  # a bit of the frame's header may mean nothing
            assert groups_of(path) == groups, position


def test_rollout_lines_hold_what_the_docs_say(tmp_path):
    path = tmp_path / "step-000003.jsonl.zst"
    write_rollouts(path, [group(["a", "b"])], step=3)
    (line,) = read_jsonl_zst(path)
    assert set(line) == set(
        "step group index task level temperature class action trap problem prompt_tokens "
        "completions".split()
    )
    assert line["completions"][1] == {
        "tokens": list(range(9)),
        "logprobs": [-0.25] * 9,
        "text": "b",
        "finish": "stop",
        "reward": 1.0,
        "value": 0.5,
        "exact": False,
        "advantage": 1.0,
        "parts": {"trap": None},
    }

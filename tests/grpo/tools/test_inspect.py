"""A run read back: load_run, and every command of grpo.inspect."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
from report_runs import group
from small_runs import whole_run

from grpo import inspect, load_run
from grpo.data.errors import UserError
from grpo.records import summaries
from grpo.run.logs import append_lines, groups_of, read_metrics, write_rollouts
from grpo.tasks.base import Score

STEPS, PROMPTS, SIZE = 3, 2, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of three steps: checkpoints of steps 1 and 3, an evaluation before and after."""
    flags = (
        f"--words 5 --steps {STEPS} --prompts {PROMPTS} --group-size {SIZE} --save-every 1 "
        "--preflight off --config {'eval_problems':2} --device cpu"
    )
    run = whole_run(flags.split(), tmp_path_factory.mktemp("inspect"))
    for path in (run / "checkpoints").iterdir():
        if path.name[-1] not in "13":
            shutil.rmtree(path)
    return run


@pytest.fixture
def copied(run, tmp_path):
    """The run, to be damaged."""
    return shutil.copytree(run, tmp_path / "r")


@pytest.fixture
def made(tmp_path):
    """A run written by hand: two steps, one group that varies, one solved, one tied."""
    folder = tmp_path / "made"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: t\nreward: prefix\n")
    varied = group(
        ("a b c d", 1.0), ("a x c d", 0.25), ("a b c d", 1.0), advantages=[0.5, -1.0, 0.5]
    )
    solved = group(("a b c d", 1.0), ("a b c d", 1.0), class_name="solved", action="skip")
    tied = group(
        ("a", 0.25),
        ("a x", 0.25),
        class_name="tied",
        action="skip",
        trap="stops half way",
    )
    for step, groups in ((1, [varied, solved]), (2, [tied])):
        write_rollouts(folder / "rollouts" / f"step-{step:06d}.jsonl.zst", groups, step=step)
        append_lines(folder / "groups.jsonl", {"step": step, "groups": summaries(groups)})
    return folder


def said(capsys, *argv, status=0):
    assert inspect.main([str(part) for part in argv]) == status
    return capsys.readouterr()


def test_what_a_run_holds(run):
    data = load_run(run)
    assert data.metrics == read_metrics(run / "metrics.jsonl") and len(data.metrics) == STEPS
    *evals, verdict = read_metrics(run / "eval.jsonl")
    assert data.evals == evals and data.verdict == verdict and data.config["level"] == 5
    assert data.steps() == list(range(1, STEPS + 1))
    assert data.steps("eval") == [0, STEPS] and data.steps("failed") == []
    assert data.groups(2) == groups_of(run / "rollouts" / "step-000002.jsonl.zst")

    one = data.rollouts(step=2, group=1)
    assert [(r["step"], r["group"], r["sample"]) for r in one] == [(2, 1, i) for i in range(SIZE)]
    assert [r["reward"] for r in one] == data.group(2, 1).rewards
    assert [r["text"] for r in one] == data.group(2, 1).texts
    assert len(data.rollouts()) == STEPS * PROMPTS * SIZE
    assert data.rollouts(step=numpy.int64(2), group=1) == one
    json.dumps(data.rollouts(step=numpy.array([1, 3])))
    for read in (data.steps, lambda kind: data.rollouts(kind=kind)):
        with pytest.raises(UserError, match="^rollouts of kind 'evals': give one of step, eval, "):
            read("evals")


def test_torch_is_not_imported(run):
    code = (
        f"import sys, grpo.inspect as i; assert i.main(['{run}', 'steps']) == 0; assert "
        f"not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_steps(run, capsys):
    lines = said(capsys, run, "steps").out.strip().split("\n")
    assert len(lines) == STEPS + 1 and "reward" in lines[0]
    assert f"{load_run(run).metrics[0]['reward']:.3f}" in lines[1]


def test_step(made, run, capsys):
    text = said(capsys, made, "step", 1).out
    for words in ("0.750", "-1.00 to +0.50", "varied  kept", "solved  skipped"):
        assert words in text
    # Only groups of training have a class.
    assert "kept" not in said(capsys, run, "step", 0, "--kind", "eval").out


def test_group_says_why_a_completion_was_paid(made, capsys):
    text = said(capsys, made, "group", 1, 0).out
    for words in (
        "completions 0, 2  reward 1.000 (prefix), score 1.000, advantage +0.500",
        "right to the end",
        "completion 1  reward 0.250 (prefix)",
        "word 2: wrote 'x' for 'b', matches 4\n",
        "a [-b-]{+x+} c d",
    ):
        assert words in text
    assert text.index("completions 0, 2") < text.index("completion 1 ") and "\x1b" not in text
    assert "advantage none" in said(capsys, made, "group", 2, 0).out


def test_tokens(run, made, capsys):
    completion = load_run(run).group(1, 0).completions[2]
    _, *lines = said(capsys, run, "tokens", 1, 0, 2).out.rstrip("\n").split("\n")
    assert [int(line.split()[1]) for line in lines] == list(completion.tokens)
    assert f"{completion.logprobs[0]:.4f}" in lines[0]
    assert completion.text.split()[0].startswith(lines[0].split()[-1])
    # A run without a checkpoint has no tokenizer.
    assert "-2.5000" in said(capsys, made, "tokens", 1, 0, 1).out


def test_credits_of_tokens_are_shown(made, capsys):
    by_token = group(("a b", 0.5), ("b", 0.0), advantages=[[0.1, 0.2, 0.3], [0.05, 0.2, 0.2]])
    write_rollouts(made / "rollouts" / "step-000003.jsonl.zst", [by_token], step=3)
    _, *lines = said(capsys, made, "tokens", 3, 0, 0).out.splitlines()
    assert [line.split()[-1] for line in lines] == ["+0.100", "+0.200", "+0.300"]
    assert "advantage +0.100 to +0.300 by token" in said(capsys, made, "group", 3, 0).out
    assert "+0.05 to +0.30" in said(capsys, made, "step", 3).out


def test_degenerate(made, capsys):
    text = said(capsys, made, "degenerate").out
    for words in (
        "all right",
        "different texts, equal rewards",
        "skipped",
        "stops half way",
    ):
        assert words in text
    assert "varied" not in text and text.count("\n") == 3

    path = made / "groups.jsonl"
    lines = path.read_text()
    for damage in ('"action"', '"class"'):
        path.write_text(lines.replace(damage, '"other"'))
        err = said(capsys, made, "degenerate", status=2).err
        assert f"{path}, line 1, groups: is not what a run writes" in err and damage[1:-1] in err


@pytest.mark.parametrize("step", [1, 3])  # from the first model; from a checkpoint two steps before
def test_replay_makes_a_step_again_to_the_bit(run, step, capsys):
    text = said(capsys, run, "replay", step).out
    assert "identical to the last bit" in text and "no" not in text.split()
    assert {"loss", "grad_norm", "advantages,"} <= set(text.split())


def test_replay_says_that_the_policy_after_imitation_is_missing(copied, capsys):
    line = {"step": 0, "from": 1, "to": 1, "kind": "imitation", "why": ""}
    (copied / "curriculum.jsonl").write_text(json.dumps(line) + "\n")
    err = said(capsys, copied, "replay", 1, status=2).err
    assert "step 1 is not replayable: the run imitated right answers before its first step" in err


def test_a_run_without_steps_is_one_line(copied, capsys):
    (copied / "metrics.jsonl").write_text("")
    (copied / "groups.jsonl").write_text("")
    shutil.rmtree(copied / "rollouts")
    err = said(capsys, copied, "steps", status=2).err
    assert err == f"grpo.inspect: {copied}: the run has made no step yet\n"


def test_replay_sees_a_changed_reward_and_a_changed_figure(copied, capsys):
    config = copied / "config.yaml"  # one process repeats what several ranks made
    config.write_text(config.read_text().replace("shard: false", "shard: true"))
    path = copied / "rollouts" / "step-000003.jsonl.zst"
    groups = groups_of(path)
    kept = next(group for group in groups if group.action == "keep")
    kept.scores[0] = Score(kept.scores[0].reward + 0.125, kept.scores[0].parts)
    write_rollouts(path, groups, step=3)
    out = said(capsys, copied, "replay", 3, status=1).out
    assert re.search(r"advantages, from the stored rewards +no *$", out, re.MULTILINE)
    path = copied / "rollouts" / "step-000001.jsonl.zst"
    groups = groups_of(path)
    score = groups[0].scores[0]
    groups[0].scores[0] = replace(score, value=1.0 if score.value < 0.5 else 0.0)
    write_rollouts(path, groups, step=1)
    out = said(capsys, copied, "replay", 1, status=1).out
    assert (
        re.search(r"advantages, from the stored rewards +yes *$", out, re.MULTILINE)
        and "it differs" in out
    )
    groups[0].scores[0] = score

    completion = groups[0].completions[0]
    groups[0].completions[0] = replace(completion, text="another text")
    write_rollouts(path, groups, step=1)
    out = said(capsys, copied, "replay", 1, status=1).out
    assert re.search(r"texts, from the stored tokens +no *$", out, re.MULTILINE)

    lines = read_metrics(copied / "metrics.jsonl")
    lines[1]["loss"] += 1e-12
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "it differs" in said(capsys, copied, "replay", 2, status=1).out


def test_what_is_not_there_is_said_in_one_line(run, copied, tmp_path, capsys):
    for argv, words in [
        ((tmp_path / "none", "steps"), "not a run"),
        ((run, "step", 99), "no rollouts of step 99 are stored; it has 1, 2, 3"),
        ((run, "group", 1, 9), "step 1 has no group 9; it has 0 to 1"),
        ((run, "group", 1, -1), "has no group -1"),
        ((run, "tokens", 1, 0, 9), "no completion 9; it has 0 to 3"),
        ((run, "replay", 99), "step 99 is not in metrics.jsonl"),
        ((run, "look"), "invalid choice"),
        ((run, "step", "x"), "invalid int"),
        ((run, "step", 2, "--kind", "eval"), "no rollouts of eval 2 are stored; it has 0, 3"),
        ((run, "step", 1, "--kind", "failed"), "no rollouts of failed 1 are stored; it has none"),
    ]:
        found = said(capsys, *argv, status=2)
        assert words in found.err and found.err.count("\n") == 1 and not found.out
    (copied / "rollouts" / "step-000002.jsonl.zst").write_bytes(b"cut")
    assert "step-000002.jsonl.zst" in said(capsys, copied, "step", 2, status=2).err
    (copied / "config.yaml").write_text("[1")
    assert "config.yaml: not valid YAML" in said(capsys, copied, "why", 1, 0, 0, status=2).err

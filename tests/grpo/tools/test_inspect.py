"""A run read back: load_run, and every command of grpo.inspect."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from data.errors import UserError
from grpo import load_run
from grpo.records import Completion, Group
from grpo.run.logs import MetricsLog, groups_of, read_metrics, write_rollouts
from grpo.show.group import summaries
from grpo.tools import inspect, train
from tasks.base import Problem, Score

STEPS, PROMPTS, SIZE = 5, 3, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of five steps: checkpoints of steps 2 and 4 and the last, an evaluation before
    and after.
    """
    home = tmp_path_factory.mktemp("inspect")
    flags = (
        f"--words 10 --steps {STEPS} --prompts {PROMPTS} --group-size {SIZE} --save-every 2 "
        "--preflight off --eval-problems 4 --device cpu --name r"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train.main(flags.split()) == 0
    for path in (home / "runs" / "r" / "checkpoints").iterdir():
        if path.name[-1] not in "245":  # saved for its reward
            shutil.rmtree(path)
    return home / "runs" / "r"


@pytest.fixture
def copied(run, tmp_path):
    """The run, to be damaged."""
    return shutil.copytree(run, tmp_path / "r")


def group(*rows, target="a b c d", advantages=(), **facts):
    """Return a group whose completions are (text, reward)."""
    scores = [Score(reward, {"matches": len(text.split()), "trap": None}) for text, reward in rows]
    completions = [Completion((7, 8, 3), (-0.5, -0.25, -2.5), text, "stop") for text, _ in rows]
    return Group(
        0,
        Problem("t", 4, "Do \x1b[31mit", target, "k1"),
        (1, 2),
        1.0,
        completions,
        scores=scores,
        advantages=list(advantages),
        **facts,
    )


@pytest.fixture
def made(tmp_path):
    """A run written by hand: two steps, one group that varies, one solved, one tied at its second
    try.
    """
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
        attempt=1,
        trap="stops half way",
    )
    for step, groups in ((1, [varied, solved]), (2, [tied])):
        write_rollouts(folder / "rollouts" / f"step-{step:06d}.jsonl.zst", groups, step=step)
        MetricsLog(folder, "groups.jsonl").append({"step": step, "groups": summaries(groups)})
    return folder


def said(capsys, *argv, status=0):
    assert inspect.main([str(part) for part in argv]) == status
    return capsys.readouterr()


def test_what_a_run_holds(run):
    data = load_run(run)
    assert data.metrics == read_metrics(run / "metrics.jsonl") and len(data.metrics) == STEPS
    *evals, verdict = read_metrics(run / "eval.jsonl")
    assert data.evals == evals and data.verdict == verdict and data.config["level"] == 10
    assert (
        data.steps() == list(range(1, STEPS + 1))
        and data.steps("eval") == [0, STEPS]
        and data.steps("failed") == []
    )
    assert data.groups(2) == groups_of(run / "rollouts" / "step-000002.jsonl.zst")
    one = data.rollouts(step=2, group=1)
    assert [(r["step"], r["group"], r["sample"]) for r in one] == [(2, 1, i) for i in range(SIZE)]
    assert [r["reward"] for r in one] == data.group(2, 1).rewards and one[0]["text"] == data.group(
        2, 1
    ).completions[0].text
    assert (
        len(data.rollouts()) == STEPS * PROMPTS * SIZE
        and len(data.rollouts(step=[1, 3])) == 2 * PROMPTS * SIZE
    )
    json.dumps(data.rollouts())
    assert data.rollouts(step=numpy.int64(2), group=1) == one
    json.dumps(data.rollouts(step=numpy.array([1, 3])))
    for read in (
        data.steps,
        lambda kind: data.rollouts(kind=kind),
        lambda kind: data.groups(1, kind),
    ):
        with pytest.raises(UserError, match="^rollouts of kind 'evals': give one of step, eval, "):
            read("evals")


def test_the_index_of_groups_is_that_of_the_rollouts(copied):
    written = load_run(copied).group_index
    assert written == [
        {"step": step, **line}
        for step in range(1, STEPS + 1)
        for line in summaries(load_run(copied).groups(step))
    ]


def test_records_as_a_data_frame(run, monkeypatch):
    metrics = load_run(run).metrics
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pandas is not installed"):
        metrics.to_pandas()
    monkeypatch.setitem(
        sys.modules,
        "pandas",
        type("pandas", (), {"DataFrame": type("F", (), {"from_records": staticmethod(list)})}),
    )
    assert metrics.to_pandas() == metrics


def test_torch_is_not_imported(run):
    code = (
        f"import sys, grpo.tools.inspect as i; assert i.main(['{run}', 'steps']) == 0; assert "
        f"not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_steps(run, capsys):
    text = said(capsys, run, "steps").out
    lines = text.strip().split("\n")
    assert (
        len(lines) == STEPS + 2
        and "reward" in lines[0]
        and lines[-1] == f"next: python -m grpo.inspect {run} step {STEPS}"
    )
    assert f"{load_run(run).metrics[0]['reward']:.3f}" in lines[1]
    assert [
        line["step"]
        for line in json.loads(
            said(capsys, run, "steps", "--from", 2, "--to", 4, "--last", 2, "--json").out
        )
    ] == [3, 4]
    assert "no such steps" in said(capsys, run, "steps", "--level", 99, status=2).err


def test_step(made, capsys):
    text = said(capsys, made, "step", 1).out
    assert (
        "-1.00 to +0.50" in text
        and "varied  kept" in text
        and "solved  skipped" in text
        and text.strip().endswith("group 1 0")
    )
    lines = json.loads(said(capsys, made, "step", 1, "--json").out)
    assert [(line["class"], line["distinct"], line["reward"]) for line in lines] == [
        ("varied", 2, 0.75),
        ("solved", 1, 1.0),
    ]


def test_group_says_why_a_completion_was_paid(made, capsys):
    text = said(capsys, made, "group", 1, 0).out
    assert (
        "completions 0, 2  reward 1.000 (prefix), score 1.000, advantage +0.500" in text
        and "right to the end" in text
    )
    assert (
        "completion 1  reward 0.250 (prefix)" in text
        and "word 2: wrote 'x' for 'b'; matches 4\n" in text
        and "a [-b-]{+x+} c d" in text
    )
    assert text.index("completions 0, 2") < text.index("completion 1 ") and "\x1b" not in text
    lines = json.loads(said(capsys, made, "group", 1, 0, "--json").out)
    assert [line["sample"] for line in lines] == [0, 2, 1] and lines[2][
        "first_divergence"
    ] == "word 2: wrote 'x' for 'b'"
    assert "advantage none" in said(capsys, made, "group", 2, 0).out


def test_tokens(run, made, capsys):
    drawn = load_run(run).group(1, 0)
    lines = json.loads(said(capsys, run, "tokens", 1, 0, 2, "--json").out)
    assert [line["token"] for line in lines] == list(drawn.completions[2].tokens) and lines[0][
        "logprob"
    ] == drawn.completions[2].logprobs[0]
    assert "".join(line["text"] for line in lines).startswith(
        drawn.completions[2].text.split(" ")[0]
    )
    assert (
        "-2.5000" in said(capsys, made, "tokens", 1, 0, 1).out
    )  # a run without a checkpoint has no tokenizer


def test_credits_of_tokens_are_shown(made, capsys):
    by_token = group(("a b", 0.5), ("b", 0.0), advantages=[[0.1, 0.2, 0.3], [0.05, 0.2, 0.2]])
    write_rollouts(made / "rollouts" / "step-000003.jsonl.zst", [by_token], step=3)
    assert [
        line["advantage"]
        for line in json.loads(said(capsys, made, "tokens", 3, 0, 0, "--json").out)
    ] == [0.1, 0.2, 0.3]
    assert (
        "advantage +0.100 to +0.300 by token" in said(capsys, made, "group", 3, 0).out
        and "+0.05 to +0.30" in said(capsys, made, "step", 3).out
    )


def test_degenerate(made, capsys):
    text = said(capsys, made, "degenerate").out
    assert (
        "all right" in text
        and "different texts, equal rewards" in text
        and "skipped (try 2)" in text
        and "stops half way" in text
    )
    assert "2 of 3 groups" in text and "varied" not in text
    assert "1 of 1 groups" in said(capsys, made, "degenerate", "--from", 2).out
    assert [
        line["step"]
        for line in json.loads(said(capsys, made, "degenerate", "--class", "tied", "--json").out)
    ] == [2]
    assert [
        line["step"]
        for line in json.loads(said(capsys, made, "degenerate", "--last", 1, "--json").out)
    ] == [2]
    assert "no such group" in said(capsys, made, "degenerate", "--class", "failed").out


def test_compare(run, copied, capsys):
    rows = json.loads(said(capsys, run, "compare", copied, "--json").out)
    assert (
        len(rows) == 2
        and rows[0] == rows[1]
        and rows[0]["steps"] == STEPS
        and "at 10" in rows[0]["held-out score after"]
    )
    assert "million tokens" in said(capsys, run, "compare", copied).out


def test_before_and_after_are_of_the_same_level(run, copied, capsys):
    lines = (copied / "eval.jsonl").read_text().splitlines()
    easier = [json.dumps(json.loads(line) | {"level": 5}) for line in lines]
    harder = [json.dumps(json.loads(line) | {"level": 50}) for line in lines]
    for more, level in ((easier + lines + harder, "10"), (easier + harder, "50")):
        (copied / "eval.jsonl").write_text("\n".join([*more, ""]))
        _, row = json.loads(said(capsys, run, "compare", copied, "--json").out)
        ends = {row[f"held-out score {when}"].split()[-1] for when in ("before", "after")}
        assert ends == {level}


def test_an_evaluation_that_was_not_made_is_not_compared(run, copied, capsys):
    first, *_ = (copied / "eval.jsonl").read_text().splitlines()
    for kept, is_there in ((f"{first}\n", [True, False]), ("", [False, False])):
        (copied / "eval.jsonl").write_text(kept)
        _, row = json.loads(said(capsys, run, "compare", copied, "--json").out)
        scores = [row[f"held-out score {when}"] for when in ("before", "after")]
        assert [score is not None for score in scores] == is_there
        last = said(capsys, run, "compare", copied).out.splitlines()[-1]
        assert last.startswith("held-out score after ") and last.split()[-1] == "-"


def test_export(run, tmp_path, capsys):
    records = load_run(run).rollouts(step=[4, 5])
    said(capsys, run, "export", tmp_path / "a.jsonl", "--last", 2)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == records
    said(capsys, run, "export", tmp_path / "a.csv", "--from", 4)
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [r["text"] for r in records] and json.loads(
        rows[0]["logprobs"]
    ) == records[0]["logprobs"]
    assert "0 completions" in said(capsys, run, "export", tmp_path / "none.csv", "--from", 99).out
    err = said(capsys, run, "export", tmp_path / "a.xls", status=2).err
    assert "ends in .csv or .jsonl" in err


def test_an_export_that_fails_leaves_the_older_file(run, tmp_path, capsys):
    """Half a table would look like a whole one."""
    broken = Path(shutil.copytree(run, tmp_path / "run"))
    sorted((broken / "rollouts").glob("step-*"))[-1].write_bytes(b"damaged")
    path = tmp_path / "a.csv"
    path.write_text("older")
    said(capsys, broken, "export", path, status=2)
    assert path.read_text() == "older"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "run"]


def test_an_export_does_not_replace_a_file_of_the_run(copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    err = said(capsys, copied, "export", copied / "metrics.jsonl", status=2).err
    assert "metrics.jsonl: belongs to the run in " in err
    assert (copied / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", [1, 4])  # from the first model; from a checkpoint two steps before
def test_replay_makes_a_step_again_to_the_bit(run, step, capsys):
    text = said(capsys, run, "replay", step).out
    assert "identical to the last bit" in text and "no" not in text.split()
    (found,) = json.loads(said(capsys, run, "replay", step, "--json").out)
    assert found["same"] and {line["figure"] for line in found["figures"]} >= {
        "loss",
        "grad_norm",
        "advantages",
    }


def test_only_groups_of_training_have_a_class(run, capsys):
    assert "kept" in said(capsys, run, "step", 1).out
    assert "kept" not in said(capsys, run, "step", 0, "--kind", "eval").out


def test_the_steps_of_other_rollouts_are_listed(run, capsys):
    err = said(capsys, run, "step", 2, "--kind", "eval", status=2).err
    assert err.endswith("no rollouts of eval 2 are stored; it has 0, 5\n")


def test_a_run_without_steps_is_one_line(copied, capsys):
    (copied / "metrics.jsonl").write_text("")
    (copied / "groups.jsonl").write_text("")
    shutil.rmtree(copied / "rollouts")
    for command in (["steps"], ["degenerate"], ["compare", copied]):
        err = said(capsys, copied, *command, status=2).err
        assert err == f"grpo.inspect: {copied}: the run has made no step yet\n"


def test_replay_sees_a_changed_reward_and_a_changed_figure(copied, capsys):
    path = copied / "rollouts" / "step-000003.jsonl.zst"
    groups = groups_of(path)
    kept = next(group for group in groups if group.action == "keep")
    kept.scores[0] = Score(kept.scores[0].reward + 0.125, kept.scores[0].parts)
    write_rollouts(path, groups, step=3)
    assert (
        "advantages from the stored rewards: they differ"
        in said(capsys, copied, "replay", 3, status=1).out
    )
    path = copied / "rollouts" / "step-000001.jsonl.zst"
    groups = groups_of(path)
    score = groups[0].scores[0]
    groups[0].scores[0] = replace(score, value=1.0 if score.value < 0.5 else 0.0)
    write_rollouts(path, groups, step=1)
    out = said(capsys, copied, "replay", 1, status=1).out
    assert "advantages from the stored rewards: they are the same" in out and "it differs" in out
    groups[0].scores[0] = score

    completion = groups[0].completions[0]
    groups[0].completions[0] = replace(completion, text="another text")
    write_rollouts(path, groups, step=1)
    out = said(capsys, copied, "replay", 1, status=1).out
    assert "texts from the stored tokens: they differ" in out

    lines = read_metrics(copied / "metrics.jsonl")
    lines[1]["loss"] += 1e-12
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "it differs" in said(capsys, copied, "replay", 2, status=1).out


def test_what_is_not_there_is_said_in_one_line(run, copied, tmp_path, capsys):
    for argv, words in [
        ((tmp_path / "none", "steps"), "not a run"),
        ((run, "step", 99), "no rollouts of step 99 are stored; it has 1 to 5"),
        ((run, "group", 1, 9), "step 1 has no group 9; it has 0 to 2"),
        ((run, "group", 1, -1), "has no group -1"),
        ((run, "tokens", 1, 0, 9), "no completion 9; it has 0 to 3"),
        ((run, "replay", 99), "step 99 is not in metrics.jsonl"),
        ((run, "look"), "invalid choice"),
        ((run, "step", "x"), "invalid int"),
        ((run, "step", 1, "--kind", "failed"), "no rollouts of failed 1 are stored; it has none"),
    ]:
        found = said(capsys, *argv, status=2)
        assert words in found.err and found.err.count("\n") == 1 and not found.out
    (copied / "rollouts" / "step-000002.jsonl.zst").write_bytes(b"cut")
    assert "step-000002.jsonl.zst" in said(capsys, copied, "step", 2, status=2).err
    (copied / "config.yaml").write_text("[1")
    assert "config.yaml: not valid YAML" in said(capsys, copied, "compare", run, status=2).err

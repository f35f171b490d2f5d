"""The audit on a real small run: nothing in it as it is, and each planted leak found."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import whole_run
from small_train import fails

from grpo.data.files import read_jsonl_zst, write_jsonl_zst
from grpo.tasks.audit import audit, main
from grpo.tools import train

ROLLOUTS = "rollouts/{}.jsonl.zst"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    flags = (
        "--task arithmetic --family product --level 22 --prompts 3 --group-size 2 --steps 3 "
        "--preflight off --save-every 2 --device cpu "
        "--config {'eval_problems':5,'dynamic_sampling':0}"
    )
    return whole_run(flags.split(), tmp_path_factory.mktemp("audited"))


@pytest.fixture()
def run(clean, tmp_path):
    return Path(shutil.copytree(clean, tmp_path / "run"))


def rewrite(path, change):
    lines = read_jsonl_zst(path)
    change(lines)
    write_jsonl_zst(path, lines)


def rewrite_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def the_first_problem(run):
    return read_jsonl_zst(run / ROLLOUTS.format("step-000001"))[0]["problem"]


def test_a_real_run_is_clean(clean, capsys):
    found, summary = audit(clean)
    assert found == []
    assert summary.startswith("3 steps, 9 different problems trained on, 5 evaluated")
    assert main([str(clean)]) == 0 and capsys.readouterr().out.endswith("nothing found\n")


def test_a_trained_problem_in_the_evaluation(run, capsys):
    line = read_jsonl_zst(run / ROLLOUTS.format("step-000002"))[1]
    rewrite(run / ROLLOUTS.format("eval-000003"), lambda lines: lines.append(line))
    (found,) = audit(run)[0]
    assert found.startswith("eval-000003.jsonl.zst:")
    assert found.endswith("was trained on, in step-000002.jsonl.zst")
    assert main([str(run)]) == 1 and "1 findings" in capsys.readouterr().out


@pytest.mark.parametrize("forged", [False, True])
def test_swapped_factors(run, forged):
    """The same product the other way round, under the canonical key or under one of its own."""
    problem = the_first_problem(run)
    x, y = problem["data"]["expression"].split(" * ")

    def plant(lines):
        lines[2]["problem"] = {
            **problem,
            "prompt": problem["prompt"].replace(f"{x} * {y}", f"{y} * {x}"),
            "data": {**problem["data"], "expression": f"{y} * {x}"},
            "key": "0123456789abcdef" if forged else problem["key"],
        }

    rewrite(run / ROLLOUTS.format("eval-000000"), plant)
    found = audit(run)[0]
    assert len(found) == 1 + forged and "was trained on, in step-000001.jsonl.zst" in found[-1]
    assert not forged or "is stored as 0123456789abcdef, its own data give" in found[0]


def test_a_trained_problem_whose_expression_was_forged_is_found_by_its_prompt(run):
    problem = the_first_problem(run)

    def plant(lines):
        lines[0]["problem"]["prompt"] = problem["prompt"]

    rewrite(run / ROLLOUTS.format("eval-000003"), plant)
    assert "was trained on, in step-000001.jsonl.zst" in audit(run)[0][0]


def test_a_tampered_list_of_seen_problems(run):
    lines = [json.loads(line) for line in (run / "seen.jsonl").read_text().splitlines()]
    lost = lines[1]["keys"].pop()
    lines[2]["keys"].append("f" * 16)
    (run / "seen.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(run)[0] == [
        f"seen.jsonl, step 2: lacks 1 problems that were trained on, {lost} the first",
        "seen.jsonl, step 3: lists 1 problems that no stored step has, ffffffffffffffff the first",
    ]


def test_a_tampered_checkpoint(run):
    newest = sorted((run / "checkpoints").glob("step-*/trainer.json"))[-1]
    rewrite_json(newest, lambda state: state["trainer"]["seen"].pop(0))
    (found,) = audit(run)[0]
    assert found.startswith(f"{newest.parent.name}/trainer.json: lacks 1 problems")


def test_a_step_that_was_taken_away(run):
    (run / ROLLOUTS.format("step-000002")).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[1:]))
    found = audit(run)[0]
    assert any("seen.jsonl, step 2: lists 3" in line for line in found)
    assert found[-1].startswith("metrics.jsonl: lacks steps or has them twice, ")


def test_a_run_that_was_killed_within_a_line_is_read(run):
    """Its last step is in rollouts/, and not yet in metrics.jsonl."""
    for name in ("metrics.jsonl", "seen.jsonl"):
        lines = (run / name).read_bytes()
        (run / name).write_bytes(lines[:-20])
    last = max((run / "checkpoints").glob("step-*"))
    assert audit(run)[0] != []  # the step has a checkpoint, so its lines have been lost
    shutil.rmtree(last)
    assert audit(run)[0] == []


def test_what_is_no_run(tmp_path, capsys):
    line = fails(capsys, tmp_path, main=main)
    assert line.startswith("grpo.tasks.audit: ") and "config.yaml" in line


def test_conversations_are_the_same_only_if_all_their_turns_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Think of {i}."},
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": "Which number was it?"},
            ],
            "answer": f"{i}",
        }
        for i in range(60)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text("def reward(completion):\n    return 0.5\n")
    data = "--data rows.jsonl --reward-file own.py:reward --max-new-tokens 3".split()
    small = (
        "--prompts 2 --group-size 2 --steps 1 --preflight off --config {'eval_problems':3} --name a"
    )
    assert train.main([*data, *small.split(), "--device", "cpu"]) == 3
    allowed = ("own.py:reward",)
    run = Path("runs/a")
    assert audit(run, allowed)[0] == []
    line = read_jsonl_zst(run / ROLLOUTS.format("step-000001"))[0]
    line["problem"]["key"] = "0" * 16
    rewrite(run / ROLLOUTS.format("eval-000000"), lambda lines: lines.append(line))
    assert any("was trained on" in found for found in audit(run, allowed)[0])

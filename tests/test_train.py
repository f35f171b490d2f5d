"""Whole runs on the embedded model, small: from the command line to the files, killed, resumed,
and given bad input.
"""

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from compare_runs import assert_same_run, without_times
from small_runs import BY_PLACE
from tiny_models import make_tiny_model

from data.files import read_jsonl_zst
from grpo.run import checkpoint as store
from grpo.run.logs import read_metrics
from grpo.run.rollouts import groups_of
from grpo.tools import train
from grpo.tools.evaluation import program as evaluation
from grpo.variance import REMEDIES, TRAP_REMEDY
from tasks.base import load_task, problem_at
from tasks.dataset import write_problems

TOP = Path(__file__).resolve().parent.parent
SMALL = [
    "--words",
    "6",
    "--prompts",
    "2",
    "--group-size",
    "4",
    "--steps",
    "4",
    "--preflight",
    "off",
    "--eval-problems",
    "4",
    "--save-every",
    "2",
    "--eval-every",
    "3",
    "--config",
    "{save_threshold: 9}",
    "--config",
    "{best_margin: 9}",
    "--device",
    "cpu",
]


class Killed(BaseException):
    """Ends a run where it stands, as a kill does."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    assert train.main([*SMALL, *arguments]) == 0


@pytest.fixture(scope="module")
def quick(quick_flags):
    """Flags of a small run in which texts and scores do not matter."""
    return [*SMALL, *quick_flags]


def fails(capsys, *arguments, main=train.main, status=2):
    """Return the one line that a bad command line gets."""
    capsys.readouterr()
    assert main(list(arguments)) == status
    (line,) = capsys.readouterr().err.strip().split("\n")
    return line


def test_what_a_run_writes(tmp_path, capsys):
    run("--name", "a")
    folder = tmp_path / "runs" / "a"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (
        config["level"] == 6
        and config["reward"] == "prefix"
        and config["facts"]["torch"]
        and config["facts"]["device"]
    )
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "clip_ratio/low_mean",
        "completions/mean_length",
        "completions/clipped_ratio",
        "grad_norm",
        "learning_rate",
        "step_time",
        "num_tokens",
        "level",
        "temperature",
        "groups/kept",
        "groups/class/varied",
        "wasted_tokens",
        "sampling/sampling_logp_difference/max",
        "parity/kl",
        "parity/worst",
        "draft/acceptance",
        "draft/tokens_per_forward",
        "time/saved_by_drafts",
        "time/rollout",
        "time/score",
        "time/update",
    } <= set(metrics[0])
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics)
    evals = read_metrics(folder / "eval.jsonl")
    assert [line["step"] for line in evals] == [0, 3, 4, 4]
    assert [line["purpose"] for line in evals] == ["report"] * 3 + ["verdict"]
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == [
        f"{name}.jsonl.zst"
        for name in (
            "eval-000000",
            "eval-000003",
            "eval-000004",
            "step-000001",
            "step-000002",
            "step-000003",
            "step-000004",
        )
    ]
    groups = groups_of(folder / "rollouts" / "step-000001.jsonl.zst")
    assert len(groups) == 2 and all(len(group.completions) == 4 for group in groups)
    assert (folder / "samples.log").read_text().startswith("=== step 1 ")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    said = capsys.readouterr().out
    assert (
        "held-out similarity at 6 words" in said
        and "python eval.py --model runs/a --task interleave --levels 6" in said
    )


# Each of these decides something after the checkpoint of step 2, by what it saw before.
CLIMBS = {
    "ladder": [
        "--curriculum",
        "3,4,5,6",
        "--promote-at",
        "0.1",
        "--config",
        "{promote_every: 1}",
        "--config",
        "{promote_problems: 3}",
        "--config",
        "{step_tokens: 120}",
    ],
    "budgets": ["--curriculum", "3,4,5", "--config", "{level_tokens: 300}", "--promote-at", "1"],
}


ADAPTER = ["--lora-rank", "4", "--beta", "0.1", "--on-degenerate", "resample"]
DORA = [*ADAPTER, "--config", "{lora_variant: dora}"]


@pytest.mark.parametrize(
    "tuning",
    [
        [*CLIMBS["ladder"], "--credit", "alignment", "--config", "{epochs: 2}"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(ADAPTER, marks=pytest.mark.slow),
        pytest.param(DORA, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_is_the_run_that_was_not(tmp_path, monkeypatch, tuning):
    _killed_and_resumed(tmp_path, monkeypatch, [*SMALL, *tuning], [])
    assert decides_late(tmp_path / "runs" / "cut") == ("--curriculum" in tuning)


@pytest.mark.parametrize("tuning", [ADAPTER, DORA, *CLIMBS.values()])
def test_a_quick_run_killed_and_resumed_is_the_run_that_was_not(
    tmp_path, monkeypatch, quick, tuning
):
    _killed_and_resumed(tmp_path, monkeypatch, [*quick, *tuning], BY_PLACE)
    assert decides_late(tmp_path / "runs" / "cut") == (tuning in CLIMBS.values())


def decides_late(run):
    """Whether the run's curriculum decided something after step 2, by what it had seen before."""
    return any(decision["step"] > 2 for decision in read_metrics(run / "curriculum.jsonl"))


def _killed_and_resumed(home, monkeypatch, flags, task):
    """Make a run, and make it again with a kill after its third step, one after its checkpoint;
    the two must be the same.
    """
    assert train.main([*flags, "--name", "whole"]) == 0

    def killed(self, report):
        if report.step == 3:
            raise Killed

    monkeypatch.setattr("grpo.run.session.Run.save_if_due", _after(killed))
    with pytest.raises(Killed):
        train.main([*flags, "--name", "cut"])
    monkeypatch.undo()
    monkeypatch.chdir(home)

    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # as if the process had died while writing
    assert train.main(["--resume", "runs/cut", *task]) == 0
    assert_same_run(home / "runs" / "whole", home / "runs" / "cut")


def _after(then):
    from grpo.run.session import Run

    original = Run.save_if_due

    def both(self, report):
        original(self, report)
        then(self, report)

    return both


@pytest.mark.slow  # tests/tools/kill.py kills real processes by default
def test_sigkill_and_resume_of_a_real_process(tmp_path):
    run("--name", "whole")
    process = subprocess.Popen(
        [sys.executable, str(TOP / "train.py"), *SMALL, "--name", "cut"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(TOP)},
    )
    deadline = time.time() + 60
    while (
        not (tmp_path / "runs" / "cut" / "checkpoints" / "step-000002").exists()
        and time.time() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert train.main(["--resume"]) == 0  # the latest run
    assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "cut")


def test_the_ladder_climbs_by_held_out_score_and_ends_at_its_top(tmp_path, capsys):
    small = [part for part in SMALL if part not in ("--words", "6")]
    arguments = [
        *small,
        "--name",
        "a",
        "--curriculum",
        "4,6",
        "--promote-at",
        "0.01",
        "--config",
        "{promote_every: 1}",
        "--config",
        "{promote_problems: 5}",
        "--save-every",
        "9",
        "--config",
        "{stop_when_climbed: true}",
    ]
    assert train.main(arguments) == 0
    said, folder = capsys.readouterr().out, tmp_path / "runs" / "a"
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["level"] == 6
    )  # the last level, not the task's 25
    assert (
        "step 1: level 4 → 6, held-out mean" in said
        and "step 2: level 6, the last level is climbed: held-out mean" in said
    )
    assert "--levels 6\n" in said and "step 3" not in said
    lines = read_metrics(folder / "eval.jsonl")
    assert [(line["step"], line["level"], line["purpose"], line["n"]) for line in lines] == [
        (0, 4, "report", 4),
        (0, 6, "report", 4),
        (1, 4, "promotion", 5),
        (2, 6, "promotion", 5),
        (2, 4, "report", 4),
        (2, 6, "report", 4),
        (2, 6, "verdict", 4),
    ]
    decisions = read_metrics(folder / "curriculum.jsonl")
    assert [(line["step"], line["from"], line["to"], line["kind"]) for line in decisions] == [
        (1, 4, 6, "promotion"),
        (2, 6, 6, "climbed"),
    ]
    assert decisions[0]["figures"] == {
        name: lines[2][name] for name in ("mean", "ci_low", "ci_high", "n")
    }
    keys = [
        {group.problem.key for group in groups_of(folder / "rollouts" / f"{kind}-000002.jsonl.zst")}
        for kind in ("promotion", "eval")
    ]
    assert not keys[0] & keys[1]  # what is reported was not chosen by
    assert (folder / "checkpoints" / "step-000002").exists()
    assert train.main(["--resume", "runs/a"]) == 0  # there is nothing left to do
    assert "where it had ended: the last level is climbed" in capsys.readouterr().out
    assert (
        read_metrics(folder / "eval.jsonl") == lines
        and len(read_metrics(folder / "metrics.jsonl")) == 2
    )


def test_a_run_ends_with_the_budget_of_its_last_level(tmp_path, capsys):
    run(
        "--name",
        "a",
        "--no-ramp",
        "--config",
        "{level_minutes: 0.000001}",
        "--config",
        "{step_tokens: 60}",
    )
    said = capsys.readouterr().out
    assert (
        re.search(
            r"step 1: level 6, the budget of the last level is spent: \S+ of 1e-06 minutes, ", said
        )
        and "step 2" not in said
    )
    assert len(groups_of(tmp_path / "runs" / "a" / "rollouts" / "step-000001.jsonl.zst")) == 1
    assert "in 1 draws" in said  # one prompt


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys, quick):
    assert train.main([*quick, "--name", "whole"]) == 0
    assert train.main([*quick, "--name", "hurt"]) == 0
    path = tmp_path / "runs" / "hurt" / "checkpoints" / "step-000004" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    store._verified.clear()
    assert train.main(["--resume", *BY_PLACE]) == 0  # the latest run
    assert "skipped" in capsys.readouterr().out
    assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "hurt")


def test_a_full_disk_keeps_the_old_checkpoints(tmp_path, monkeypatch, capsys, quick):
    original = store.save_file

    def full(tensors, path):
        if "step-000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path)

    monkeypatch.setattr(store, "save_file", full)
    line = fails(capsys, *quick, "--name", "a")
    assert "step-000004: cannot be written (No space left on device)" in line
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert [p.name for p in Path("runs/a/checkpoints").iterdir()] == ["step-000002"]
    assert train.main(["--resume", "runs/a", *BY_PLACE]) == 0


def test_what_is_loaded_is_spared_by_the_garbage_collector_while_steps_are_made(
    tmp_path, monkeypatch
):
    spared, step = [], train.Trainer.step
    monkeypatch.setattr(
        train.Trainer, "step", lambda trainer: spared.append(gc.get_freeze_count()) or step(trainer)
    )
    assert train.main([*SMALL, "--steps", "1"]) == 0
    monkeypatch.setattr(train.Trainer, "step", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main([*SMALL, "--steps", "1", "--name", "other"])
    assert spared[0] > 50_000 > 10 * gc.get_freeze_count()


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_its_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "grpo.trainer.advantages",
        lambda rewards, **_: [[float("nan")] * len(row) for row in rewards],
    )
    line = fails(capsys, *SMALL, "--name", "a", status=1)
    assert "the loss is nan" in line and "runs/a/rollouts/failed-000001.jsonl.zst" in line
    assert len(read_jsonl_zst(Path("runs/a/rollouts/failed-000001.jsonl.zst"))) == 2


def test_bad_command_lines(tmp_path, capsys):
    said = lambda *arguments: fails(capsys, *arguments)  # noqa: E731
    assert said("--wrods", "5") == "train.py: --wrods: no such flag; did you mean --words?"
    assert said("--lr", "5") == (
        "train.py: --lr: no such flag; did you mean --learning-rate or --lora-rank?"
    )
    assert "--task juggling: no such task" in said("--task", "juggling")
    assert "--reward money: task interleave has no such reward" in said("--reward", "money")
    assert "invalid int value: 'ten'" in said("--words", "ten")
    assert "--group-size 1: a group of one has no variance" in said("--group-size", "1")
    assert "--temperature 0.0: give a number above 0" in said("--temperature", "0")
    assert said("--credit", "alignment", "--task", "arithmetic") == (
        "train.py: --credit alignment: task arithmetic does not say what each word of a completion "
        "earns; give --credit outcome"
    )
    for reward in ("affine", "balanced"):
        assert said("--credit", "alignment", "--reward", reward) == (
            f"train.py: --credit alignment: --reward {reward} of task interleave is no sum over "
            "words; give one of prefix, clipped, "
            "similarity, or --credit outcome"
        )
    assert "--credit alignment: gspo weighs whole sequences" in said(
        "--credit", "alignment", "--loss", "gspo"
    )
    assert "--curriculum 25,10: give rising whole numbers" in said("--curriculum", "25,10")
    assert "--curriculum auto: give rising whole numbers" in said("--curriculum", "auto")
    assert "--config: promote_by luck: give one of running, heldout" in said(
        "--config", "{promote_by: luck}"
    )
    assert "--words 5000: the train split" in said("--words", "5000", "--no-ramp")
    assert "--max-new-tokens 3: the right answer takes" in said(
        "--words", "6", "--max-new-tokens", "3"
    )
    (tmp_path / "empty").mkdir()
    assert "--model empty: no model there" in said("--model", "empty")
    assert "--model no/such/model: no such directory" in said("--model", "no/such/model")
    make_tiny_model(tmp_path / "short", context=100)
    assert "its context of 100 tokens is too short" in said("--model", "short", "--lora-rank", "0")
    assert "--resume nowhere: does not exist" in said("--resume", "nowhere")
    assert "--resume empty: not a run" in said("--resume", "empty")
    assert "--resume: no run in runs/" in said("--resume")
    assert not Path("runs").exists()  # nothing was begun


def test_bad_command_lines_of_runs_and_datasets(tmp_path, capsys):
    run("--name", "a", "--steps", "2")
    assert "--name a: runs/a exists" in fails(capsys, *SMALL, "--name", "a")
    assert "--seed 5: the run in runs/a has 0" in fails(capsys, "--resume", "runs/a", "--seed", "5")
    config = Path("runs/a/config.yaml")
    config.write_text(config.read_text() + "colour: red\n")
    assert "unknown key colour" in fails(capsys, "--resume", "runs/a")
    problems = [
        problem_at(load_task("interleave"), seed=0, split="train", level=6, index=i)
        for i in range(3)
    ]
    write_problems(tmp_path / "set.jsonl", problems)
    lines = (tmp_path / "set.jsonl").read_text().splitlines()
    (tmp_path / "set.jsonl").write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n")
    assert "set.jsonl, line 2" in fails(capsys, *SMALL, "--dataset", "set.jsonl")


def make_set(path, *levels, size=3):
    """Write `size` training problems of each level, one level after the other."""
    task = load_task("interleave")
    problems = [
        problem_at(task, seed=0, split="train", level=level, index=i)
        for level in levels
        for i in range(size)
    ]
    write_problems(path, problems)


@pytest.mark.parametrize(
    "levels, flags, trained, evaluated",
    [
        ([12], [], {12}, 12),  # above the first level of the ladder, by way of which nothing goes
        ([4, 12], [], {4, 12}, 12),  # as they come
        ([4, 12], ["--words", "12"], {12}, 12),
        ([4, 12], ["--curriculum", "4,12", "--promote-at", "0.999"], {4}, 12),
        ([4, 12], ["--curriculum", "4", "--words", "6"], {4}, 6),  # evaluated at another level
    ],
)
def test_a_dataset_says_which_levels_there_are(
    tmp_path, tiny_flags, levels, flags, trained, evaluated
):
    make_set(tmp_path / "set.jsonl", *levels)
    arguments = ["--prompts", "3", "--group-size", "2", "--eval-problems", "2", "--device", "cpu"]
    arguments += ["--preflight", "off"]
    start = ["--name", "a", "--dataset", "set.jsonl", *arguments, *tiny_flags, *flags]
    assert train.main([*start, "--steps", "1", "--eval-every", "0"]) == 0
    assert train.main(["--resume", "runs/a", "--steps", "2"]) == 0  # by what was resolved then

    problems = [
        group.problem
        for step in (1, 2)
        for group in groups_of(Path(f"runs/a/rollouts/step-00000{step}.jsonl.zst"))
    ]
    assert {problem.level for problem in problems} == trained
    assert len({problem.key for problem in problems}) == min(6, 3 * len(trained))
    assert {line["level"] for line in read_metrics(Path("runs/a/eval.jsonl"))} >= {evaluated}
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["level"] == evaluated


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            ["--words", "25"],
            "--words 25: set.jsonl has no problem of level 25; it has those of 4, 12",
        ),
        (
            ["--curriculum", "4,10,12"],
            "--curriculum 4,10,12: set.jsonl has no problem of level 10; it has those of 4, 12",
        ),
    ],
)
def test_a_level_that_the_dataset_lacks_is_refused(tmp_path, capsys, flags, line):
    make_set(tmp_path / "set.jsonl", 12, 4)
    assert fails(capsys, "--dataset", "set.jsonl", *flags) == f"train.py: {line}"
    assert not Path("runs").exists()


def test_eval_drops_what_was_trained_on(tmp_path, capsys, tiny_flags):
    """The run trains on the very problems that are evaluated: none is left; on other
    ones all are.
    """
    task = load_task("interleave")
    write_problems(
        tmp_path / "set.jsonl",
        [problem_at(task, seed=3, split="test", level=6, index=i) for i in range(4)],
    )
    trained = [*tiny_flags, "--dataset", "set.jsonl"]
    run("--name", "a", "--steps", "1", *trained)  # two prompts a step: two of the four problems
    arguments = ["--model", "runs/a", "--words", "6", "--json", "out.json", "--problems", "4"]
    assert evaluation.main([*arguments, "--seed", "3"]) == 0
    (line,) = json.loads(Path("out.json").read_text())
    assert (line["dropped"], line["n"], line["split"], line["level"]) == (
        2,
        4,
        "test",
        6,
    )  # the next ones of the stream stand in
    assert evaluation.main([*arguments, "--seed", "4", "--greedy"]) == 0
    (first,) = json.loads(Path("out.json").read_text())
    assert (first["dropped"], first["n"], first["temperature"]) == (0, 4, 0)
    assert evaluation.main([*arguments, "--seed", "4", "--greedy"]) == 0
    assert json.loads(Path("out.json").read_text()) == [first]
    capsys.readouterr()
    assert evaluation.main([*arguments[:-1], "2", "--dataset", "set.jsonl"]) == 0
    (from_file,) = json.loads(Path("out.json").read_text())
    assert from_file["n"] == 2 and from_file["dropped"] <= 2 and from_file["dataset"] == "set.jsonl"
    assert evaluation.main([*arguments, "--dataset", "set.jsonl"]) == 0
    (fewer,) = json.loads(Path("out.json").read_text())
    assert (fewer["n"], fewer["asked"], fewer["dropped"]) == (2, 4, 2)
    assert "2 distinct problems at level 6; 4 asked for" in capsys.readouterr().out
    run("--name", "b", "--steps", "2", *trained)  # all four problems
    arguments[1] = "runs/b"
    assert fails(capsys, *arguments, "--dataset", "set.jsonl", main=evaluation.main) == (
        "eval.py: set.jsonl, level 6: no problem is left: all 4 that were found were trained on"
    )


def test_bad_evaluations(capsys):
    said = lambda *arguments: fails(capsys, *arguments, main=evaluation.main)  # noqa: E731
    assert "--words 10,x: give whole numbers above 0" in said("--words", "10,x")
    assert "--problems 0: give 1 or more" in said("--problems", "0")
    assert "--samples 0: give 1 or more" in said("--samples", "0")
    assert "--temperature -1.0: give 0 or more" in said("--temperature", "-1")
    assert "--temperature nan: give 0 or more" in said("--temperature", "nan")
    assert "--top-k -1: give 0 or more" in said("--top-k", "-1")
    assert "--top-p 0.0: give a number above 0 and up to 1" in said("--top-p", "0")
    assert "--max-new-tokens -3: give 0 or more" in said("--max-new-tokens", "-3")
    assert "--max-new-tokens 3: the right answer takes" in said("--max-new-tokens", "3")
    assert "unrecognized arguments: --colour" in said("--colour", "red")
    assert "--task juggling: no such task" in said("--task", "juggling")


@pytest.mark.parametrize("control", ["shuffled-rewards", "constant-reward"])
def test_a_control_run_is_marked_wherever_it_is_seen(control, capsys):
    run("--control", control, "--task", "arithmetic", "--words", "1", "--steps", "2")
    (folder,) = Path("runs").iterdir()
    assert (
        folder.name == f"arithmetic-1-{control}-seed0"
        and yaml.safe_load((folder / "config.yaml").read_text())["control"] == control
    )
    for log in ("metrics.jsonl", "eval.jsonl"):
        assert {line["control"] for line in read_metrics(folder / log)} == {control}
    said = capsys.readouterr().out.splitlines()
    assert f"{control}: a control experiment" in "".join(said)
    about = [line for line in said if " step " in line and "/2" in line or "held-out" in line]
    assert len(about) == 6 and all(f"CONTROL {control}" in line for line in about)
    assert (
        evaluation.main(
            [
                "--model",
                str(folder),
                "--task",
                "arithmetic",
                "--problems",
                "2",
                "--words",
                "1",
                "--json",
                "o.json",
            ]
        )
        == 0
    )
    assert (
        f"CONTROL {control}" in capsys.readouterr().out
        and json.loads(Path("o.json").read_text())[0]["control"] == control
    )


def test_a_tasks_own_flags_reach_the_run_and_stay_with_it(capsys):
    options = [
        "--task",
        "arithmetic",
        "--family",
        "product",
        "--words",
        "21",
        "--problems",
        "fixed:3",
    ]
    run(*options)
    folder = Path("runs/arithmetic-product-21-fixed3-seed0")
    steps = [
        [group.problem for group in groups_of(folder / f"rollouts/step-00000{step}.jsonl.zst")]
        for step in range(1, 5)
    ]
    assert len({problem.key for problems in steps for problem in problems}) == 3
    assert all("*" in problem.data["expression"] for problems in steps for problem in problems)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["problems/seen"] for line in lines] == [2, 3, 3, 3] and lines[-1][
        "problems/repeated"
    ] == 1
    assert lines[-1]["problems/family_share"] == pytest.approx(3 / 720)  # 90 * 8
    said = capsys.readouterr().out
    assert "trained on 3 unique problems in 8 draws, 0.4% of the 720 that exist" in said
    assert "--task arithmetic --family product --levels 21" in said
    assert "the run in" in fails(
        capsys, "--resume", str(folder), "--task", "arithmetic", "--family", "chain"
    )
    assert "--family sums: give chain or product" in fails(
        capsys, "--task", "arithmetic", "--family", "sums"
    )
    assert "--family: task interleave has no such flag" in fails(capsys, "--family", "chain")
    assert "--problems stale: give fresh, or fixed:N" in fails(capsys, "--problems", "stale")
    assert "--control none-such: give one of none, shuffled-rewards" in fails(
        capsys, "--control", "none-such"
    )


def test_a_fixed_supply_resumed_in_the_middle_of_an_epoch(tiny_flags):
    fixed = [*tiny_flags, "--problems", "fixed:5"]
    run("--name", "whole", *fixed)
    run("--name", "cut", *fixed, "--steps", "2", "--schedule", "constant")
    run("--name", "straight", *fixed, "--schedule", "constant")
    assert train.main(["--resume", "runs/cut", "--steps", "4"]) == 0
    assert read_metrics(Path("runs/cut/seen.jsonl")) == read_metrics(
        Path("runs/straight/seen.jsonl")
    )
    assert [line["keys"] for line in read_metrics(Path("runs/whole/seen.jsonl"))] == [
        line["keys"] for line in read_metrics(Path("runs/straight/seen.jsonl"))
    ]


TRAPPED = """
from tasks.base import Problem, Score, key_of

class Trapped:
    name, rewards, default_level = "trapped", (), 1

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, number, number, key_of(number))

    def score(self, problem, completions):
        return [Score(0.1 * i, {"trap": "sulks"}, 0.5) for i in range(len(completions))]
"""


def test_an_alarm_stops_the_run_in_good_order(tmp_path, monkeypatch, capsys, tiny_flags):
    (tmp_path / "trapped.py").write_text(TRAPPED)
    options = [
        *SMALL,
        *tiny_flags,
        "--steps",
        "9",
        "--words",
        "1",
        "--task",
        "trapped.py:Trapped",
        "--config",
        "{on_alarm: stop}",
    ]
    assert train.main([*options, "--name", "a"]) == 3
    reason = (
        # (0 + 0.1 + 0.2 + 0.3) / 4
        "ALARM: for 5 steps 100% of the completions are in the trap 'sulks', reward 0.15 "
        "(score 0.50): " + TRAP_REMEDY
    )
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(f"  stopped after step 5: {reason}") and any(
        line.endswith(f"  {reason}") for line in said[:-1]
    )
    steps = read_metrics(tmp_path / "runs/a/metrics.jsonl")
    assert [line.get("stopped") for line in steps] == [None] * 4 + [reason]
    assert all(
        line["traps/sulks"] == 1
        and line["groups/trapped"] == 2
        and line["levels"]["1"]["trap"] == {"sulks": 2}
        for line in steps
    )
    assert {
        group.trap for group in groups_of(tmp_path / "runs/a/rollouts/step-000005.jsonl.zst")
    } == {"sulks"}
    config = yaml.safe_load((tmp_path / "runs/a/config.yaml").read_text())
    assert config["on_alarm"] == "stop" and config["facts"]["stopped"] == {
        "step": 5,
        "reason": reason,
    }
    assert config["facts"]["torch"]
    assert (tmp_path / "runs/a/checkpoints/step-000005").is_dir() and read_metrics(
        tmp_path / "runs/a/eval.jsonl"
    )[-1]["step"] == 5

    def killed(self, report):
        if report.step == 4:
            raise Killed

    monkeypatch.setattr("grpo.run.session.Run.save_if_due", _after(killed))
    with pytest.raises(Killed):
        train.main([*options, "--name", "cut"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    trapped = ["--task", "trapped.py:Trapped"]
    assert "its task is a program that would be executed, trapped.py:Trapped" in fails(
        capsys, "--resume", "runs/cut"
    )
    for _ in range(2):  # the second time nothing is left to do, and it is said again
        capsys.readouterr()
        assert train.main(["--resume", "runs/cut", *trapped]) == 3
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"stopped after step 5: {reason}")
    assert without_times(read_metrics(tmp_path / "runs/cut/metrics.jsonl")) == without_times(steps)
    assert train.main(["--resume", "runs/cut", *trapped, "--config", "{on_alarm: say}"]) == 0
    lines = read_metrics(tmp_path / "runs/cut/metrics.jsonl")
    assert (
        len(lines) == 9
        and [line.get("stopped") for line in lines] == [None] * 4 + [reason] + [None] * 4
    )


PAID = """
from tasks.base import Problem, Score, key_of

class Paid:
    name, rewards, default_level = "paid", (), 1
    paid = 0.0

    def make(self, level, split, rng):
        number = str(rng.randrange(10**6))
        return Problem(self.name, level, number, number, key_of(number))

    def score(self, problem, completions):
        return [Score(self.paid, exact=self.paid == 1) for _ in completions]

class Always(Paid):
    paid = 1.0
"""


def test_a_run_in_which_nothing_teaches_stops_early_with_its_cause(tmp_path, capsys, tiny_flags):
    (tmp_path / "paid.py").write_text(PAID)
    options = [
        *SMALL,
        *tiny_flags,
        "--words",
        "1",
        "--task",
        "paid.py:Paid",
        "--name",
        "a",
        "--patience",
        "3",
    ]
    assert train.main([*options, "--steps", "9"]) == 3
    said = capsys.readouterr().out.splitlines()
    reason = (
        "no group could be trained on for 3 steps (100% failed; reward 0.000); "
        + (REMEDIES["failed"])
    )
    assert said[-1].endswith(f"stopped after step 3: {reason}")
    assert any(line.startswith("NOT LEARNED: held-out score at level 1") for line in said)
    assert any(line.startswith("0 of 3 steps updated the weights; 100% of the") for line in said)
    folder = tmp_path / "runs/a"
    verdict = read_metrics(folder / "eval.jsonl")[-1]
    assert (verdict["purpose"], verdict["verdict"], verdict["step"], verdict["stopped"]) == (
        "verdict",
        "not learned",
        3,
        reason,
    )
    assert (folder / "checkpoints/step-000003").is_dir()
    trust = ["--task", "paid.py:Paid"]
    assert train.main(["--resume", "runs/a", *trust]) == 3  # still out of patience
    assert len(read_metrics(folder / "metrics.jsonl")) == 3
    assert train.main(["--resume", "runs/a", *trust, "--patience", "5"]) == 3
    assert len(read_metrics(folder / "metrics.jsonl")) == 5

    control = ["--control", "shuffled-rewards", "--name", "c"]
    assert train.main([*options, "--steps", "9", *control]) == 3  # a control ends like any run


def test_a_solved_run_ends_early_after_a_held_out_check(tmp_path, capsys, tiny_flags):
    (tmp_path / "paid.py").write_text(PAID)
    options = [*SMALL, *tiny_flags, "--words", "1", "--task", "paid.py:Always", "--steps", "9"]
    options += ["--eval-problems", "64"]  # fewer could not show that it was solved before
    assert train.main([*options, "--name", "a"]) == 0
    said = capsys.readouterr().out
    assert (
        "ended after step 3: every training group was solved for 3 steps, and the held-out" in said
    )
    assert "ALREADY SOLVED: held-out score at level 1 1.000 → 1.000" in said
    folder = tmp_path / "runs/a"
    kinds = [line["kind"] for line in read_metrics(folder / "curriculum.jsonl")]
    assert kinds == ["solved"] and (folder / "checkpoints/step-000003").is_dir()
    assert train.main(["--resume", "runs/a", "--task", "paid.py:Always"]) == 0
    assert "where it had ended: every training group was solved" in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 3

    assert train.main([*options, "--name", "b", "--patience", "0"]) == 0
    assert len(read_metrics(tmp_path / "runs/b/metrics.jsonl")) == 9


def test_an_alarm_is_only_said_by_default(tmp_path, capsys, tiny_flags):
    (tmp_path / "trapped.py").write_text(TRAPPED)
    assert (
        train.main(
            [*SMALL, *tiny_flags, "--steps", "6", "--words", "1", "--task", "trapped.py:Trapped"]
        )
        == 0
    )
    assert (
        sum(
            "ALARM: for 5 steps 100% of the completions are in the trap 'sulks'" in line
            for line in capsys.readouterr().out.splitlines()
        )
        == 1
    )
    (run_,) = Path("runs").iterdir()
    assert (
        len(read_metrics(run_ / "metrics.jsonl")) == 6
        and "stopped" not in yaml.safe_load((run_ / "config.yaml").read_text())["facts"]
    )


def test_a_users_task_trains(tmp_path):
    example = TOP / "tests" / "examples" / "reverse.py"
    assert (
        train.main(
            [
                "--task",
                f"{example}:Reverse",
                "--prompts",
                "2",
                "--group-size",
                "4",
                "--steps",
                "1",
                "--preflight",
                "off",
                "--eval-problems",
                "2",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    assert (tmp_path / "runs" / "reverse-seed0" / "metrics.jsonl").exists()

"""A whole run: what it writes, how it is marked, which problems it has, and how it ends."""

import json
from pathlib import Path

import pytest
import yaml
from screens import unbroken
from small_runs import BY_PLACE, FEW
from small_train import SMALL, TOP, make_set, run

from grpo.ending import UNFINISHED
from grpo.run.logs import groups_of, read_metrics
from grpo.tools import evaluation, train

METRICS = set(
    "reward reward_std frac_reward_zero_std entropy clip_ratio/low_mean completions/mean_length "
    "completions/clipped_ratio grad_norm learning_rate step_time num_tokens level "
    "groups/kept groups/class/varied wasted_tokens sampling/sampling_logp_difference/max parity/kl "
    "draft/acceptance draft/tokens_per_forward time/problems time/rollout time/score "
    "time/update".split()
)


def test_what_a_run_writes(tmp_path, capsys):
    run("--name", "a")
    folder = tmp_path / "runs" / "a"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["level"] == 6
    assert config["reward"] == "pairs"
    assert config["facts"]["torch"]
    assert config["facts"]["device"]
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert set(metrics[0]) >= METRICS
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics)
    evals = read_metrics(folder / "eval.jsonl")
    assert [line["step"] for line in evals] == [0, 3, 4, 4]
    assert [line["purpose"] for line in evals] == ["report"] * 3 + ["verdict"]
    names = "eval-000000 eval-000003 eval-000004 step-000001 step-000002 step-000003 step-000004"
    stored = sorted(p.name for p in (folder / "rollouts").iterdir())
    assert stored == [f"{name}.jsonl.zst" for name in names.split()]
    groups = groups_of(folder / "rollouts" / "step-000001.jsonl.zst")
    assert len(groups) == 2 and all(len(group.completions) == 4 for group in groups)
    assert (folder / "samples.log").read_text().startswith("=== step 1 ")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    said = capsys.readouterr().out
    assert "held-out similarity at 6 words" in said and "eval.py --model runs/a" in said


@pytest.mark.parametrize(
    "control, status",
    [pytest.param("shuffled-rewards", 0, marks=pytest.mark.slow), ("constant-reward", 3)],
)
def test_a_control_run_is_marked_wherever_it_is_seen(control, status, capsys):
    flags = ["--task", "arithmetic", "--words", "1", "--steps", "2"]
    run("--control", control, *flags, status=status)
    (folder,) = Path("runs").iterdir()
    assert folder.name == f"arithmetic-1-{control}-seed0"
    assert yaml.safe_load((folder / "config.yaml").read_text())["control"] == control
    for log in ("metrics.jsonl", "eval.jsonl"):
        assert {line["control"] for line in read_metrics(folder / log)} == {control}
    said = capsys.readouterr().out.splitlines()
    assert f"{control}: a control experiment" in "".join(said)
    about = [line for line in said if " step " in line and "/2" in line or "held-out" in line]
    assert len(about) == 5 and all(f"CONTROL {control}" in line for line in about)
    about = ["--model", str(folder), *flags[:2], "--problems", "2", "--words", "1"]
    assert evaluation.main([*about, "--json", "o.json"]) == 0
    assert f"CONTROL {control}" in capsys.readouterr().out
    assert json.loads(Path("o.json").read_text())[0]["control"] == control
    assert evaluation.main(["--model", "builtin", *about]) == 0
    assert f"CONTROL {control}  {folder}, level 1" in capsys.readouterr().out


def test_a_dataset_says_which_levels_there_are(tmp_path, tiny_flags):
    make_set(tmp_path / "set.jsonl", 4, 12)
    arguments = ["--prompts", "3", "--group-size", "2", "--device", "cpu"]
    arguments += ["--preflight", "off", "--reward-alone"]
    arguments += ["--config", "{eval_problems: 2, dynamic_sampling: 0}"]
    start = ["--name", "a", "--dataset", "set.jsonl", *arguments, *tiny_flags]
    # The tiny model is never right, so no step has a signal.
    assert train.main([*start, "--steps", "1", "--eval-every", "0"]) == UNFINISHED
    resumed = train.main(["--resume", "runs/a", "--steps", "2"])  # by what was resolved then
    assert resumed == UNFINISHED

    problems = [
        group.problem
        for step in (1, 2)
        for group in groups_of(Path(f"runs/a/rollouts/step-00000{step}.jsonl.zst"))
    ]
    assert {problem.level for problem in problems} == {4, 12}  # as they come
    assert len({problem.key for problem in problems}) == 6
    assert {line["level"] for line in read_metrics(Path("runs/a/eval.jsonl"))} >= {12}
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["level"] == 12


def test_a_users_task_trains(tmp_path):
    example = TOP / "tests" / "examples" / "every_second.py"
    flags = [f"--task={example}:EverySecond", *FEW, "--steps=1", "--config={eval_problems: 2}"]
    assert train.main(flags) == 0
    assert (tmp_path / "runs" / "everysecond-seed0" / "metrics.jsonl").exists()


# How it ends: at the top of its ladder, solved, or with nothing to learn from.


def test_a_curriculum_opens_its_levels_and_reports_them(tmp_path, monkeypatch, capsys, quick_flags):
    monkeypatch.setattr("grpo.curriculum.OPEN_AT", 0.051)
    small = [part for part in SMALL if part not in ("--words", "6")]
    arguments = [*small, *quick_flags, *"--name a --curriculum 4,6 --steps 8".split()]
    assert train.main([*arguments, "--config", "{patience: 0}"]) in (0, 3)  # it makes all steps
    said, folder = capsys.readouterr().out, tmp_path / "runs" / "a"
    # the last level, not the task's 25
    assert yaml.safe_load((folder / "config.yaml").read_text())["level"] == 6
    assert "level 4 → 6, running mean" in said and "eval.py --model runs/a --task" in said
    decisions = read_metrics(folder / "curriculum.jsonl")
    assert [(line["from"], line["to"], line["kind"]) for line in decisions] == [(4, 6, "open")]
    lines = read_metrics(folder / "eval.jsonl")
    places = [(line["step"], line["level"], line["purpose"]) for line in lines]
    assert places[:2] == [(0, 4, "report"), (0, 6, "report")]
    assert places[-3:] == [(8, 4, "report"), (8, 6, "report"), (8, 6, "verdict")]
    assert train.main(["--resume", "runs/a", *BY_PLACE]) in (0, 3)  # there is nothing left to do
    assert read_metrics(folder / "eval.jsonl") == lines


PAID = """
from grpo.tasks.base import Problem, Score, key_of

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
    options = [*SMALL, *tiny_flags, *"--words 1 --task paid.py:Paid --name a --steps 9".split()]
    assert train.main([*options, "--config", "{patience: 3}"]) == 3
    said = unbroken(capsys.readouterr().out).splitlines()
    reason = "no group could be trained on for 3 steps, up to level 1 (100% failed)"
    # Why it stopped, the verdict, its cause and one remedy, which nothing below contradicts.
    at = next(n for n, line in enumerate(said) if line.endswith(f"stopped after step 3: {reason}"))
    verdict, *said = said[at + 2 :]
    assert verdict.startswith("NO SIGNAL: held-out score at level 1")
    assert any(line.startswith("100% of the groups were failed (all with") for line in said)
    assert sum(line.startswith("try ") for line in said) == 1
    assert "steps that updated the weights: 0 of 3" in said
    folder = tmp_path / "runs/a"
    verdict = read_metrics(folder / "eval.jsonl")[-1]
    told = [verdict[name] for name in ("purpose", "verdict", "step", "stopped")]
    assert told == ["verdict", "no signal", 3, reason]
    assert (folder / "checkpoints/step-000003").is_dir()
    trust = ["--task", "paid.py:Paid"]
    assert train.main(["--resume", "runs/a", *trust, "--config", "{patience: 5}"]) == 3
    assert len(read_metrics(folder / "metrics.jsonl")) == 5


@pytest.mark.slow
def test_a_solved_run_ends_early_after_a_held_out_check(all_end, tmp_path, capsys, tiny_flags):
    (tmp_path / "paid.py").write_text(PAID)
    options = [*SMALL, *tiny_flags, "--words", "1", "--task", "paid.py:Always", "--steps", "12"]
    assert train.main([*options, "--name", "a"]) == 0
    said = unbroken(capsys.readouterr().out)
    assert "ended after step 10: at least 95% of the groups of the last 10 steps were" in said
    assert "ALREADY SOLVED: held-out score at level 1 1.000 → 1.000" in said
    folder = tmp_path / "runs/a"
    kinds = [line["kind"] for line in read_metrics(folder / "curriculum.jsonl")]
    assert kinds == ["anneal", "solved"] and (folder / "checkpoints/step-000010").is_dir()
    assert train.main(["--resume", "runs/a", "--task", "paid.py:Always"]) == 0
    assert "where it had ended: at least 95% of the groups of the last" in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 10

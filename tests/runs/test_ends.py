"""How a run ends: at the top of its ladder, solved, or with nothing to learn from."""

import json
import re
from pathlib import Path

import pytest
import yaml
from frequent_checks import check_often
from small_train import SMALL

from grpo.records import Completion
from grpo.run import heldout
from grpo.run.logs import load_run, read_metrics
from grpo.run.rollouts import groups_of
from grpo.tools import train
from grpo.variance import REMEDIES


def test_the_ladder_climbs_by_held_out_score(tmp_path, monkeypatch, capsys):
    check_often(monkeypatch, problems=5)
    small = [part for part in SMALL if part not in ("--words", "6")]
    arguments = [
        *small,
        "--name",
        "a",
        "--curriculum",
        "4,6",
        "--promote-at",
        "0.01",
        "--save-every",
        "9",
        "--steps",
        "2",
    ]
    assert train.main(arguments) == 0
    said, folder = capsys.readouterr().out, tmp_path / "runs" / "a"
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["level"] == 6
    )  # the last level, not the task's 25
    assert "step 1: level 4 → 6, held-out mean" in said and "--levels 6\n" in said
    lines = read_metrics(folder / "eval.jsonl")
    assert [(line["step"], line["level"], line["purpose"], line["n"]) for line in lines] == [
        (0, 4, "report", 4),
        (0, 6, "report", 4),
        (1, 4, "promotion", 5),
        (2, 4, "report", 4),
        (2, 6, "report", 4),
        (2, 6, "verdict", 4),
    ]
    decisions = read_metrics(folder / "curriculum.jsonl")
    assert [(line["step"], line["from"], line["to"], line["kind"]) for line in decisions] == [
        (1, 4, 6, "promotion"),
    ]
    assert decisions[0]["figures"] == {
        name: lines[2][name] for name in ("mean", "ci_low", "ci_high", "n")
    }
    keys = [
        {group.problem.key for group in groups_of(folder / "rollouts" / f"{name}.jsonl.zst")}
        for name in ("promotion-000001", "eval-000002")
    ]
    assert not keys[0] & keys[1]  # what is reported was not chosen by
    assert (folder / "checkpoints" / "step-000002").exists()
    assert train.main(["--resume", "runs/a"]) == 0  # there is nothing left to do
    assert (
        read_metrics(folder / "eval.jsonl") == lines
        and len(read_metrics(folder / "metrics.jsonl")) == 2
    )


@pytest.mark.slow
def test_a_ladder_of_few_rows_says_before_the_first_step_what_it_climbs_by(
    all_end, tmp_path, monkeypatch, capsys, tiny_flags
):
    """A tenth of 100 rows of each level is held out, and a validation check needs 45."""
    monkeypatch.chdir(tmp_path)
    check_often(monkeypatch, problems=128)
    rows = [{"prompt": f"row {n}", "level": n % 3 + 1} for n in range(300)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text("def reward(completion):\n    return 1.0\n")
    flags = [*tiny_flags, *"--data rows.jsonl --reward-file own.py:reward --device cpu".split()]
    flags += "--curriculum 1,2,3 --preflight off --steps 12 --eval-every 0 --group-size 2".split()
    flags += [*"--prompts 32 --max-new-tokens 2 --name a".split()]
    assert train.main(flags) == 3  # no signal, and too few problems to show that it was solved
    said = capsys.readouterr().out
    first = said.index("step")
    for level in (1, 2):
        warned = re.search(f"level {level} has (\\d+) held-out problems, and promotion at", said)
        assert int(warned[1]) < 45 and warned.start() < first
    moves = read_metrics(tmp_path / "runs/a/curriculum.jsonl")
    assert [(line["from"], line["to"]) for line in moves if line["kind"] == "promotion"] == [
        (1, 2),
        (2, 3),
    ]
    assert all(line["kind"] in ("promotion", "solved") for line in moves)


class Scripted:
    """Writes what a script says instead of sampling: in step n, completion i answers the texts A
    and B with ``script(n, i, a, b)``. Evaluations are of the last step.
    """

    def __init__(self, script, monkeypatch):
        self.script, self.step = script, 0
        monkeypatch.setattr("grpo.rollout.generate.generate", self.train)
        monkeypatch.setattr("grpo.rollout.generate.generate", self.answer)

    def train(self, policy, request, drafting=None):
        self.step += 1
        return self.answer(policy, request)

    def answer(self, policy, request, drafting=None):
        return [
            [self.completion(policy, prompt, (i + number) % 8) for i in range(request.group_size)]
            for number, prompt in enumerate(request.prompts)
        ]

    def completion(self, policy, prompt, i):
        a, b = re.findall(r"^[AB]: (.*)$", policy.decode(prompt), re.M)
        text = self.script(self.step, i, a.split(), b.split())
        tokens = (*policy.tokenizer.encode(text, add_special_tokens=False), policy.end)
        return Completion(tokens, (-1.0,) * len(tokens), policy.decode(tokens), "stop")


def falls_into_a_copy(step, i, a, b):
    """At first every other completion is two words of B, and then ever more copy text A."""
    return " ".join(a if i < 2 * step else b[::-1])


def learns(step, i, a, b):
    """Completions become right one by one."""
    right = [word for pair in zip(a, b) for word in pair]
    return " ".join(right if i < step else right[:1] + b[::-1])


SCRIPTED = [*SMALL, "--no-ramp", "--steps", "8", "--group-size", "8", "--eval-problems", "40"]


@pytest.mark.slow
def test_a_policy_that_falls_into_copying_text_a_has_collapsed(
    tmp_path, capsys, monkeypatch, tiny_flags
):
    """Under `similarity`, which pays a half for it, at a fixed level, and without a pre-flight."""
    Scripted(falls_into_a_copy, monkeypatch)
    options = [*SCRIPTED, *tiny_flags, "--reward", "similarity", "--name", "a"]
    assert train.main(options) == 3
    said = capsys.readouterr().out
    verdict = load_run("runs/a").verdict
    assert verdict["low"] > 0 and verdict["after"] == 0.5  # the score alone would call it learned
    assert (verdict["verdict"], verdict["trap"]) == ("collapsed", "copies A")
    cause = "100% of the held-out completions are in the trap 'copies A', since step 2"
    remedy = "try the task's default reward, --reward prefix"
    assert (verdict["cause"], verdict["remedy"]) == (cause, remedy)
    assert re.search(rf"\n+COLLAPSED: held-out .*\n{re.escape(cause)}\n{remedy}\n", said)
    assert re.search(r"\nnext\n  python train.py --config \S+ --reward prefix\n", said)


@pytest.mark.slow
def test_a_policy_that_learns_is_said_to_have_learned(tmp_path, capsys, monkeypatch, tiny_flags):
    Scripted(learns, monkeypatch)
    options = [*SCRIPTED, *tiny_flags, "--reward", "similarity", "--name", "a"]
    assert train.main(options) == 0
    verdict = load_run("runs/a").verdict
    assert (verdict["verdict"], verdict["cause"], verdict["remedy"]) == ("learned", "", "")
    assert "\nLEARNED: " in capsys.readouterr().out


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
        "--config",
        "{patience: 3}",
    ]
    assert train.main([*options, "--steps", "9"]) == 3
    said = capsys.readouterr().out.splitlines()
    reason = (
        "no group could be trained on for 3 steps (100% failed; reward 0.000); "
        + (REMEDIES["failed"])
    )
    assert said[-1].endswith(f"stopped after step 3: {reason}")
    assert any(line.startswith("NO SIGNAL: held-out score at level 1") for line in said)
    assert any(
        line.startswith("100% of the groups were failed (all with the lowest") for line in said
    )
    assert any(line.startswith("0 of 3 steps updated the weights; 100% of the") for line in said)
    folder = tmp_path / "runs/a"
    verdict = read_metrics(folder / "eval.jsonl")[-1]
    assert (verdict["purpose"], verdict["verdict"], verdict["step"], verdict["stopped"]) == (
        "verdict",
        "no signal",
        3,
        reason,
    )
    assert (folder / "checkpoints/step-000003").is_dir()
    trust = ["--task", "paid.py:Paid"]
    assert train.main(["--resume", "runs/a", *trust]) == 3  # still out of patience
    assert len(read_metrics(folder / "metrics.jsonl")) == 3
    assert train.main(["--resume", "runs/a", *trust, "--config", "{patience: 5}"]) == 3
    assert len(read_metrics(folder / "metrics.jsonl")) == 5

    control = ["--control", "shuffled-rewards", "--name", "c"]
    assert train.main([*options, "--steps", "9", *control]) == 3  # a control ends like any run


@pytest.mark.slow
def test_a_solved_run_ends_early_after_a_held_out_check(all_end, tmp_path, capsys, tiny_flags):
    (tmp_path / "paid.py").write_text(PAID)
    options = [*SMALL, *tiny_flags, "--words", "1", "--task", "paid.py:Always", "--steps", "12"]
    options += ["--eval-problems", "64"]  # fewer could not show that it was solved before
    assert train.main([*options, "--name", "a"]) == 0
    said = capsys.readouterr().out
    assert (
        "ended after step 10: at least 95% of the groups of the last 10 steps were solved" in said
    )
    assert "ALREADY SOLVED: held-out score at level 1 1.000 → 1.000" in said
    folder = tmp_path / "runs/a"
    kinds = [line["kind"] for line in read_metrics(folder / "curriculum.jsonl")]
    assert kinds == ["solved"] and (folder / "checkpoints/step-000010").is_dir()
    assert train.main(["--resume", "runs/a", "--task", "paid.py:Always"]) == 0
    assert "where it had ended: at least 95% of the groups of the last" in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 10

    assert train.main([*options, "--name", "b", "--config", "{patience: 0}"]) == 0
    assert len(read_metrics(tmp_path / "runs/b/metrics.jsonl")) == 12


@pytest.mark.slow
def test_a_check_below_the_mark_does_not_end_a_run(all_end, tmp_path, monkeypatch, tiny_flags):
    (tmp_path / "paid.py").write_text(PAID)
    monkeypatch.setattr(heldout, "SOLVED_MEAN", 1.001)
    options = [*SMALL, *tiny_flags, "--words", "1", "--task", "paid.py:Always", "--steps", "5"]
    assert train.main([*options, "--eval-problems", "64", "--name", "a"]) == 0
    assert len(read_metrics(tmp_path / "runs/a/metrics.jsonl")) == 5

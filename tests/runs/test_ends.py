"""How a run ends: at the top of its ladder, solved, or with nothing to learn from."""

import pytest
import yaml
from screens import unbroken
from small_runs import BY_PLACE
from small_train import SMALL

from grpo.run.logs import read_metrics
from grpo.tools import train


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

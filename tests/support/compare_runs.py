"""Compare everything that two runs wrote, except times and the name of the run."""

import json
import re
from pathlib import Path

from grpo.data.files import read_jsonl_zst
from grpo.run.logs import checkpoint_folders, read_metrics

DATE = re.compile(r"(?m)^(=== step \d+) .*")
CLOCKS = ("time", "step_time", "tokens_per_second")
LOGS = ("eval.jsonl", "seen.jsonl", "curriculum.jsonl", "groups.jsonl")


def without_times(lines):
    """Return lines of metrics.jsonl without times and speeds."""
    return [
        {k: v for k, v in line.items() if k not in CLOCKS and not k.startswith("time/")}
        for line in lines
    ]


def without_seconds(decisions):
    """Return a run's decisions without the seconds that its pre-flight took."""
    for decision in decisions:
        for level in decision["figures"].get("levels", ()):
            level.pop("seconds", None)
    return decisions


def without_name(run, evaluations):
    """Return lines of eval.jsonl whose command lacks the run's name and the way to the program."""
    for line in evaluations:
        command = line.get("next_command", "").replace(f"runs/{run.name}", "runs/NAME")
        line["next_command"] = re.sub(
            r"(PYTHONPATH=)?\S*\.\./\S*(?=train\.py|eval\.py| )", "", command
        )
    return evaluations


def written(run: Path):
    """Return what a run wrote, by name and without times.

    These are its logs, its rollouts, and the weights, moments and state of its last checkpoint.
    """
    files = {log: read_metrics(run / log) for log in LOGS}
    files["eval.jsonl"] = without_name(run, files["eval.jsonl"])
    files["curriculum.jsonl"] = without_seconds(files["curriculum.jsonl"])
    files["metrics.jsonl"] = without_times(read_metrics(run / "metrics.jsonl"))
    files["samples.log"] = DATE.sub(r"\1", (run / "samples.log").read_text())
    files["prompt.txt"] = (run / "prompt.txt").read_text()
    for path in sorted((run / "rollouts").iterdir()):
        files[f"rollouts/{path.name}"] = read_jsonl_zst(path)

    last = checkpoint_folders(run)[-1]
    for name in json.loads((last / "manifest.json").read_text())["files"]:
        if name.endswith((".safetensors", "trainer.json")):
            files[f"{last.name}/{name}"] = (last / name).read_bytes()
    return files


def differing(one, two) -> list[str]:
    """Return the names in which the results of `written` for two runs differ."""
    return [
        name
        for name in {**one, **two}
        if name not in one or name not in two or one[name] != two[name]
    ]


def assert_same_run(one: Path, two: Path):
    assert differing(written(one), written(two)) == []

"""Compare two runs: everything they wrote, except for times."""

import json
import re
from pathlib import Path

from data.files import read_jsonl_zst
from grpo.run.checkpoint import checkpoints
from grpo.run.logs import read_metrics

DATE = re.compile(r"(?m)^(=== step \d+) .*")
CLOCKS = ("time", "step_time", "tokens_per_second")
LOGS = ("eval.jsonl", "seen.jsonl", "curriculum.jsonl", "groups.jsonl")


def timeless(lines):
    return [
        {k: v for k, v in line.items() if k not in CLOCKS and not k.startswith("time/")}
        for line in lines
    ]


def unhurried(decisions):
    """Return a run's decisions without the seconds that its pre-flight took."""
    for decision in decisions:
        for level in decision["figures"].get("levels", ()):
            level.pop("seconds", None)
    return decisions


def written(run: Path):
    """Return what a run wrote, by name and without times.

    These are its logs, its rollouts, and the weights, moments and state of its last checkpoint.
    """
    files = {log: read_metrics(run / log) for log in LOGS}
    files["curriculum.jsonl"] = unhurried(files["curriculum.jsonl"])
    files["metrics.jsonl"], files["samples.log"] = (
        timeless(read_metrics(run / "metrics.jsonl")),
        DATE.sub(r"\1", (run / "samples.log").read_text()),
    )
    files |= {
        f"rollouts/{path.name}": read_jsonl_zst(path)
        for path in sorted((run / "rollouts").iterdir())
    }
    files["prompt.txt"] = (run / "prompt.txt").read_text()
    last = checkpoints(run)[0][-1]
    names = [
        name
        for name in json.loads((last / "manifest.json").read_text())["files"]
        if name.endswith((".safetensors", "trainer.json"))
    ]
    return files | {f"{last.name}/{name}": (last / name).read_bytes() for name in names}


def differing(one, two) -> list[str]:
    """Return the names of what two runs wrote (`written`) that are not in both, or not the same."""
    return [
        name
        for name in {**one, **two}
        if name not in one or name not in two or one[name] != two[name]
    ]


def assert_same_run(one: Path, two: Path):
    assert differing(written(one), written(two)) == []

"""Measure how long each command of grpo.inspect takes on a long run.

    python tests/benchmarks/bench_inspect.py --steps 500 --completions 64

The run is synthetic: groups of 16, completions of 60 random words, and the metrics of a real step.
Each command is a process of its own, as a user starts it; the time is that of the whole process in
seconds. `replay` and `tokens --policy` are not measured: they need a real run, and take as long as
an update of its model.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo.records import Completion, Group
from grpo.run.rollouts import file_of, summaries, write_rollouts
from tasks.base import Problem, Score

COMMANDS = (
    ["steps"],
    ["step", "250"],
    ["group", "250", "1"],
    ["tokens", "250", "1", "3"],
    ["degenerate"],
    ["compare", "{run}"],
    ["steps", "--level", "25", "--last", "10", "--json"],
    ["export", "{run}/last.jsonl", "--last", "10"],
)

GROUP_SIZE = 16


def write_run(folder: Path, steps: int, completions: int):
    rng = random.Random(0)
    words = [f"word{i}" for i in range(2000)]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: interleave\nreward: prefix\nlevel: 25\n")
    with (
        open(folder / "metrics.jsonl", "w") as metrics,
        open(folder / "groups.jsonl", "w") as index,
    ):
        for step in range(1, steps + 1):
            numbers = range(completions // GROUP_SIZE)
            groups = [random_group(rng, words, step, number) for number in numbers]
            write_rollouts(file_of(folder, "step", step), groups, step=step)
            index.write(json.dumps({"step": step, "groups": summaries(groups)}) + "\n")
            metrics.write(json.dumps(metrics_of(step, len(groups))) + "\n")
    (folder / "eval.jsonl").write_text("")


def random_group(rng: random.Random, words: list[str], step: int, number: int) -> Group:
    """Return a group of random texts; three of ten groups are solved."""
    target = rng.choices(words, k=60)
    is_solved = rng.random() < 0.3
    texts, scores, completions = [], [], []
    for _ in range(GROUP_SIZE):
        written = target
        if not is_solved:
            written = [word if rng.random() < 0.9 else rng.choice(words) for word in target]
        texts.append(" ".join(written))
    for _ in texts:
        reward = 1.0 if is_solved else rng.random()
        scores.append(Score(reward, {"matches": 50, "trap": None}))
    for text in texts:
        tokens = tuple(rng.choices(range(4000), k=90))
        logprobs = tuple(-rng.random() for _ in range(90))
        completions.append(Completion(tokens, logprobs, text, "stop"))

    return Group(
        number,
        Problem("interleave", 25, "Take turns.", " ".join(target), f"{step}-{number}"),
        tuple(range(150)),
        1.0,
        completions,
        scores=scores,
        class_name="solved" if is_solved else "varied",
        action="skip" if is_solved else "keep",
        advantages=[] if is_solved else [rng.random() for _ in completions],
    )


def metrics_of(step: int, groups: int) -> dict:
    """Return a line of metrics.jsonl."""
    return {
        "step": step,
        "level": 25,
        "reward": 0.5,
        "reward_std": 0.1,
        "value": 0.5,
        "exact": 0.1,
        "groups/count": groups,
        "groups/kept": groups,
        "groups/class/varied": groups,
        "temperature": 1.0,
        "distinct_completions": 9.0,
        "entropy": 0.1,
        "grad_norm": 0.4,
        "completions/mean_length": 90.0,
        "step_time": 2.0,
        "num_tokens": step,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--completions", type=int, default=64, help="completions of a step, in groups of 16"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        write_run(run, arguments.steps, arguments.completions)
        megabytes = sum(path.stat().st_size for path in run.rglob("*.*")) / 1e6
        print(f"{arguments.steps} steps of {arguments.completions} completions, {megabytes:.0f} MB")
        for command in COMMANDS:
            argv = [part.format(run=run) for part in command]
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "grpo.inspect", str(run), *argv],
                check=True,
                capture_output=True,
            )
            print(f"{time.perf_counter() - start:6.2f} s  {' '.join(command)}")


if __name__ == "__main__":
    main()

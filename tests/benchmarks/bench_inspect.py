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


def write_run(folder: Path, steps: int, completions: int):
    rng, size = random.Random(0), 16
    words = [f"word{i}" for i in range(2000)]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: interleave\nreward: prefix\nlevel: 25\n")
    with (
        open(folder / "metrics.jsonl", "w") as metrics,
        open(folder / "groups.jsonl", "w") as index,
    ):
        for step in range(1, steps + 1):
            groups = []
            for number in range(completions // size):
                target, alike = rng.choices(words, k=60), rng.random() < 0.3
                texts = [
                    " ".join(
                        target
                        if alike
                        else [word if rng.random() < 0.9 else rng.choice(words) for word in target]
                    )
                    for _ in range(size)
                ]
                scores = [
                    Score(1.0 if alike else rng.random(), {"matches": 50, "trap": None})
                    for _ in texts
                ]
                rows = [
                    Completion(
                        tuple(rng.choices(range(4000), k=90)),
                        tuple(-rng.random() for _ in range(90)),
                        text,
                        "stop",
                    )
                    for text in texts
                ]
                groups.append(
                    Group(
                        number,
                        Problem(
                            "interleave", 25, "Take turns.", " ".join(target), f"{step}-{number}"
                        ),
                        tuple(range(150)),
                        1.0,
                        rows,
                        scores=scores,
                        class_name="solved" if alike else "varied",
                        action="skip" if alike else "keep",
                        advantages=[] if alike else [rng.random() for _ in rows],
                    )
                )
            write_rollouts(file_of(folder, "step", step), groups, step=step)
            index.write(json.dumps({"step": step, "groups": summaries(groups)}) + "\n")
            metrics.write(
                json.dumps(
                    {
                        "step": step,
                        "level": 25,
                        "reward": 0.5,
                        "reward_std": 0.1,
                        "value": 0.5,
                        "exact": 0.1,
                        "groups/count": len(groups),
                        "groups/kept": len(groups),
                        "groups/class/varied": len(groups),
                        "temperature": 1.0,
                        "distinct_completions": 9.0,
                        "entropy": 0.1,
                        "grad_norm": 0.4,
                        "completions/mean_length": 90.0,
                        "step_time": 2.0,
                        "num_tokens": step,
                    }
                )
                + "\n"
            )
    (folder / "eval.jsonl").write_text("")


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

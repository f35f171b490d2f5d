"""Measure how long the programs that read a run take on a long one.

    python tests/benchmarks/bench_readers.py runs/NAME --steps 5000

The long run repeats the steps of a real one: the lines of its logs under new numbers, and its files
of rollouts as links. Each program is a process of its own, as a user starts it; the time is that of
the whole process in seconds.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = (
    ["grpo.inspect", "{run}", "steps"],
    ["grpo.inspect", "{run}", "step", "12"],
    ["grpo.inspect", "{run}", "why", "12", "0", "0"],
    ["grpo.inspect", "{run}", "degenerate"],
    ["grpo.inspect", "{run}", "compare", "{run}"],
    ["tasks.audit", "{run}"],
)

# The logs with a line for each step.
LOGS = ("metrics.jsonl", "groups.jsonl", "seen.jsonl")


def repeat(source: Path, target: Path, steps: int) -> None:
    """Write a run of so many steps that repeats those of the run `source`."""
    (target / "rollouts").mkdir(parents=True)
    shutil.copy(source / "config.yaml", target)
    shutil.copy(source / "eval.jsonl", target)
    for name in LOGS:
        lines = [json.loads(line) for line in (source / name).read_text().splitlines()]
        real = {line["step"]: line for line in lines if line["step"]}
        with open(target / name, "w") as file:
            for step in range(1, steps + 1):
                line = {**real[_original(step, len(real))], "step": step}
                file.write(json.dumps(line) + "\n")

    rollouts = sorted((source / "rollouts").glob("step-*"))
    for step in range(1, steps + 1):
        real_file = rollouts[_original(step, len(rollouts)) - 1]
        os.link(real_file, target / "rollouts" / f"step-{step:06d}.jsonl.zst")
    for path in (source / "rollouts").glob("eval-*"):
        os.link(path, target / "rollouts" / path.name)


def _original(step: int, real_steps: int) -> int:
    """Return the real step that `step` of the long run repeats."""
    return (step - 1) % real_steps + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a real run, of a few steps")
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()

    # On the same disk, because links do not leave it.
    with tempfile.TemporaryDirectory(dir=arguments.run.resolve().parent) as home:
        run = Path(home) / "run"
        repeat(arguments.run, run, arguments.steps)
        for program in PROGRAMS:
            argv = [part.format(run=run) for part in program]
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True)
            seconds = time.perf_counter() - start
            print(f"{seconds:6.2f} s  status {done.returncode}  {' '.join(program)}")


if __name__ == "__main__":
    main()

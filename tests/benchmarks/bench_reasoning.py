"""Learn several tasks of reasoning-gym, with our trainer and with TRL's, from the same starts.

    python tests/benchmarks/bench_reasoning.py --model DIR --tasks chain_sum,gcd --seeds 0,1,2

For each task the untrained model first imitates right answers, as our runs do (one run of
train.py). Both trainers start from that policy, and `bench_learning.py` compares them over equally
many steps of equally many completions; it says what is the same on both sides. A task whose start
scores outside of --between is left out, because nothing of it is within reach, or nothing is left
to learn. Prints a Markdown table: held-out score of the start, and the mean over the seeds, with
lowest and highest, after the last step of each side; sampled tokens; minutes without evaluations.

Needs the extras `bench` and `reasoning`. Everything is kept in the folder named like --output
without its ending, and what is finished there is not made again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_learning import show
from learning_records import NAMES, TRAINERS

from data.errors import UserError, exit_status
from grpo import load_run

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]

TASKS = (
    "chain_sum,gcd,basic_arithmetic,binary_alternation,family_relationships,decimal_chain_sum,"
    "calendar_arithmetic,time_intervals,spell_backward,simple_equations,word_sorting,"
    "fraction_simplification,decimal_arithmetic,number_format,syllogism,count_bits"
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="the untrained model")
    add("--tasks", default=TASKS, help="datasets of reasoning-gym, at level 1")
    add("--between", default="0.02,0.9", help="scores of a start that is trained further")
    add("--most", type=int, default=9, help="tasks to train on: the first ones that qualify")
    add("--max-new-tokens", type=int, default=48)
    add("--seeds", default="0,1,2")
    add("--steps", type=int, default=40)
    add("--rate", default="5e-4", help="learning rate of both trainers")
    add("--eval-problems", type=int, default=200)
    add("--jobs", type=int, default=3, help="runs of a task at once")
    add("--together", type=int, default=1, help="tasks at once")
    add("--output", type=Path, default=TOP / "runs" / "reasoning.json", metavar="FILE.json")
    add("others", nargs="*", metavar="-- FLAG", help="more flags of bench_learning.py")
    return parser.parse_args(argv)


def call(log: Path, *words: Any) -> None:
    """Run a Python program in the log's folder. Raises UserError if it makes a mistake."""
    with open(log, "a") as file:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, stdout=file, stderr=file, cwd=log.parent, check=False)
    # A run ends with 3 if it has not learned, and one of a single step never has.
    if done.returncode not in (0, 3):
        last = log.read_text().splitlines()[-1]
        raise UserError(f"{words[0]} ended with status {done.returncode}: {last}; see {log}")


def start(own: argparse.Namespace, folder: Path, task: str) -> float:
    """Make the policy that both trainers start from; return its last score of the imitation."""
    log, policy = folder / f"{task}.log", folder / f"start-{task}"
    if not policy.is_dir():
        flags = ["--model", Path(own.model).resolve() if Path(own.model).exists() else own.model]
        flags += ["--task", f"reasoning_gym:{task}", "--max-new-tokens", own.max_new_tokens]
        flags += ["--warm-start", "imitation", "--preflight", "off", "--eval-problems", 50]
        call(log, TOP / "train.py", *flags, "--steps", 1, "--name", task)
        call(log, "-m", "grpo.export", f"runs/{task}/checkpoints/step-000000", policy.name)

    evaluations = load_run(folder / "runs" / task).evals
    score = [line["mean"] for line in evaluations if line["purpose"] == "warm start"][-1]
    print(f"{task}: {score:.3f} after imitation", flush=True)
    return score


def train(own: argparse.Namespace, folder: Path, task: str) -> dict[str, Any]:
    """Compare both trainers on a task; return what `bench_learning.py` wrote."""
    output = folder / f"{task}.json"
    flags = ["--model", f"start-{task}", "--task", f"reasoning_gym:{task}", "--level", 1]
    flags += ["--max-new-tokens", own.max_new_tokens, "--steps", own.steps, "--minutes", 60]
    flags += ["--rates", own.rate, "--seeds", own.seeds, "--jobs", own.jobs, "--enough", 2]
    flags += ["--eval-every", own.steps, "--eval-problems", own.eval_problems]
    call(
        folder / f"{task}.log", HERE / "bench_learning.py", *flags, "--output", output, *own.others
    )
    print(f"{task}: trained", flush=True)
    return json.loads(output.read_text())


def row(task: str, found: dict[str, Any]) -> list[str]:
    """Return the row of a task in the table."""
    first, *records = found["runs"]
    cells = [task, f"{first['head']['score']:.3f} (n = {first['head']['n']})"]
    for trainer in TRAINERS:
        last = [each["steps"][-1] for each in records if each["head"]["job"]["trainer"] == trainer]
        scores = [step["score"] for step in last]
        cells += [
            f"{fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})",
            f"{fmean(step['tokens'] for step in last) / 1e3:.0f} k",
            f"{fmean(step['seconds'] for step in last) / 60:.2f}",
        ]
    return cells


def main(argv: Sequence[str]) -> int:
    own = parse(argv)
    # Programs beside each other share the cores.
    share = max(1, (os.cpu_count() or 1) // (own.jobs * own.together))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    own.output = own.output.resolve()
    folder = own.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    least, most = map(float, own.between.split(","))

    tasks = own.tasks.split(",")
    with ThreadPoolExecutor(own.jobs * own.together) as pool:
        scores = list(pool.map(partial(start, own, folder), tasks))
    chosen = [task for task, score in zip(tasks, scores) if least <= score <= most][: own.most]

    with ThreadPoolExecutor(own.together) as pool:
        found = dict(zip(chosen, pool.map(partial(train, own, folder), chosen)))

    sides = [
        f"{NAMES[trainer]}{what}" for trainer in TRAINERS for what in ("", ", tokens", ", min")
    ]
    print()
    show([["task", "start", *sides], *(row(task, each) for task, each in found.items())])
    own.output.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("bench_reasoning.py", lambda: main(sys.argv[1:])))

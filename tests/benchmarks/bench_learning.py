"""Compare how fast our trainer and TRL's GRPOTrainer learn from one start on one GPU.

    python tests/benchmarks/bench_learning.py --model runs/start --minutes 8 --seeds 0,1,2

Held-out score against sampled tokens and against minutes: two tables and a JSON file. Needs the
extra `bench`. Both start from the same policy, which should already earn something: a real model
after the short imitation that begins our runs. Two commands make it:

    python train.py --model DIR --words 10 --no-ramp --warm-start imitation --steps 1 --name w
    python -m grpo.export runs/w/checkpoints/step-000000 runs/start

What is the same on both sides: the start; the problems, their order and the tokens of each prompt
(a run that saw others is refused); the completion budget; the task's reward, on the decoded
completion; prompts x group size; temperature 1; the dapo loss with its clip range and without KL;
advantages divided by the group's standard deviation; rank, scale and targets of LoRA; AdamW with
our betas, no weight decay, gradients clipped to norm 1; the learning rate of each step (a
warm-up of five, then constant). Each side tries every learning rate of its list.

What differs: how completions are generated (TRL: by `transformers`, its default), how the update is
computed, and that ours leaves groups without variance out of the loss, where TRL counts their
tokens in the mean; and on a GPU the precision: TRL's is bfloat16, ours float16, or what --ours
says, e.g. '{"dtype": "bfloat16"}'. TRL takes the whole step as one micro-batch, without gradient
checkpointing; where memory runs out, give the largest --trl-micro that fits.

How it is measured:

- Score: every --eval-every steps, on --eval-problems held-out problems at temperature 1, with the
  same random numbers each time. Our sampler evaluates both sides: TRL's weights are copied into our
  model.
- Time: from the beginning of the first step, compilation included (nothing compiled by an earlier
  run is used), without evaluations. Neither side writes checkpoints.
- A score is reached at the first of two evaluations in a row that are at least as high, so that
  more evaluations bring no more luck. A second evaluation at the last step confirms the last one.
- With several seeds, all must reach a score, and its cost is their mean.
- The best learning rate of a trainer is the one that first reaches the highest score that both
  trainers reach within --minutes.

Each run is a process of its own and writes one file in the folder named like --output without its
ending. Finished runs are not made again, so a comparison can be made in parts (--trainers, --rates,
--seeds) and continued after it was killed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from data.errors import UserError, exit_status

TOP = Path(__file__).resolve().parents[2]
TRAINERS = ("ours", "trl")
SCORES = (0.9, 0.99)

# A trainer and its learning rate; seconds, tokens and score of an evaluation.
Arm = tuple[str, float]
Point = tuple[float, float, float]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="the start: a directory in Hugging Face layout, or builtin")
    add("--task", default="interleave")
    add("--level", type=int, default=10, help="e.g. words of each text")
    add("--minutes", type=float, default=8.0, help="minutes of training in each run")
    add("--steps", type=int, default=5000, help="most steps of each run")
    add("--enough", type=float, default=0.995, help="two such scores in a row end a run")
    add("--rates", default="3e-4,1e-3,3e-3", help="learning rates")
    add("--seeds", default="0")
    add("--prompts", type=int, default=16)
    add("--group-size", type=int, default=16)
    add("--lora-rank", type=int, default=64, help="0: full fine-tuning")
    add("--eval-every", type=int, default=10, help="steps between evaluations")
    add("--eval-problems", type=int, default=64)
    add("--trainers", default=",".join(TRAINERS), help="the trainers to run now")
    add("--ours", type=json.loads, default={}, metavar="JSON", help="settings of ours alone")
    add("--trl-micro", type=int, default=0, help="completions of TRL's micro-batch (0: all)")
    add("--output", type=Path, default=TOP / "runs" / "learning.json", metavar="FILE.json")
    return parser.parse_args(argv)


def jobs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs asked for, the score of the start first.

    The sides take turns, because a machine's speed may change.
    """
    own = ("rates", "seeds", "trainers", "output")
    shared = {name: value for name, value in vars(options).items() if name not in own}
    start = {"trainer": "start", "rate": 0.0, "seed": 0, "budget": None}
    return [shared | start] + [
        shared | {"trainer": trainer, "rate": float(rate), "seed": int(seed), "budget": None}
        for seed in options.seeds.split(",")
        for rate in options.rates.split(",")
        for trainer in options.trainers.split(",")
    ]


def make(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, which is made in a process of its own unless it exists."""
    name = "-".join(str(job[each]) for each in ("trainer", "rate", "seed"))
    path = folder / f"{name}.jsonl"
    if lines := read(path, job):
        return lines

    print(f"{name} ...", file=sys.stderr, flush=True)
    paths = os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))
    with open(path.with_suffix(".log"), "w") as log, tempfile.TemporaryDirectory() as cache:
        # Each run has an empty cache, so that none profits from what another one has compiled.
        caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
        status = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(job), str(path)],
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", **os.environ, **caches, "PYTHONPATH": paths},
        ).returncode
    if status:
        raise UserError(f"{name}: exit status {status}; see {path.with_suffix('.log')}")
    return read(path, job)


def read(path: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the run in `path`; none if it was killed or not made yet.

    Raises UserError if the file holds a run with other settings.
    """
    texts = path.read_text().splitlines() if path.exists() else []
    if not texts or not texts[-1].startswith('{"end"'):
        return []
    lines = [json.loads(text) for text in texts]
    if lines[0]["job"] != job:
        raise UserError(f"{path}: made with other settings; give another --output, or remove it")
    return lines


def points(lines: Sequence[dict[str, Any]], start: float) -> list[Point]:
    """Return the evaluations of a run, each with the lower of its own score and the next one."""
    found = [(0.0, 0.0, start)] + [
        (line["seconds"], line["tokens"], line[name])
        for line in lines[1:-1]
        for name in ("score", "again")  # the last evaluation was made twice
        if name in line
    ]
    return [(*here[:2], min(here[2], after[2])) for here, after in pairwise(found)]


def cost(runs: Sequence[list[Point]], score: float) -> tuple[float, float]:
    """Return mean seconds and mean tokens to `score`, infinity unless every seed reaches it."""
    firsts = [
        next((point[:2] for point in run if point[2] >= score), (math.inf, math.inf))
        for run in runs
    ]
    seconds, tokens = map(fmean, zip(*firsts, strict=True))
    return seconds, tokens


def check_comparable(runs: Sequence[list[dict[str, Any]]]) -> None:
    """Raise UserError unless all runs trained equally many parameters on their seed's prompts."""
    trained = {lines[0]["trained"] for lines in runs}
    if len(trained) > 1:
        raise UserError(f"no comparison: parameters trained: {sorted(trained)}")

    seen: dict[tuple[int, int], str] = {}
    for lines in runs:
        seed = lines[0]["job"]["seed"]
        for line in lines[1:-1]:
            if seen.setdefault((seed, line["step"]), line["prompts"]) != line["prompts"]:
                raise UserError(
                    f"no comparison: with seed {seed} the prompts differ at step {line['step']}"
                )


def report(start: dict[str, Any], runs: Sequence[list[dict[str, Any]]], output: Path) -> None:
    """Print the tables, and write their figures with all runs."""
    check_comparable(runs)
    arms: dict[Arm, list[list[Point]]] = {}
    for lines in runs:
        job = lines[0]["job"]
        arms.setdefault((job["trainer"], job["rate"]), []).append(points(lines, start["score"]))

    highest = {arm: min(max(point[2] for point in run) for run in arms[arm]) for arm in arms}
    trainers = sorted({trainer for trainer, _ in arms})
    score = min(max(highest[arm] for arm in arms if arm[0] == name) for name in trainers)
    best = {
        name: min((arm for arm in arms if arm[0] == name), key=lambda arm: cost(arms[arm], score))
        for name in trainers
    }

    print(json.dumps({**start, "device": runs[0][0]["device"]}), end="\n\n")
    print(f"| trainer | rate | seeds | highest score | minutes to {score:.3f} | M tokens |")
    print("|---|---|---|---|---|---|")
    for (trainer, rate), found in arms.items():
        seconds, tokens = cost(found, score)
        figures = f"{highest[trainer, rate]:.3f} | {seconds / 60:.3g} | {tokens / 1e6:.3g}"
        print(f"| {trainer} | {rate:g} | {len(found)} | {figures} |")

    costs = {
        each: {name: cost(arms[best[name]], each) for name in best} for each in (score, *SCORES)
    }
    print("\n| score | trainer | minutes | M tokens |\n|---|---|---|---|")
    for each, by_trainer in costs.items():
        for name, (seconds, tokens) in by_trainer.items():
            print(f"| {each:.3f} | {name} | {seconds / 60:.3g} | {tokens / 1e6:.3g} |")
    output.write_text(json.dumps({"common": score, "costs": costs, "runs": runs}, indent=1))


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--child"]:
        from learning_sides import run_job

        run_job(argparse.Namespace(**json.loads(argv[1])), Path(argv[2]))
        return 0

    options = parse(argv)
    folder = options.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    first, *jobs = jobs_of(options)
    (start, _) = make(first, folder)
    runs = [make({**job, "budget": start["budget"]}, folder) for job in jobs]
    report(start, runs, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("bench_learning.py", lambda: main(sys.argv[1:])))

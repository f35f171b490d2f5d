"""Compare how fast our trainer and TRL's GRPOTrainer learn from one start on one GPU.

    python tests/benchmarks/bench_learning.py --model runs/start --minutes 8 --seeds 0,1,2

Held-out score against sampled tokens and against minutes: two tables, a JSON file and a plot. Needs
the extra `bench`, and `report` for the plot. Both start from the same policy, which should already
earn something: a real model after the short imitation that begins our runs. Two commands make it:

    python train.py --model DIR --words 10 --no-ramp --warm-start imitation --steps 1 --name w
    python -m grpo.export runs/w/checkpoints/step-000000 runs/start

What is the same on both sides: the start; the problems, their order and the tokens of each prompt
(a run that saw others is refused); the completion budget; the task's reward, on the decoded
completion; prompts x group size; temperature 1; the dapo loss with its clip range and without KL;
advantages divided by the group's standard deviation; rank, scale and targets of LoRA; AdamW with
our betas, no weight decay, gradients clipped to norm 1; the learning rate of each step (a
warm-up of five, then constant). Each side tries every learning rate of its list.

What TRL gets: the largest micro-batch that fits (the whole step, halved as often as memory runs
out), no gradient checkpointing, and vLLM in its own process with --trl-vllm; without that flag it
generates by `transformers`, its default.

What differs: how completions are generated (ours: shared prompts, a fused decoder, speculative
decoding), how the update is computed, and that ours leaves groups without variance out of the loss,
where TRL counts their tokens in the mean; and on a GPU the precision: TRL's is bfloat16, ours
float16, or what --ours says, e.g. '{"dtype": "bfloat16"}'.

How it is measured:

- Score: every --eval-every steps, on --eval-problems held-out problems at temperature 1, with the
  same random numbers each time. Our sampler evaluates both sides: TRL's weights are copied into our
  model.
- Time: from the beginning of the first step, compilation included (nothing compiled by an earlier
  run is used), without evaluations. Neither side writes checkpoints. Start-up (imports, loading,
  building the trainer) is not in it; it and the first step have columns of their own.
- A score is reached at the first of two evaluations in a row that are at least as high, so that
  more evaluations bring no more luck. A second evaluation at the last step confirms the last one.
- With several seeds, all must reach a score, and its cost is their mean.
- The best learning rate of a trainer is the one that first reaches the highest score that both
  trainers reach within --minutes.

Each run is a process of its own and writes one file in the folder named like --output without its
ending. Finished runs are not made again, so a comparison can be made in parts (--trainers, --rates,
--seeds) and continued after it was killed. Runs made side by side (--jobs) are marked as such.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from learning_job import Job
from learning_records import (
    NAMES,
    TRAINERS,
    Arm,
    Record,
    arms_of,
    best_arms,
    check_comparable,
    common_score,
    compare,
    read_record,
)
from learning_sides import run_job

from data.errors import exit_status

TOP = Path(__file__).resolve().parents[2]
SCORES = (0.9, 0.99)
OUT_OF_MEMORY = 75  # exit status of a run that may be tried with a smaller micro-batch


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="the policy to start from: a directory in Hugging Face layout, or builtin",
    )
    add("--task", default="interleave")
    add("--level", type=int, default=10, help="e.g. words of each text")
    add("--reward", help="one of the task's rewards (default: the task's own)")
    add("--max-new-tokens", type=int, help="completion budget (default: the longest answer's)")
    add("--minutes", type=float, default=8.0, help="minutes of training in each run")
    add("--steps", type=int, default=5000, help="most steps of each run")
    add("--enough", type=float, default=0.995, help="two such scores in a row end a run")
    add("--rates", type=numbers, default="3e-4,1e-3,3e-3", help="learning rates")
    add("--trl-rates", type=numbers, help="learning rates of TRL (default: --rates)")
    add("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default="0")
    add("--prompts", type=int, default=16)
    add("--group-size", type=int, default=16)
    add("--lora-rank", type=int, default=64, help="0: full fine-tuning")
    add("--eval-every", type=int, default=10, help="steps between evaluations")
    add("--eval-problems", type=int, default=64)
    add("--trainers", default=",".join(TRAINERS), help="the trainers to run now")
    add("--ours", type=json.loads, default={}, metavar="JSON", help="settings of ours alone")
    add("--trl-micro", type=int, default=0, help="completions of TRL's micro-batch (0: all)")
    add("--trl-vllm", action="store_true", help="TRL generates by vLLM")
    add("--jobs", type=int, default=1, help="runs at once")
    add("--output", type=Path, default=TOP / "runs" / "learning.json", metavar="FILE.json")
    arguments = parser.parse_args(argv)
    arguments.trainers = arguments.trainers.split(",")
    arguments.trl_rates = arguments.trl_rates or arguments.rates
    if not set(arguments.trainers) <= set(TRAINERS):
        parser.error(f"--trainers: give one or both of {','.join(TRAINERS)}")
    if arguments.trl_micro and arguments.prompts * arguments.group_size % arguments.trl_micro:
        parser.error("--trl-micro: give a divisor of --prompts times --group-size")
    if "trl" in arguments.trainers and not find_spec("trl"):
        parser.error("--trainers trl: trl is not installed; it is in the extra bench")
    if arguments.trl_vllm and not find_spec("vllm"):
        parser.error("--trl-vllm: vllm is not installed; leave the flag out")
    return arguments


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Return the runs asked for. The sides take turns, because a machine's speed may change."""
    rates = {"ours": arguments.rates, "trl": arguments.trl_rates}
    most = max(map(len, rates.values()))
    return [
        job_of(arguments, trainer, rates[trainer][number], seed)
        for seed in arguments.seeds
        for number in range(most)
        for trainer in arguments.trainers
        if number < len(rates[trainer])
    ]


def job_of(arguments: argparse.Namespace, trainer: str, rate: float, seed: int) -> Job:
    is_trl = trainer == "trl"
    return Job(
        trainer=trainer,
        rate=rate,
        seed=seed,
        model=arguments.model,
        task=arguments.task,
        level=arguments.level,
        reward=arguments.reward,
        prompts=arguments.prompts,
        group_size=arguments.group_size,
        lora_rank=arguments.lora_rank,
        minutes=arguments.minutes,
        steps=arguments.steps,
        eval_every=arguments.eval_every,
        eval_problems=arguments.eval_problems,
        enough=arguments.enough,
        ours=arguments.ours,
        micro=arguments.trl_micro if is_trl else 0,
        vllm=arguments.trl_vllm and is_trl,
        budget=arguments.max_new_tokens,
        at_once=arguments.jobs,
    )


def make(job: Job, folder: Path) -> Record | None:
    """Return the record of `job`, made now unless it exists; None if the run fails."""
    path = folder / f"{job.name}.jsonl"
    if record := read_record(path, job):
        return record

    while (status := spawn(job, path)) == OUT_OF_MEMORY and (smaller := halved(job)):
        print(f"{job.name}: out of memory, now with micro-batches of {smaller.micro}", flush=True)
        job = smaller
    if status:
        print(f"{job.name}: exit status {status}; {path.with_suffix('.log')} ends with", flush=True)
        print(*path.with_suffix(".log").read_text().splitlines()[-8:], sep="\n  ", flush=True)
        return None
    return read_record(path, job)


def halved(job: Job) -> Job | None:
    """Return `job` with micro-batches of half the size; None if they cannot be halved."""
    micro = job.micro or job.batch
    return None if job.trainer != "trl" or micro % 2 else replace(job, micro=micro // 2)


def spawn(job: Job, path: Path) -> int:
    """Make the run in a process of its own; return the exit status."""
    print(f"{job.name} ...", file=sys.stderr, flush=True)
    paths = os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))
    with open(path.with_suffix(".log"), "w") as log, tempfile.TemporaryDirectory() as cache:
        # Each run has an empty cache, so that none profits from what another one has compiled.
        caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
        return subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(asdict(job)), str(path)],
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", **os.environ, **caches, "PYTHONPATH": paths},
        ).returncode


def child(text: str, path: str) -> int:
    import torch

    try:
        run_job(Job(**json.loads(text)), Path(path))
    except torch.OutOfMemoryError:
        traceback.print_exc()
        return OUT_OF_MEMORY
    return 0


def table_of_runs(records: Sequence[Record], arms: Sequence[Arm], score: float) -> list[list[str]]:
    rows = [
        ["trainer", "rate", "seeds", "highest score"]
        + [f"minutes to {score:.3f}", f"M tokens to {score:.3f}", "steps", "step s"]
        + ["first step s", "start-up s", "peak GB"]
    ]
    for arm in arms:
        mine = [record for record in records if record.arm == (arm.trainer, arm.rate)]
        seconds, tokens = arm.cost(score) or (None, None)
        memory = max(record.end["memory"]["peak GB"] for record in mine)
        rows.append(
            [NAMES[arm.trainer], f"{arm.rate:g}", str(len(mine)), f"{arm.highest:.3f}"]
            + [shown(seconds, 60), shown(tokens, 1e6)]
            + [f"{fmean(len(record.steps) for record in mine):.0f}"]
            + [f"{fmean(record.seconds_a_step for record in mine):.2f}"]
            + [f"{fmean(record.end['first'] for record in mine):.1f}"]
            + [f"{fmean(record.head['startup'] for record in mine):.1f}", f"{memory:.1f}"]
        )
    return rows


def table_of_scores(rows: Sequence[dict[str, float | None]]) -> list[list[str]]:
    head = ["score", "ours minutes", "TRL minutes", "TRL / ours", "ours M tokens", "TRL M tokens"]
    return [[*head, "TRL / ours"]] + [
        [
            f"{row['score']:.3f}",
            *(shown(row[f"{side} seconds"], 60) for side in TRAINERS),
            shown(row["ratio seconds"]),
            *(shown(row[f"{side} tokens"], 1e6) for side in TRAINERS),
            shown(row["ratio tokens"]),
        ]
        for row in rows
    ]


def shown(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def show(table: Sequence[Sequence[str]]):
    for cells in (table[0], ["---"] * len(table[0]), *table[1:]):
        print("| " + " | ".join(cells) + " |")
    print()


def plot(arms: Sequence[Arm], best: dict[str, Arm], score: float, path: Path):
    """Draw score against tokens and against minutes, each trainer's best rate in full colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "learning"  # the same figure is the same file
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    panels = [(1, 1e6, "sampled tokens (millions)"), (0, 60, "minutes, evaluations left out")]
    for axis, (column, unit, label) in zip(axes, panels):
        for arm in arms:
            is_best = best.get(arm.trainer) is arm
            for number, run in enumerate(arm.runs):
                axis.plot(
                    [point[column] / unit for point in run],
                    [point[2] for point in run],
                    color={"ours": "C0", "trl": "C1"}[arm.trainer],
                    alpha=1.0 if is_best else 0.25,
                    linewidth=1.4 if is_best else 0.9,
                    label=f"{NAMES[arm.trainer]}, rate {arm.rate:g}"
                    if is_best and not number
                    else None,
                )
        axis.axhline(score, color="0.6", linewidth=0.7, linestyle=":")
        axis.set(xlabel=label, ylim=(0, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="held-out score")
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def description(start: Record, record: Record) -> str:
    """Return what was compared, in two lines."""
    job, versions = record.head["job"], record.head["versions"]
    what = [
        f"{job['model']}, {job['task']}, level {job['level']}",
        f"{job['prompts']} x {job['group_size']} completions of at most {job['budget']} tokens",
        f"LoRA {job['lora_rank']}, {record.head['trained'] / 1e6:.2f} M parameters trained",
        f"{job['minutes']:g} minutes a run on {record.head['device']}",
    ]
    how = [f"score at the start {start.head['score']:.3f} (n = {start.head['n']})"]
    how += [f"{name} {number}" for name, number in versions.items()]
    if job["at_once"] > 1:
        how.append(f"{job['at_once']} runs at once: times are not those of a machine by itself")
    return f"{', '.join(what)}\n{', '.join(how)}\n"


def report(start: Record, records: Sequence[Record], output: Path):
    """Print the tables, and write them with all records and the plot beside them."""
    check_comparable(records)
    arms = arms_of(records, start.head["score"])
    score = common_score(arms)
    best = best_arms(arms, score)
    costs = compare(best, [score, *SCORES]) if len(best) == len(TRAINERS) else []

    print(description(start, records[0]))
    show(table_of_runs(records, arms, score))
    if costs:
        show(table_of_scores(costs))

    lines = [record.__dict__ for record in (start, *records)]
    output.write_text(json.dumps({"common": score, "costs": costs, "runs": lines}, indent=1))
    if find_spec("matplotlib"):
        plot(arms, best, score, output.with_suffix(".svg"))
    else:
        print("no plot: matplotlib is not installed; it is in the extra report")


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--child"]:
        return child(*argv[1:])
    arguments = parse(argv)
    folder = arguments.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)

    start = make(replace(job_of(arguments, "start", 0.0, 0), at_once=1), folder)
    if start is None:
        return 1
    jobs = [replace(job, budget=start.head["budget"]) for job in jobs_of(arguments)]
    for job in jobs:
        # Raises an error if a file holds a run with other settings, before anything is run.
        read_record(folder / f"{job.name}.jsonl", job)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(lambda job: make(job, folder), jobs))
    records = [record for record in found if record]
    if records:
        report(start, records, arguments.output)
    return 0 if len(records) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(exit_status("bench_learning.py", lambda: main(sys.argv[1:])))

"""Compare ways to start from a model that cannot do the task.

    python tests/benchmarks/bench_ways.py --model DIR --words 10 --steps 300 --seeds 0,1,2 --jobs 5

All arms have the same model, level, batch and number of steps. The arms are: a ladder that starts
at one word; imitation, then GRPO; and, as the control, imitation alone on as many answers as the
others sample completions. Every arm is an ordinary run in runs/, so its texts can be read.
Arguments after `--` go to every run, e.g. `-- --learning-rate 3e-4 --beta 0.02`. Existing runs are
not repeated.

Prints a Markdown table: held-out score before, after imitation and at each quarter of the steps,
exact answers, tokens, minutes.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

from grpo import load_run
from grpo.curriculum import warm_start
from grpo.curriculum.survey import LEVELS

TOP = Path(__file__).resolve().parents[2]
ARMS = {
    "ladder": ["--warm-start", "off"],
    "imitation": ["--warm-start", "imitation", "--no-ramp"],
    "imitation alone": ["--warm-start", "imitation", "--no-ramp"],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--words", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--name", default="ways", help="prefix of the names of the runs")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    own, passed_on = parser.parse_known_args()
    own.flags = [word for word in passed_on if word != "--"]
    return own


def command(own: argparse.Namespace, arm: str, seed: str) -> list[str]:
    """Return the command line of one run."""
    levels = [level for level in LEVELS if level < own.words]
    levels = ",".join(map(str, [*levels, own.words]))
    ladder = ["--curriculum", levels] if arm == "ladder" else []
    flags = [
        *("--task", "interleave", "--model", own.model, "--words", str(own.words)),
        *("--steps", str(own.steps), "--seed", seed, "--name", name_of(own, arm, seed)),
        *("--preflight", "off", "--patience", "0", "--eval-every", str(max(1, own.steps // 4))),
        *ARMS[arm],
        *ladder,
        *own.flags,
    ]
    if arm != "imitation alone":
        return [sys.executable, "train.py", *flags]
    return [sys.executable, __file__, "--model", own.model, "--alone", *flags]


def name_of(own: argparse.Namespace, arm: str, seed: str) -> str:
    return f"{own.name}-{arm.replace(' ', '-')}-seed{seed}"


def imitate_alone(arguments: list[str]) -> int:
    """Run train.py with imitation alone.

    No validation ends the imitation, it takes all of the steps, and GRPO makes none.
    """
    sys.path.insert(0, str(TOP))
    from grpo.tools import train

    with (
        patch.object(warm_start, "ENOUGH", 2.0),
        patch.object(warm_start, "MAX_SHARE", 1.0),
        patch.object(train, "take_steps", lambda *_: None),
    ):
        return train.main(arguments)


def row(folder: Path) -> list[str]:
    run = load_run(folder)
    reports = [line for line in run.reports if line["level"] == run.config["level"]]
    imitated = [line["mean"] for line in run.evals if line["purpose"] == "imitation"]
    times = [datetime.fromisoformat(line["time"]) for line in run.metrics]
    minutes = (times[-1] - times[0]).total_seconds() / 60 if times else 0.0
    return [
        folder.name,
        f"{reports[0]['mean']:.3f}",
        f"{imitated[0]:.3f}" if imitated else "",
        ", ".join(f"{line['mean']:.3f}" for line in reports[1:]),
        f"{reports[-1]['exact']:.2f}",
        f"{run.metrics[-1]['num_tokens'] / 1e6:.2f}" if run.metrics else "",
        f"{minutes:.1f}",
    ]


def main() -> int:
    if "--alone" in sys.argv:
        return imitate_alone(sys.argv[sys.argv.index("--alone") + 1 :])
    own = parse()
    runs = [(arm, seed) for seed in own.seeds.split(",") for arm in own.arms.split(",")]
    new = [run for run in runs if not (TOP / "runs" / name_of(own, *run)).exists()]
    with ThreadPoolExecutor(own.jobs) as pool:
        list(pool.map(lambda run: subprocess.run(command(own, *run), cwd=TOP), new))

    head = ["run", "before", "after imitation", "then", "exact", "M tokens", "minutes"]
    rows = [row(TOP / "runs" / name_of(own, *run)) for run in runs]
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

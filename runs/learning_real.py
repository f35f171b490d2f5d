"""Draw held-out evaluations of `tests/benchmarks/exploration.py`, one line a file, by minutes:

python runs/learning_real.py "0.5B: A0.jsonl A1.jsonl" "1.5B: B0.jsonl" --output runs/x.svg

Needs matplotlib (the extra `report`).
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams["svg.hashsalt"] = "learning"  # the same figure is the same file


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help='"NAME: FILE FILE ...", one file a seed')
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    figure, axis = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
    for number, model in enumerate(arguments.models):
        name, _, files = model.partition(": ")
        for seed, path in enumerate(files.split()):
            lines = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
            held_out = [line for line in lines if "eval" in line]
            axis.plot(
                [line["t"] / 60 for line in held_out],
                [line["value"] for line in held_out],
                color=f"C{number}",
                linewidth=1.2,
                label=name if seed == 0 else None,
            )
    axis.set(xlabel="minutes", ylabel="held-out similarity", ylim=(0, 1), xlim=(0, None))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Metrics of runs over their steps, one panel each: `python runs/curves.py runs/a runs/b --metrics
value,group_std --output runs/x.svg`.

A metric that a step has not is 0 there (`traps/...`, which are written where they occur). Needs
matplotlib (the extra `report`).
"""

import argparse
from pathlib import Path

import matplotlib

from grpo.run.logs import read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams["svg.hashsalt"] = "curves"  # the same figure is the same file


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--metrics", default="value,group_std")
    parser.add_argument("--smooth", type=int, default=1, help="mean of so many steps")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    names = arguments.metrics.split(",")
    figure, axes = plt.subplots(
        1, len(names), figsize=(3.2 * len(names), 2.6), layout="constrained", squeeze=False
    )
    for folder in arguments.runs:
        lines = read_metrics(folder / "metrics.jsonl")
        for name, axis in zip(names, axes[0]):
            values = [line.get(name) or 0.0 for line in lines]
            blocks = [values[max(0, i + 1 - arguments.smooth) : i + 1] for i in range(len(values))]
            axis.plot(
                [line["step"] for line in lines],
                [sum(block) / len(block) for block in blocks],
                label=folder.name,
                linewidth=1.2,
            )
    for name, axis in zip(names, axes[0]):
        axis.set(title=name, xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()

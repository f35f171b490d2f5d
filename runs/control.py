"""The figures of runs/control.sh: a table on the standard output, and the plot runs/control.svg."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
ARMS = {
    "real": ("real reward, fresh problems", "#0072b2", "-"),
    "fixed": ("real reward, fixed:2500", "#009e73", "--"),
    "shuffled": ("shuffled rewards", "#d55e00", "-."),
    "constant": ("constant reward", "#777777", ":"),
}


def figure(path: Path) -> str:
    (line,) = json.loads(path.read_text("utf-8"))
    return f"{line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"


def main():
    base = HERE / "control-base"
    print(
        "| reward | seed | before | after | greedy before | greedy after "
        "|\n|---|---|---|---|---|---|"
    )
    for arm in ARMS:
        for seed in range(3):
            run = HERE / f"control-{arm}-seed{seed}"
            print(
                f"| {arm} | {seed} | {figure(base / 'test.json')} | {figure(run / 'test.json')} | "
                f"{figure(base / 'testgreedy.json')} | {figure(run / 'testgreedy.json')} |"
            )
    axes = plt.subplots(figsize=(7, 4), layout="constrained")[1]
    for arm, (label, colour, style) in ARMS.items():
        for seed in range(3):
            lines = [
                json.loads(line)
                for line in (HERE / f"control-{arm}-seed{seed}" / "eval.jsonl")
                .read_text()
                .splitlines()
            ]
            steps = [line["step"] for line in lines]
            axes.plot(
                steps,
                [line["mean"] for line in lines],
                style,
                color=colour,
                label=label if seed == 0 else None,
            )
            axes.fill_between(
                steps,
                [line["ci_low"] for line in lines],
                [line["ci_high"] for line in lines],
                color=colour,
                alpha=0.08,
                lw=0,
            )
    axes.set(
        xlabel="training step",
        ylabel="exact match, held-out (validation, n = 200)",
        ylim=(0, 1),
        title="arithmetic without working: chains of two operations, three seeds each",
    )
    axes.legend(frameon=False)
    plt.savefig(HERE / "control.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

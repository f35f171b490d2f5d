"""What came of runs, a line each, as a Markdown table: `python runs/tables.py runs/a runs/b`.

Scores are held out (validation), before and after; the other figures are of training: tokens
sampled and wasted, standard deviation within groups over the first and the last ten steps, and the
commonest trap of the last ten steps with its share of the completions.
"""

import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

from grpo import load_run
from grpo.show.lines import interval

HEAD = (
    "run",
    "steps",
    "held-out score before",
    "after",
    "exact",
    "n",
    "M tokens",
    "wasted",
    "std, first steps",
    "last",
    "trap at the end",
)


def row(folder: Path) -> list[str]:
    run = load_run(folder)
    lines, (before, *_, after) = run.metrics, run.reports
    traps = Counter()
    for line in lines[-10:]:
        traps.update(
            {
                name.removeprefix("traps/"): share / len(lines[-10:])
                for name, share in line.items()
                if name.startswith("traps/")
            }
        )
    name, share = max(traps.items(), key=lambda item: item[1], default=("none", 0.0))
    first, last = (fmean(line["group_std"] for line in part) for part in (lines[:10], lines[-10:]))
    return [
        folder.name,
        str(lines[-1]["step"]),
        f"{before['mean']:.3f}",
        interval(after),
        f"{after['exact']:.2f}",
        str(after["n"]),
        f"{lines[-1]['num_tokens'] / 1e6:.2f}",
        f"{lines[-1]['wasted_tokens_total'] / lines[-1]['num_tokens']:.0%}",
        f"{first:.3f}",
        f"{last:.3f}",
        f"{name}, {share:.0%}",
    ]


if __name__ == "__main__":
    for cells in (HEAD, ["---"] * len(HEAD), *(row(Path(folder)) for folder in sys.argv[1:])):
        print("| " + " | ".join(cells) + " |")

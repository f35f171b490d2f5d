"""What came of runs, a line each, as a Markdown table: `python runs/tables.py runs/a runs/b`.

Scores are held out (validation), before and after; the other figures are of training: tokens
sampled and wasted, and the standard deviation within groups over the first and last ten steps.
"""

import sys
from pathlib import Path
from statistics import fmean

from grpo import load_run
from grpo.show.console import interval

HEAD = "run|steps|before|after|exact|n|M tokens|wasted|std, first steps|last".split("|")


def row(folder: Path) -> list[str]:
    run = load_run(folder)
    lines, (before, *_, after) = run.metrics, run.reports
    first, last = (fmean(line["group_std"] for line in part) for part in (lines[:10], lines[-10:]))
    tokens = lines[-1]["num_tokens"]
    return [
        folder.name,
        str(lines[-1]["step"]),
        f"{before['mean']:.3f}",
        interval(after),
        f"{after['exact']:.2f}",
        str(after["n"]),
        f"{tokens / 1e6:.2f}",
        f"{lines[-1]['wasted_tokens_total'] / tokens:.0%}",
        f"{first:.3f}",
        f"{last:.3f}",
    ]


if __name__ == "__main__":
    for cells in (HEAD, ["---"] * len(HEAD), *(row(Path(folder)) for folder in sys.argv[1:])):
        print("| " + " | ".join(cells) + " |")

"""Watch a long run for leaks: `python tests/tools/soak.py --steps 5000` trains a tiny random model.

Only the logs may grow. Prints as JSON, for each fifth of the run: resident memory in MB (the lowest
value), the number of open files, and the median processor time of a step in seconds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from tiny_models import make_tiny_model  # noqa: E402

import train  # noqa: E402
from grpo.trainer import Trainer  # noqa: E402

PARTS = 5


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args(argv).steps
    seen, step = [], Trainer.step

    def watched(self):
        start = time.process_time()
        report = step(self)
        seen.append((resident_mb(), len(os.listdir("/proc/self/fd")), time.process_time() - start))
        return report

    Trainer.step = watched
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.chdir(folder)
        model = make_tiny_model(Path("tiny"), layers=1)
        out, sys.stdout = sys.stdout, nowhere
        try:
            status = train.main(
                [
                    *("--task", "arithmetic", "--model", str(model), "--lora-rank", "0"),
                    *("--prompts", "2", "--group-size", "4", "--max-new-tokens", "8"),
                    *("--steps", str(steps), "--patience", "0"),
                    *("--eval-every", "0", "--eval-problems", "2"),
                    *("--save-every", str(max(1, steps // 20))),
                    *("--device", "cpu", "--name", "long"),
                ]
            )
        finally:
            sys.stdout = out
        size = (
            sum(path.stat().st_size for path in Path("runs/long").rglob("*") if path.is_file())
            / 1e6
        )
    parts = [seen[i * len(seen) // PARTS : (i + 1) * len(seen) // PARTS] for i in range(PARTS)]
    print(
        json.dumps(
            {
                "status": status,
                "steps": len(seen),
                "megabytes": [round(min(x[0] for x in part)) for part in parts],
                "files": [max(x[1] for x in part) for part in parts],
                "seconds": [round(statistics.median(x[2] for x in part), 5) for part in parts],
                "written_mb": round(size),
            }
        )
    )
    return 0 if len(seen) == steps else 1  # whether the model learns does not matter here


if __name__ == "__main__":
    sys.exit(main())

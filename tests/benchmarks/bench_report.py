"""Measure how long the report of a long run takes to write and to open, and how large it is.

    python tests/benchmarks/bench_report.py --steps 5000

The run is made up: groups of random texts, 256 completions a step, whose rollouts
are repeated after MADE steps, and 90 metrics a step. The time to write is that of the process.
With chromium, chromedriver and selenium installed, the page is opened as well, until it has drawn
itself.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_inspect import metrics_of, write_run

from grpo.run.rollouts import file_of

MADE = 50
METRICS = 90
GROUPS = 16


def extend(folder: Path, steps: int) -> None:
    """Repeat the rollouts of a run up to `steps`, and write metrics for all of them."""
    for step in range(MADE + 1, steps + 1):
        source = file_of(folder, "step", (step - 1) % MADE + 1)
        shutil.copyfile(source, file_of(folder, "step", step))

    rng = random.Random(0)
    with open(folder / "metrics.jsonl", "w") as metrics:
        for step in range(1, steps + 1):
            line = metrics_of(step, GROUPS)
            line |= {f"more/{i}": rng.random() for i in range(METRICS - len(line))}
            metrics.write(json.dumps(line) + "\n")


def opening_time(page: Path) -> float | None:
    """Return the seconds until Chromium has drawn the page; None without a browser."""
    try:
        from selenium import webdriver
    except ImportError:
        return None
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        return None

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as window:
        start = time.perf_counter()
        window.get(page.as_uri())
        while not window.execute_script("return document.documentElement.dataset.ready"):
            time.sleep(0.05)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        write_run(folder, min(MADE, arguments.steps), completions=16 * GROUPS)
        extend(folder, arguments.steps)

        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "grpo.report", str(folder)], check=True)
        written = time.perf_counter() - start
        page = folder / "report.html"
        opened = opening_time(page)
        print(f"{arguments.steps:,} steps: written in {written:.1f} s", end=", ")
        print(f"{page.stat().st_size / 1e6:.1f} MB", end=", ")
        print("not opened" if opened is None else f"drawn in {opened:.1f} s")


if __name__ == "__main__":
    main()

"""Measure how long the report of a long run takes to write, to open and to search.

    python tests/benchmarks/bench_report.py runs/NAME --steps 5000

The long run repeats the steps of a real one (see `bench_readers.py`), with METRICS metrics a step.
The time to write is that of the process. With chromium, chromedriver and selenium installed, the
page is opened as well, until it has drawn itself. The search is that of the live page, for a text
that no step has.
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

from bench_readers import repeat

from grpo.run.reader import load_run
from grpo.tools.report.search import search

METRICS = 90


def add_metrics(folder: Path) -> None:
    """Add metrics to each step of a run until it has METRICS."""
    rng = random.Random(0)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    with open(path, "w") as file:
        for line in lines:
            line |= {f"more/{i}": rng.random() for i in range(METRICS - len(line))}
            file.write(json.dumps(line) + "\n")


def time_search(folder: Path, steps: int) -> tuple[float, float]:
    """Return the seconds of a search in all steps, and of its longest answer."""
    answers, after = [], 0
    while after < steps:
        start = time.perf_counter()
        after = search(load_run(folder), "nowhere to be found", after, steps)["searched"]
        answers.append(time.perf_counter() - start)
    return sum(answers), max(answers)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a real run, of a few steps")
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()

    # On the same disk, because links do not leave it.
    with tempfile.TemporaryDirectory(dir=arguments.run.resolve().parent) as home:
        folder = Path(home) / "run"
        repeat(arguments.run, folder, arguments.steps)
        add_metrics(folder)

        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "grpo.report", str(folder)], check=True)
        written = time.perf_counter() - start
        page = folder / "report.html"
        opened = opening_time(page)
        print(f"{arguments.steps:,} steps: written in {written:.1f} s", end=", ")
        print(f"{page.stat().st_size / 1e6:.1f} MB", end=", ")
        print("not opened" if opened is None else f"drawn in {opened:.1f} s")

        whole, longest = time_search(folder, arguments.steps)
        print(f"searched live in {whole:.1f} s, longest answer {longest:.2f} s")


if __name__ == "__main__":
    main()

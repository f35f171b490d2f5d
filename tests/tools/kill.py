"""Kill runs at any instant, resume them, and compare: `python tests/tools/kill.py --kills 200`.

Each run is a process of its own (forked, so that nothing is imported again). It gets SIGKILL
several times before it may end: at a random instant; when a file is opened for writing, renamed or
removed; or when half a line has been written to it. After every kill, all complete checkpoints must
still be there and intact, except for those that the run itself removed. "half a checkpoint" counts
the kills that left an incomplete one, which the next start removes. In the end, the run must equal
one that was not killed: weights, moments, logs, rollouts, seen problems, curriculum.

Prints the counts as JSON. The exit status is 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
import torch  # noqa: E402
from compare_runs import differing, written  # noqa: E402

from grpo.run.checkpoint import verify  # noqa: E402
from grpo.run.logs import checkpoint_folders  # noqa: E402
from grpo.tools import train  # noqa: E402

SMALL = (
    "--prompts 2 --group-size 4 --steps 6 --save-every 2 --eval-every 3 "
    "--config {'eval_problems':3} --device cpu"
).split()
CASES = {
    "interleave, full, ladder, dynamic sampling": [
        *"--words 6 --curriculum 3,4,6".split(),
        *("--config", "{dynamic_sampling: 2}"),
    ],
    "interleave, LoRA, ladder, KL": (
        "--words 6 --curriculum 1,2,4,6 --lora-rank 4 --beta 0.1".split()
    ),
    "arithmetic, full, one batch": [
        *"--task arithmetic".split(),
        *("--config", "{dynamic_sampling: 0}"),
    ],
    "arithmetic, LoRA, dynamic sampling": [
        *"--task arithmetic --lora-rank 4".split(),
        *("--config", "{dynamic_sampling: 2, epochs: 2}"),
    ],
}

# Audit events of Python itself: sys.addaudithook.
WRITES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}

# Files that are written line by line, so that one may be torn.
LINES = (".jsonl", ".log", ".partial", ".json", ".yaml")

KILLS = ("time", "write", "torn")

# After this many kills a run may end.
KILLS_PER_RUN = 5

# A run of SMALL opens, renames or removes files some 170 times; its first checkpoint is whole after
# about 60 of them. A kill comes at one of the first so many.
KILLED_WRITES = 120


def start(arguments: list[str], log: Path, at_write: int = 0, torn: bool = False) -> int:
    """Fork a process that trains, and return its process id.

    With `at_write` the process kills itself at that write (1, 2, ...); if `torn`, in the middle of
    it.
    """
    if child := os.fork():
        return child
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        count = 0

        def watch(event, details):
            nonlocal count
            path, mode = str(details[0]), event == "open" and (details[1] or "r")
            is_read = mode and not set(mode) & set("wa+x")
            if event not in WRITES or "runs/" not in path or is_read:
                return
            count += 1
            if count == at_write:
                if torn and mode and path.endswith(LINES):
                    how = os.O_TRUNC if "w" in mode else os.O_APPEND
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how)
                    os.write(descriptor, b'{"step": 3, "rew')
                os.kill(os.getpid(), signal.SIGKILL)

        if at_write:
            sys.addaudithook(watch)
        status = 99
        with contextlib.suppress(BaseException):
            status = train.main(arguments)
        os._exit(status)


def ended(child: int, within: float | None = None) -> int | None:
    """Wait for the process; return its exit status, or minus the signal that ended it.

    Returns None if it has not ended `within` this many seconds.
    """
    deadline = time.monotonic() + (1e9 if within is None else within)
    while time.monotonic() < deadline:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


@dataclass(frozen=True)
class Job:
    """A run to be killed: its command line, its folder, its log, and the seconds that it takes."""

    arguments: list[str]
    run: Path
    log: Path
    seconds: float


def killed_run(job: Job, rng: random.Random, done: Counter):
    """Train a run to its end through `KILLS_PER_RUN` kills."""
    run, log = job.run, job.log
    kills = 0
    while True:
        valid = [path for path in checkpoint_folders(run) if not verify(path)]
        if not valid:
            shutil.rmtree(run, ignore_errors=True)
        command = ["--resume", str(run)] if valid else [*job.arguments, "--name", run.name]
        kind = rng.choice(KILLS) if kills < KILLS_PER_RUN else None
        child = start(
            command,
            log,
            at_write=rng.randint(1, KILLED_WRITES) if kind in ("write", "torn") else 0,
            torn=kind == "torn",
        )
        status = ended(child, rng.uniform(0, job.seconds) if kind == "time" else None)
        if status is None:
            os.kill(child, signal.SIGKILL)
            status = ended(child)

        if status == -signal.SIGKILL:
            kills += 1
            done[kind] += 1
            done["half a checkpoint"] += any((run / "checkpoints").glob(".tmp-step-*"))
            found = checkpoint_folders(run)
            damaged = list(filter(None, map(verify, found)))
            lost = valid[-1:] and (not found or found[-1].name < valid[-1].name)
            assert not damaged and not lost, (
                f"{run} after a kill ({kind}): damaged {damaged}, last {found[-1:]} where "
                f"{valid[-1:]} was"
            )
        else:
            assert status == 0, f"{run}: exit status {status}; see {log}"
            return


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases to run")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    cases = list(CASES)[: asked.cases]
    torch.set_num_threads(1)  # a process that had threads must not be forked
    rng, begun, kills, runs = random.Random(asked.seed), time.monotonic(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        log, whole, seconds = Path("log.txt").resolve(), {}, {}
        for i, case in enumerate(cases):
            start_time = time.monotonic()
            status = ended(start([*SMALL, *CASES[case], "--name", f"whole-{i}"], log))
            assert status == 0, log.read_text()[-2000:]
            seconds[case] = time.monotonic() - start_time
            whole[case] = written(Path("runs") / f"whole-{i}")
        while sum(kills[kind] for kind in KILLS) < asked.kills:
            case, run = cases[runs % len(cases)], Path("runs") / f"cut-{runs}"
            try:
                job = Job([*SMALL, *CASES[case]], run, log, seconds[case])
                killed_run(job, rng, kills)
                different = differing(whole[case], written(run))
                assert not different, f"{case}: differs in {different}"
            except AssertionError as error:
                said = f"seed {asked.seed}, run {runs}: {error}\n{log.read_text()[-3000:]}"
                print(said, file=sys.stderr)
                return 1
            shutil.rmtree(run)
            runs += 1
    counts = {"kills": sum(kills[kind] for kind in KILLS), **kills, "runs": runs}
    counts |= {"cases": len(cases), "seconds": round(time.monotonic() - begun)}
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())

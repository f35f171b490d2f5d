"""The records of the runs of `bench_learning.py`, and the cost of the scores that they reached."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from learning_job import Job

from data.errors import UserError

# The trainers, and their names in tables.
NAMES = {"ours": "ours", "trl": "TRL"}

TRAINERS = tuple(NAMES)

# Seconds, tokens, score.
Point = tuple[float, float, float]


@dataclass(frozen=True)
class Record:
    """The file that a run wrote.

    - `head`: the job, the number of trained parameters and the start-up time;
    - `steps`: a line per step;
    - `end`: why the run ended, the seconds of its first step, and its memory.
    """

    head: dict[str, Any]
    steps: list[dict[str, Any]]
    end: dict[str, Any]

    def points(self, start: float) -> list[Point]:
        """Return the evaluations, beginning with the score at the start."""
        return [(0.0, 0.0, start)] + [
            (line["seconds"], line["tokens"], line[name])
            for line in self.steps
            for name in ("score", "again")  # the last evaluation was made twice
            if name in line
        ]

    @property
    def arm(self) -> tuple[str, float]:
        return self.head["job"]["trainer"], self.head["job"]["rate"]

    @property
    def seconds_a_step(self) -> float:
        """The mean without the first step, which compiles, unless that is the only step."""
        last, first = self.steps[-1], self.end["first"]
        return (last["seconds"] - first) / (last["step"] - 1) if last["step"] > 1 else first


def read_record(path: Path, job: Job) -> Record | None:
    """Return the record of `job` in `path`; None if the run was killed or not made yet.

    Raises UserError if the file holds a run with other settings.
    """
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # killed in mid-line
            break
    if not lines or "end" not in lines[-1]:
        return None

    wanted, found = asdict(replace(job, micro=0)), lines[0]["job"] | {"micro": 0}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UserError(
                f"{path}: made with {name} {found.get(name)}, not {value}; give another --output, "
                "or remove the file"
            )
    return Record(lines[0], lines[1:-1], lines[-1])


def kept(points: Sequence[Point]) -> list[Point]:
    """Return all points but the last, each with the lower of its own score and the next one.

    >>> kept([(0, 0, 0.4), (9, 10, 0.8), (18, 20, 0.7)])
    [(0, 0, 0.4), (9, 10, 0.7)]
    """
    return [(*here[:2], min(here[2], after[2])) for here, after in pairwise(points)]


def highest(points: Sequence[Point]) -> float:
    """Return the highest score that is reached."""
    return max(score for *_, score in kept(points))


def reached(points: Sequence[Point], score: float) -> tuple[float, float] | None:
    """Return seconds and tokens to the first point that reaches `score`, None if none does."""
    return next((point[:2] for point in kept(points) if point[2] >= score), None)


@dataclass(frozen=True)
class Arm:
    """A trainer at one learning rate: its runs, one per seed, as points."""

    trainer: str
    rate: float
    runs: list[list[Point]]

    @property
    def highest(self) -> float:
        """The highest score that every seed reaches."""
        return min(map(highest, self.runs))

    def cost(self, score: float) -> tuple[float, float] | None:
        """Return mean seconds and mean tokens to `score`; None unless every seed reaches it."""
        found = [reached(run, score) for run in self.runs]
        return None if None in found else tuple(map(fmean, zip(*found)))  # type: ignore[arg-type]


def arms_of(records: Sequence[Record], start: float) -> list[Arm]:
    runs: dict[tuple[str, float], list[list[Point]]] = {}
    for record in records:
        runs.setdefault(record.arm, []).append(record.points(start))
    return [Arm(trainer, rate, points) for (trainer, rate), points in runs.items()]


def common_score(arms: Sequence[Arm]) -> float:
    """Return the highest score that each trainer reaches at some rate."""
    trainers = {arm.trainer for arm in arms}
    return min(max(arm.highest for arm in arms if arm.trainer == name) for name in trainers)


def best_arms(arms: Sequence[Arm], score: float) -> dict[str, Arm]:
    """Return the arm of each trainer that reaches `score` first."""
    costs = {id(arm): (arm.cost(score) or (math.inf, math.inf))[0] for arm in arms}
    return {
        name: min((arm for arm in arms if arm.trainer == name), key=lambda arm: costs[id(arm)])
        for name in sorted({arm.trainer for arm in arms})
    }


def compare(best: dict[str, Arm], scores: Sequence[float]) -> list[dict[str, float | None]]:
    """Return for each score what it cost either side, and TRL's cost over ours."""
    rows = []
    for score in scores:
        ours, trl = (best[name].cost(score) or (None, None) for name in TRAINERS)
        row = {"score": score}
        for unit, mine, theirs in zip(("seconds", "tokens"), ours, trl):
            row |= {f"ours {unit}": mine, f"trl {unit}": theirs}
            row[f"ratio {unit}"] = theirs / mine if mine and theirs else None
        rows.append(row)
    return rows


def check_comparable(records: Sequence[Record]):
    """Raise UserError unless all runs trained equally many parameters on their seed's prompts."""
    trained = {record.head["trained"] for record in records}
    if len(trained) > 1:
        raise UserError(f"no comparison: parameters trained: {sorted(trained)}")

    seen: dict[tuple[int, int], str] = {}
    for record in records:
        seed = record.head["job"]["seed"]
        for line in record.steps:
            if seen.setdefault((seed, line["step"]), line["prompts"]) != line["prompts"]:
                raise UserError(
                    f"no comparison: with seed {seed} the prompts differ at step {line['step']}"
                )

"""Experiments on exploration: which reward, levels and learning rate keep groups varied.

    python tests/benchmarks/exploration.py MODEL --seed 0 --minutes 11 > exploration.jsonl

The policy learns by reward alone: no imitation, no right answers shown. Three things differ from
`train.py`, and a flag turns each of them off:

- the reward is the similarity over *pairs* of neighbouring words (`--reward prefix`): copying one
  text has no pair of the target, so it earns 0 instead of the safe half;
- each step draws its levels where groups varied lately (`--levels 10`), never by rungs;
- the learning rate is multiplied by the share of the step's groups that vary (`--rate-power 0`),
  because one varied group of 16 would otherwise get the whole step.

Each line of the output is a step or a held-out evaluation (validation, 10 words, temperature 1).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from align.needleman import similarity_batch
from align.words import split_words
from grpo import make_trainer, variance
from grpo.evaluate import EvaluationSettings, HeldOutRequest, evaluate, find_problems
from grpo.records import Decision, Group, StepSummary, first_tries
from grpo.trainer import Trainer
from tasks.base import Problem, Score
from tasks.interleave import PROMPT, Interleave

LEVEL = 10  # words of each text in evaluations
ONLY = " Write only the resulting sequence of words.\nA:"


class Pairs(Interleave):
    """Interleaving whose reward is the similarity over pairs of neighbouring words."""

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        scores = super().score(problem, completions)
        target = list(pairwise(split_words(problem.target)))
        written = [list(pairwise(split_words(text))) for text in completions]
        rewards = similarity_batch(written, target).tolist()
        return [replace(score, reward=reward) for score, reward in zip(scores, rewards)]


class WhereGroupsVary:
    """The `Curriculum` that draws each level in proportion to its lately varied groups.

    A solved level keeps a weight of 0.05, and the last level gets a third of the prompts at least.
    """

    ended = ""
    steps_before_last = 0

    def __init__(self, levels: Sequence[int]):
        self.levels = list(levels)
        self.level = self.levels[-1]
        self.varied = dict.fromkeys(self.levels, 1.0)

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        weights = {level: max(self.varied[level], 0.05) for level in self.levels}
        easier = sum(weights.values()) - weights[self.level]
        weights[self.level] = max(weights[self.level], easier / 2)
        rng = random.Random(f"{seed}/{step}/{drawn}")
        return rng.choices(self.levels, list(weights.values()), k=count)

    def take(self, groups: Sequence[Group]) -> None:
        """Move each level's share of varied groups a fifth of the way for each of its `groups`."""
        for level in self.levels:
            varied = [group.teaches for group in groups if group.problem.level == level]
            if varied:
                kept = 0.8 ** len(varied)
                self.varied[level] = kept * self.varied[level] + (1 - kept) * fmean(varied)

    def observe(self, summary: StepSummary) -> list[Decision]:
        return []

    def wants_validation(self, step: int) -> bool:
        return False

    def observe_validation(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        return []


class Experiment:
    """One run, whose learning rate depends on the share of varied groups and on the clock."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.trainer = self._trainer()
        self.curriculum = WhereGroupsVary(flags.levels)
        self.trainer.curriculum = self.curriculum
        self.trainer.stream.supply.mixed = True  # the monitor counts the groups of all levels
        self.step_policy = self.trainer.update_policy
        self.trainer.update_policy = self.update  # type: ignore[method-assign]

        request = HeldOutRequest(LEVEL, "validation", 777, flags.problems)
        trainer = self.trainer
        found = find_problems(
            trainer.policy, trainer.task, request, set(), EvaluationSettings().sampling
        )
        self.held_out = found.problems
        self.start = time.monotonic()

    def _trainer(self) -> Trainer:
        flags = self.flags
        with TemporaryDirectory() as folder:
            wording = Path(folder, "wording.txt")
            wording.write_text(PROMPT.replace(" Do this all in one turn.\nA:", ONLY), "utf-8")
            variance.HEATING = 1.0  # the temperature stays
            return make_trainer(
                task=f"{__file__}:Pairs" if flags.reward == "pairs" else "interleave",
                level=LEVEL,
                model=flags.model,
                wording=str(wording) if flags.shots else "",
                shots=flags.shots,
                seed=flags.seed,
                steps=100_000,  # the clock ends the run
                schedule="constant",
                learning_rate=flags.learning_rate,
                prompts=flags.prompts,
                beta=flags.beta,
                scale=flags.scale,
                dynamic_sampling=0,
            )

    @property
    def spent(self) -> float:
        """The share of the run's time that is over."""
        return (time.monotonic() - self.start) / (60 * self.flags.minutes)

    def update(self, kept: list[Group], rate: float) -> dict[str, float]:
        """Update at a rate that falls after 60 % of the time, and with the share that varies."""
        late = min(1.0, max(0.0, (self.spent - 0.6) / 0.4))
        share = sum(group.teaches for group in kept) / self.trainer.prompts
        factor = 0.5 * (1 + math.cos(math.pi * late)) * share**self.flags.rate_power
        return self.step_policy(kept, rate * factor)

    def run(self) -> None:
        self.evaluate(0)
        while self.spent < 1:
            report = self.trainer.step()
            first = first_tries(report.groups)
            self.curriculum.take(first)
            names = ("reward", "value", "exact", "entropy", "learning_rate")
            say(
                step=report.step,
                varied=fmean(group.teaches for group in first),
                tokens=sum(group.tokens for group in first),
                taught=sum(group.tokens for group in first if group.teaches),
                **{name: report.metrics.get(name) for name in names},
            )
            if report.step % self.flags.every == 0:
                self.evaluate(report.step)
        self.evaluate(self.trainer.done)

    def evaluate(self, step: int) -> None:
        trainer = self.trainer
        groups = evaluate(
            trainer.policy, trainer.task, self.held_out, EvaluationSettings(seed=1, batch=200)
        )
        scores = [group.scores[0] for group in groups]
        say(
            evaluated=step,
            minutes=self.spent * self.flags.minutes,
            value=fmean(score.value for score in scores),
            exact=fmean(score.exact for score in scores),
            trapped=fmean(score.parts["trap"] is not None for score in scores),
            texts=[group.texts[0] for group in groups[:2]],
        )


def say(**figures: object) -> None:
    """Print a line of JSON."""
    print(json.dumps(figures), flush=True)


def main() -> None:
    """Run one experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--reward", choices=("pairs", "prefix"), default="pairs")
    parser.add_argument(
        "--levels", type=lambda x: [*map(int, x.split(","))], default=[1, 2, 3, 5, 10]
    )
    parser.add_argument("--rate-power", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--scale", default="group")
    parser.add_argument("--shots", type=int, default=3)
    parser.add_argument("--problems", type=int, default=200, help="of each evaluation")
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    Experiment(parser.parse_args()).run()


if __name__ == "__main__":
    main()

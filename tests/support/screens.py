"""Reports, evaluations and consoles for the tests of what a run shows."""

import io
import re

from grpo.records import Completion, Group, StepReport
from grpo.show.console import Console
from grpo.tasks.base import Problem, Score

METRICS = {
    "level": 25,
    "reward": 0.4123,
    "group_std": 0.083,
    "value": 0.531,
    "groups/kept": 6,
    "groups/count": 8,
    "step_time": 2.0,
}
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def report(step=12, metrics=METRICS, texts=(), rewards=(), events=()):
    problem = Problem("interleave", 25, "prompt", "target", "key")
    completions = [Completion((1,), (-0.1,), text, "stop") for text in texts]
    group = Group(0, problem, (1,), 1.0, completions, scores=[Score(reward) for reward in rewards])
    return StepReport(step, dict(metrics), [group], list(events))


def evaluation(level=25, mean=0.4123, temperature=1.0, **changes):
    return {
        "step": 0,
        "purpose": "report",
        "task": "interleave",
        "metric": "score",
        "level": level,
        "unit": "words",
        "split": "test",
        "n": 200,
        "dropped": 0,
        "too_long": 0,
        "temperature": temperature,
        "mean": mean,
        "ci_low": mean - 0.01,
        "ci_high": mean + 0.01,
        "exact": 0.01,
        "exact_low": 0.001,
        "exact_high": 0.036,
        "truncated": 0.0,
        "unjudged": 0,
        **changes,
    }


def unbroken(text):
    """Return what a run printed, with the lines joined that were broken for a log."""
    return re.sub(r"\n {10}", " ", text)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def written(use, total_steps=300, metric="score", file=None):
    """Return all that `use(console)` writes, escape codes included."""
    file = file or io.StringIO()
    use(Console(total_steps, metric, file=file))
    return file.getvalue()


def plain(use, total_steps=300, **options):
    """Return the lines that `use(console)` prints into a pipe, without their time."""
    return [
        re.sub(r"^\d\d:\d\d:\d\d  ", "", line)
        for line in written(use, total_steps, **options).splitlines()
    ]

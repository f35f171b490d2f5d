"""Groups of each class, and variance monitors."""

from dataclasses import replace

from grpo.config import Config
from grpo.records import Completion, Group
from grpo.variance import VarianceMonitor
from tasks.base import Problem, Score


def group(class_name, action="keep", attempt=0, tokens=3, distinct=None):
    """A group of eight completions: one text if it is identical or solved, else eight, or
    `distinct`.
    """
    distinct = distinct or (1 if class_name in ("identical", "solved") else 8)
    texts = [str(min(i, distinct - 1)) for i in range(8)]
    return Group(
        0,
        Problem("t", 1, "p", "x", "k"),
        (1,),
        1.0,
        [Completion((1,) * tokens, (0.0,) * tokens, text, "stop") for text in texts],
        attempt,
        [Score(0.5)] * 8,
        class_name,
        action,
    )


def monitor_for(on_degenerate="skip", **settings):
    return VarianceMonitor(Config(on_degenerate=on_degenerate, **settings))


def step(level=1, **counts):
    groups = [group(class_name) for class_name, n in counts.items() for _ in range(n)]
    return [replace(each, problem=replace(each.problem, level=level)) for each in groups]

"""Groups of a few completions, for tests of what becomes of their scores."""

from dataclasses import replace

from grpo.records import Completion, Group
from grpo.tasks.base import Problem


def group_of(texts, scores, *, level=1, target="x", key="k", finish="stop", **facts):
    """Return a group whose completions have a token for each letter."""
    completions = [
        Completion(tuple(map(ord, text)), (0.0,) * len(text), text, finish) for text in texts
    ]
    problem = Problem("t", level, "p", target, key)
    return Group(0, problem, (1,), 1.0, completions, scores=list(scores), **facts)


def copy_of(group):
    """Return the group as a copy whose last completion is the right answer."""
    *others, last = group.completions
    return replace(group, completions=[*others, replace(last, is_demonstration=True)])

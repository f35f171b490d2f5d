"""Scores of small groups by reward functions."""

from grpo.tasks.base import Problem
from grpo.tasks.rows import Rows

# Rewards of these tests count things, so that they may be large.
WIDE = (-1e7, 1e7)


def problem(name="p", **row):
    data = {"where": f"row {name}", "row": {"answer": "42", **row}}
    return Problem("data", 1, f"prompt {name}", "", name, data)


def rows(functions, **settings):
    """Return a task of one row, which has the columns that the functions of these tests take."""
    row = {"prompt": "p", "answer": "42", "tests": []}
    return Rows([row], None, functions, **{"reward_range": WIDE} | settings)


def scores(functions, completions=("a", "b"), **settings):
    if not isinstance(functions, list):
        functions = [functions]
    return rows(functions, **settings).score_groups([(problem(), list(completions))])[0]

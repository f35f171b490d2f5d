"""Scores of small groups by reward functions."""

from tasks.base import Problem
from tasks.rows import RewardFunctions

# Rewards of these tests count things, so that they may be large.
WIDE = (-1e7, 1e7)


def problem(name="p", **row):
    data = {"where": f"row {name}", "row": {"answer": "42", **row}}
    return Problem("data", 1, f"prompt {name}", "", name, data)


def scores(functions, completions=("a", "b"), **settings):
    if not isinstance(functions, list):
        functions = [functions]
    rewards = RewardFunctions(functions, **{"reward_range": WIDE} | settings)
    return rewards.scores([(problem(), list(completions))])[0]

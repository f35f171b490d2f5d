"""Token budgets: what a completion may take, and which problems fit the context."""

import pytest

from grpo.data.errors import UserError
from grpo.rollout.generate import budget_for, fitting
from grpo.tasks.base import Problem


def test_budget(tiny_policy):
    target = "one two three"
    needed = tiny_policy.target_length(target)
    assert budget_for(tiny_policy, (1,), target) >= needed * 1.25
    assert budget_for(tiny_policy, (1,), target, asked=needed) == needed
    with pytest.raises(UserError, match=f"the right answer takes {needed} tokens"):
        budget_for(tiny_policy, (1,), target, asked=needed - 1)
    assert (
        budget_for(tiny_policy, (1,) * (1024 - needed), target)
        == needed
        == budget_for(tiny_policy, (1,) * (1024 - needed), target, asked=99)
    )
    assert budget_for(tiny_policy, (1,) * (1023 - needed), target) == needed + 1
    with pytest.raises(UserError, match="its context of 1024 tokens is too short"):
        budget_for(tiny_policy, (1,) * (1025 - needed), target)


def test_problems_too_long_for_the_context_are_passed_over_and_counted(tiny_policy):
    short, long = Problem("t", 1, "p", "one two", "s"), Problem("t", 1, "p", "one " * 1100, "l")
    passed = []
    assert list(fitting(tiny_policy, [short, long, long, short], passed)) == [
        short,
        short,
    ] and passed == [long, long]
    assert len(list(fitting(tiny_policy, ([long] * 15 + [short]) * 2, []))) == 2
    with pytest.raises(UserError, match="its context of 1024 tokens is too short"):
        list(fitting(tiny_policy, [short] + [long] * 16, []))

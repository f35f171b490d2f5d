"""A chat template that opens the reasoning itself: an answer before its end is none."""

import pytest

from grpo.evaluate import score_groups
from grpo.records import Completion, Group
from tasks.answers import final_answer
from tasks.rows import Rows


def reward(completion):
    return float(final_answer(completion) == "7")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Perhaps this:\nAnswer: 7\nBut wait", False),
        ("Perhaps this.\n</think>\nAnswer: 7", True),
    ],
)
def test_reasoning_that_is_never_closed_holds_no_answer(text, right):
    task = Rows([{"prompt": "What is 3 + 4?", "split": "test"}], reward_functions=[reward])
    (problem,) = task.problems("test")
    completion = Completion((1,), (0.0,), text, "stop")
    group = Group(0, problem, (1,), 1.0, [completion], opened="<think>\n")
    score_groups(task, [group])
    assert [(score.reward, score.exact) for score in group.scores] == [(right, right)]

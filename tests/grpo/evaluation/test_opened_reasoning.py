"""Scoring: an answer within reasoning that the chat template opened is none, and torch stays."""

import json
from pathlib import Path

import pytest
import small_rewards
import torch

from grpo.data.errors import UserError
from grpo.evaluate import score_groups
from grpo.records import Completion, Group
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at


@pytest.fixture
def task(tmp_path):
    """Problems whose answer is 7, in a folder."""
    rows = [
        {"question": f"Eve has {n} pens and buys {7 - n} more. How many?", "answer": "So. #### 7"}
        for n in range(-40, 7)
    ]
    for name in ("train", "test"):
        lines = [json.dumps(row) + "\n" for row in rows[name == "test" :: 2]]
        Path(tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return load_task(f"gsm8k:{tmp_path}")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Perhaps this:\nAnswer: 7\nBut wait", False),
        ("Perhaps this.\n</think>\nAnswer: 7", True),
    ],
)
def test_reasoning_that_is_never_closed_holds_no_answer(task, text, right):
    problem = problem_at(task, seed=0, split="test", level=1, index=0)
    completion = Completion((1,), (0.0,), text, "stop")
    group = Group(0, problem, (1,), 1.0, [completion], opened="<think>\n")
    score_groups(task, [group])
    assert [(score.reward, score.exact) for score in group.scores] == [(right, right)]


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("float32_matmul_precision", "highest", "medium"),
        ("default_dtype", torch.float32, torch.float64),
    ],
)
def test_a_reward_may_not_change_torch(name, own, other):
    set_to = getattr(torch, f"set_{name}")
    task = small_rewards.rows([lambda completion: set_to(other) or 1.0])
    completion = Completion((1,), (0.0,), "a", "stop")
    with pytest.raises(UserError, match=f"torch.set_{name}, .* set it back to {own}"):
        score_groups(task, [Group(0, small_rewards.problem(), (1,), 1.0, [completion])])
    set_to(own)

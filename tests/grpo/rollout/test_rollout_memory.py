"""A rollout that runs out of memory is repeated with fewer prompts at a time."""

import pytest
import torch
from forced import trainer_for
from tiny_models import rollout

from data.errors import UserError
from grpo.rollout import generate as generate_module
from grpo.rollout.memory import RolloutMemory, rollout_memory


def short_of_memory(monkeypatch, most):
    """Let rollouts of more than `most` prompts fail; return the numbers of prompts tried."""
    plain, tried = generate_module._generate, []

    def hungry(policy, request, drafting):
        tried.append(len(request.prompts))
        assert len(tried) < 20, "it is tried for ever"
        if len(request.prompts) > most:
            raise torch.OutOfMemoryError("no room")
        return plain(policy, request, drafting)

    monkeypatch.setattr(generate_module, "_generate", hungry)
    return tried


def tokens_of(groups):
    return [[completion.tokens for completion in group] for group in groups]


def test_out_of_memory_halves_the_prompts_at_a_time_and_changes_no_sample(tiny_policy, monkeypatch):
    _, expected = rollout(tiny_policy, samples=3)
    tried = short_of_memory(monkeypatch, most=1)
    _, found = rollout(tiny_policy, samples=3)
    assert tokens_of(found) == tokens_of(expected)
    assert len(expected) == 3 and tried == [3, 1, 1, 1]

    (note,) = rollout_memory(tiny_policy).take_notes()
    assert note.startswith("out of memory: rollouts of at most 3 completions of ")
    assert rollout_memory(tiny_policy).take_notes() == []

    # The next rollout does not try what failed.
    _, again = rollout(tiny_policy, samples=3)
    assert tokens_of(again) == tokens_of(expected) and tried[4:] == [1, 1, 1]


def test_a_single_prompt_that_does_not_fit_is_an_error(tiny_policy, monkeypatch):
    short_of_memory(monkeypatch, most=0)
    with pytest.raises(UserError, match="out of memory in the rollout of 3 completions of up to"):
        rollout(tiny_policy, samples=3)


def test_shorter_completions_have_room_for_more_prompts(tiny_policy):
    memory = RolloutMemory(tiny_policy)
    assert memory.prompts(16, prompt=10, room=100) > 1000
    memory.halve(8, completions=16, room=100)
    assert memory.prompts(16, prompt=10, room=100) == 4
    assert memory.prompts(16, prompt=10, room=50) == 8
    assert memory.prompts(16, prompt=10, room=1000) == 1  # it is tried in any case


def test_the_console_says_that_memory_ran_out(tiny_policy, monkeypatch):
    trainer = trainer_for(tiny_policy)
    short_of_memory(monkeypatch, most=1)
    assert trainer.step().events[0].startswith("out of memory: rollouts of at most ")

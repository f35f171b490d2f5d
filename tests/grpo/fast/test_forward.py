"""The cache of a rollout: rows in any order, long rows."""

import pytest
import torch
from tiny_models import PROMPTS

from grpo.fast import prefix_cache


def test_rows_may_stand_in_any_order(tiny_policy):
    prompts = [tiny_policy.encode(prompt) for prompt in PROMPTS[:2]]
    tokens = torch.tensor([[5], [9]])
    hidden = []
    for order in (torch.tensor([0, 1]), torch.tensor([1, 0])):
        _, shared = tiny_policy.forward.prefill(prompts)
        shared.allocate(2, 8)
        tiny_policy.forward.extend(tokens, shared)
        shared.reorder(order, torch.tensor([1, 1]))
        hidden.append(tiny_policy.forward.extend(tokens[order], shared)[order])
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_long_rows_attend_as_short_ones_do(tiny_policy, monkeypatch, samples):
    """To prompts and rows of several lengths, by PyTorch's attention and by products."""
    prompts, rows = [tiny_policy.encode(prompt) for prompt in PROMPTS], len(PROMPTS) * samples
    hidden = []
    for many in (1, 1 << 40):
        monkeypatch.setattr(prefix_cache, "LONG_ROW_SCORES", many)
        _, shared = tiny_policy.forward.prefill(prompts)
        shared.allocate(rows, 16)
        hidden.append([])
        for order, filled in (
            (range(rows), [0] * rows),
            (range(rows), [5, 3, 4] * samples),
            (range(rows - 1), [7, 6, 5] * samples),
        ):
            shared.reorder(torch.tensor(order), torch.tensor(filled)[: len(order)])
            tokens = torch.arange(5 * rows).view(rows, 5)[: len(order)] + filled[0]
            hidden[-1].append(tiny_policy.forward.extend(tokens, shared))
    for one, other in zip(*hidden, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)

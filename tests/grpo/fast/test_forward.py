"""The paths of a rollout: prompts that begin alike, rows in any order, long rows."""

import pytest
import torch
from tiny_models import PROMPTS

from grpo.fast import accelerate
from grpo.fast.accelerate import common_beginning

BEGINNING = tuple(range(5, 45))
RESTS = [(50, 51, 52, 53), (50, 51), (60,), tuple(range(70, 90)), (50, 51, 52, 54, 55)]


def test_a_common_beginning_is_run_once_and_changes_nothing(tiny_policy, monkeypatch):
    """Hidden states, keys and values, and what follows them, with rests of several lengths."""
    monkeypatch.setattr(accelerate, "MIN_SAVED", 1)
    prompts = [BEGINNING + rest for rest in RESTS]
    run = []
    passes = tiny_policy.forward
    monkeypatch.setattr(
        passes,
        "hidden_states",
        lambda tokens, *others, run_model=passes.hidden_states: (
            run.append(tuple(tokens.shape)) or run_model(tokens, *others)
        ),
    )

    expected, plain = passes._whole(prompts)
    shared, cache = passes.prefill(prompts)
    assert run == [(5, 60), (1, 40), (5, 20)]
    torch.testing.assert_close(shared, expected, atol=1e-5, rtol=0)
    for layer, pair in plain.prompt.items():
        for expected, found in zip(pair, cache.prompt[layer], strict=True):
            assert found.shape == expected.shape
            for row, prompt in enumerate(prompts):
                ends = slice(len(prompt))
                torch.testing.assert_close(
                    found[row, :, ends], expected[row, :, ends], atol=1e-5, rtol=0
                )

    tokens = torch.arange(20).view(10, 2)
    after = []
    for each in (plain, cache):
        each.allocate(10, 4)
        after.append(passes.extend(tokens, each))
    torch.testing.assert_close(*after, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "common"),
    [
        ([BEGINNING + rest for rest in RESTS], 40),
        ([BEGINNING, BEGINNING], 39),  # the last token is always run
        ([BEGINNING[:20], BEGINNING, BEGINNING[:30]], 19),
        ([(5,), (5, 6)], 0),
        ([(6, 5), (5, 6)], 0),
    ],
)
def test_what_prompts_begin_with(prompts, common):
    assert common_beginning(prompts) == common


def test_few_tokens_and_large_masks_are_not_worth_it(tiny_policy, monkeypatch):
    called = []
    passes = tiny_policy.forward
    shared = passes._after_beginning
    monkeypatch.setattr(
        passes, "_after_beginning", lambda *given: called.append(given[1]) or shared(*given)
    )
    prompts = [BEGINNING + rest for rest in RESTS]
    passes.prefill(prompts)
    assert called == []
    passes.prefill(2 * prompts)
    assert called == [40]
    monkeypatch.setattr(accelerate, "MAX_SCORES", 10 * 20 * 60 - 1)
    passes.prefill(2 * prompts)
    assert called == [40]


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
        monkeypatch.setattr(accelerate, "LONG_ROW_SCORES", many)
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

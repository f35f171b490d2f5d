"""Prompts that begin alike: what is run once, and that it changes nothing."""

import pytest
import torch

from grpo.model import prefill as prefill_module
from grpo.model.prefill import after_beginning, common_beginning, whole

BEGINNING = tuple(range(5, 45))
RESTS = [(50, 51, 52, 53), (50, 51), (60,), tuple(range(70, 90)), (50, 51, 52, 54, 55)]


def test_a_common_beginning_is_run_once_and_changes_nothing(tiny_policy, monkeypatch):
    """Hidden states, keys and values, and what follows them, with rests of several lengths."""
    monkeypatch.setattr(prefill_module, "MIN_SAVED", 1)
    prompts = [BEGINNING + rest for rest in RESTS]
    run = []
    monkeypatch.setattr(
        tiny_policy,
        "hidden_states",
        lambda tokens, run_model=tiny_policy.hidden_states, **others: (
            run.append(tuple(tokens.shape)) or run_model(tokens, **others)
        ),
    )

    expected, plain = whole(tiny_policy, prompts)
    shared, cache = tiny_policy.prefill(prompts)
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
        after.append(tiny_policy.extend(tokens, each))
    torch.testing.assert_close(*after, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "common"),
    [
        ([BEGINNING + rest for rest in RESTS], 40),
        ([BEGINNING], 39),
        ([BEGINNING, BEGINNING], 39),  # the last token is always run
        ([BEGINNING[:20], BEGINNING, BEGINNING[:30]], 19),
        ([(5,), (5, 6)], 0),
        ([(), (5, 6)], 0),
        ([(6, 5), (5, 6)], 0),
    ],
)
def test_what_prompts_begin_with(prompts, common):
    assert common_beginning(prompts) == common


def test_few_tokens_and_large_masks_are_not_worth_it(tiny_policy, monkeypatch):
    called = []
    monkeypatch.setattr(
        prefill_module,
        "after_beginning",
        lambda *given: called.append(given[2]) or after_beginning(*given),
    )
    prompts = [BEGINNING + rest for rest in RESTS]
    tiny_policy.prefill(prompts)
    assert called == []
    tiny_policy.prefill(2 * prompts)
    assert called == [40]
    monkeypatch.setattr(prefill_module, "MAX_SCORES", 10 * 20 * 60 - 1)
    tiny_policy.prefill(2 * prompts)
    assert called == [40]

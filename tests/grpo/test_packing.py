"""The packed attention against a dense one with a mask, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.learn.packing import Packing

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(1, 7), min_size=size[0], max_size=size[0]),
        st.lists(st.integers(1, 6), min_size=size[0] * size[1], max_size=size[0] * size[1]),
    )
)


def packing_of(prompts, completions, device="cpu"):
    return Packing(
        [tuple(range(length)) for length in prompts],
        [tuple(range(length)) for length in completions],
        torch.device(device),
    )


def allowed(prompts, completions):
    """Which token (row) attends to which (column), from the definition: earlier ones of its own sequence."""
    owners = [(p, None, i) for p, length in enumerate(prompts) for i in range(length)]
    rows = len(completions) // len(prompts)
    owners += [
        (r // rows, r, prompts[r // rows] + i)
        for r, length in enumerate(completions)
        for i in range(length - 1)
    ]
    return torch.tensor(
        [
            [
                mine[0] == other[0] and other[1] in (None, mine[1]) and other[2] <= mine[2]
                for other in owners
            ]
            for mine in owners
        ]
    )


def dense(query, key, value, mask, scale):
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = (query.transpose(0, 1) @ key.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


def both_ways(prompts, completions, heads, keys, device="cpu", dtype=torch.float64, size=16):
    """Return (output and gradients of the packed attention, those of the dense one in float64)."""
    packing, mask = packing_of(prompts, completions, device), allowed(prompts, completions)
    torch.manual_seed(0)
    inputs = [torch.randn(len(mask), h, size, dtype=torch.float64) for h in (heads, keys, keys)]
    upstream = torch.randn(len(mask), heads, size, dtype=torch.float64)
    ours = [x.clone().to(device, dtype).requires_grad_() for x in inputs]
    found = packing.attend(0, *(x.transpose(0, 1)[None] for x in ours), 0.3)[0]
    found.backward(upstream.to(device, dtype))
    theirs = [x.clone().requires_grad_() for x in inputs]
    expected = dense(*theirs, mask, 0.3)
    expected.backward(upstream)
    return [found, *(x.grad for x in ours)], [expected, *(x.grad for x in theirs)]


@given(SHAPES, st.sampled_from([(2, 2), (4, 2), (6, 2), (3, 1)]))
@settings(max_examples=40)
def test_packed_attention_is_dense_attention(shape, heads):
    for found, expected in zip(*both_ways(*shape, *heads)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    "shape", [([5, 150, 33], [1, 70, 3, 40, 129, 2]), ([64], [64, 33]), ([3, 4], [1, 1])]
)
def test_packed_attention_is_dense_attention_on_a_gpu(shape, heads, dtype, tolerance):
    for found, expected in zip(*both_ways(*shape, *heads, "cuda", dtype, 64)):
        assert ((found.cpu().double() - expected).norm() / expected.norm()).item() < tolerance


def test_what_predicts_each_token():
    packing = Packing(
        [(10, 11, 12), (20,)], [(1, 2, 3), (4,), (5, 6), (7, 8, 9)], torch.device("cpu")
    )
    assert packing.tokens_N.tolist() == [10, 11, 12, 20, 1, 2, 5, 7, 8]
    assert packing.positions_N.tolist() == [0, 1, 2, 0, 3, 4, 1, 1, 2]
    assert packing.tokens_N[packing.predictors_M].tolist() == [
        12,
        1,
        2,
        12,
        20,
        5,
        20,
        7,
        8,
    ]  # of 1 2 3, of 4, of 5 6, of 7 8 9

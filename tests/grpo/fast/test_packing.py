"""The packed attention against a dense one with a mask, outputs and gradients; completions that
share their beginnings against the same without.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.fast.packing import Packing

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
    """Which token (row) attends to which (column), from the definition: earlier ones of its own
    sequence.
    """
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
    row, mask = packing_of(prompts, completions, device), allowed(prompts, completions)
    torch.manual_seed(0)
    inputs = [torch.randn(len(mask), h, size, dtype=torch.float64) for h in (heads, keys, keys)]
    upstream = torch.randn(len(mask), heads, size, dtype=torch.float64)
    ours = [x.clone().to(device, dtype).requires_grad_() for x in inputs]
    found = row.attend(0, *(x.transpose(0, 1)[None] for x in ours), 0.3)[0]
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


# Completions of one token have no query of their own; in a prompt all of whose completions are so
# short, nothing but the prompt has.
SHORT = {
    "all of one": ([5, 3], [1, 1, 1, 1]),
    "one, then two": ([5, 3], [1, 1, 2, 2]),
    "one and thirty": ([7, 40], [1, 30, 30, 1]),
    "a prompt without queries": ([7, 40, 9], [30, 1, 1, 1, 1, 30]),
    "prompts and completions of one": ([1, 1, 1], [1, 1, 1]),
    "prompts of one, completions of thirty": ([1, 6, 1], [1, 1, 2, 1, 30, 1]),
}
GROUPED = [(9, 3), (8, 8), (8, 1)]  # query heads, key heads


@pytest.mark.parametrize(
    "device, dtype, tolerance",
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("heads", GROUPED, ids=str)
@pytest.mark.parametrize("shape", SHORT.values(), ids=SHORT)
def test_short_completions_and_prompts(shape, heads, device, dtype, tolerance):
    ours, theirs = both_ways(*shape, *heads, device, dtype, 64)
    size = theirs[0].norm()  # a gradient may be 0: that of a query which has one key alone
    for found, expected in zip(ours, theirs, strict=True):
        assert (found.cpu().double() - expected).norm() < tolerance * max(size, expected.norm())


def test_what_predicts_each_token():
    row = Packing([(10, 11, 12), (20,)], [(1, 2, 3), (4,), (5, 6), (7, 8, 9)], torch.device("cpu"))
    assert row.tokens_N.tolist() == [10, 11, 12, 20, 1, 2, 5, 7, 8]
    assert row.positions_N.tolist() == [0, 1, 2, 0, 3, 4, 1, 1, 2]
    # Of 1 2 3, of 4, of 5 6, of 7 8 9.
    assert row.tokens_N[row.predictors_U].tolist() == [12, 1, 2, 12, 20, 5, 20, 7, 8]


CPU = torch.device("cpu")

# Few different tokens, so that many completions begin alike.
COMPLETION = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
GROUPS = st.tuples(st.integers(1, 3), st.integers(1, 5)).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(1, 4), min_size=size[0], max_size=size[0]),
        st.lists(COMPLETION, min_size=size[0] * size[1], max_size=size[0] * size[1]),
    )
)


def shared_and_not(lengths, completions):
    """The same completions with shared beginnings and without; the prompts differ."""
    prompts = [tuple(range(10 * p, 10 * p + length)) for p, length in enumerate(lengths)]
    return [
        Packing(prompts, completions, CPU, shares_beginnings=shares) for shares in (True, False)
    ]


def places_in(shared, alone):
    """The place in the row `shared` of each token of the row `alone`."""
    predictors_M = shared.of_tokens(shared.predictors_U)
    places = torch.arange(len(alone.tokens_N))
    return places.scatter(0, alone.predictors_U, predictors_M)


@given(GROUPS)
@settings(max_examples=150)
def test_a_shared_row_holds_every_beginning_once(groups):
    lengths, completions = groups
    shared, alone = shared_and_not(lengths, completions)
    size = len(completions) // len(lengths)
    beginnings = {
        (r // size, completion[:n])
        for r, completion in enumerate(completions)
        for n in range(1, len(completion))
    }
    assert len(shared.tokens_N) == sum(lengths) + len(beginnings)
    places = places_in(shared, alone)
    assert shared.tokens_N[places].equal(alone.tokens_N)
    assert shared.positions_N[places].equal(alone.positions_N)

    predicted = {
        (r // size, completion[:n])
        for r, completion in enumerate(completions)
        for n in range(1, len(completion) + 1)
    }
    assert len(shared.predictors_U) == len(predicted)
    targets = torch.tensor([token for each in completions for token in each])
    assert shared.of_tokens(shared.distinct(targets)).equal(targets)
    assert shared.longest_sequence == alone.longest_sequence


@given(GROUPS, st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(max_examples=60)
def test_attention_with_shared_beginnings_is_that_without(groups, heads):
    lengths, completions = groups
    shared, alone = shared_and_not(lengths, completions)
    places = places_in(shared, alone)
    H, K = heads
    torch.manual_seed(0)
    inputs = [
        torch.randn(len(shared.tokens_N), heads, 16, dtype=torch.float64) for heads in (H, K, K)
    ]
    upstream = torch.randn(len(places), H, 16, dtype=torch.float64)

    ours = [x.clone().requires_grad_() for x in inputs]
    found = shared.attend(0, *(x.transpose(0, 1)[None] for x in ours), 0.3)[0][places]
    found.backward(upstream)

    theirs = [x.clone().requires_grad_() for x in inputs]
    expected = dense(
        *(x[places] for x in theirs), allowed(lengths, [len(each) for each in completions]), 0.3
    )
    expected.backward(upstream)

    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=0)


def test_what_alike_completions_leave():
    shared, alone = shared_and_not([20], [(1, 2, 3, 4)] * 15 + [(1, 2, 9, 4)])
    assert (len(shared.tokens_N), len(alone.tokens_N)) == (20 + 4, 20 + 48)
    assert (len(shared.predictors_U), len(alone.predictors_U)) == (6, 64)

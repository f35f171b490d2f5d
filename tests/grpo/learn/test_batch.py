"""Micro-batches by hand, and that cutting loses, doubles and misplaces nothing."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.learn.batch import micro_batches
from grpo.records import Completion, Group
from grpo.tasks.base import Problem

CPU = torch.device("cpu")


def group_of(index, prompt_length, lengths, temperature=1.0):
    """A group whose numbers tell where they come from: row i has the tokens 100 * index + 10 * i,
    + 1, + 2, ...
    """
    rows = [tuple(100 * index + 10 * i + t for t in range(n)) for i, n in enumerate(lengths)]
    completions = [
        Completion(row, tuple(-float(token) for token in row), "", "stop") for row in rows
    ]
    return Group(
        index,
        Problem("t", 1, "p", "x", str(index)),
        (index,) * prompt_length,
        temperature,
        completions,
        advantages=[float(100 * index + 10 * i) for i in range(len(lengths))],
    )


def cut(groups, micro_tokens=1 << 30, kind="dapo", **ranks):
    cut = {"micro_tokens": micro_tokens, **ranks}
    return list(micro_batches(groups, kind, max_length=30, device=CPU, **cut))


def test_tensors_by_hand():
    (batch,) = cut([group_of(1, 3, [1, 3], 0.5), group_of(2, 2, [2, 2], 0.5)])
    assert batch.prompts == [(1, 1, 1), (2, 2)]
    assert batch.tokens_RT.tolist() == [[100, 0, 0], [110, 111, 112], [200, 201, 0], [210, 211, 0]]
    assert batch.mask_RT.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert batch.old_RT.tolist() == [
        [-100, 0, 0],
        [-110, -111, -112],
        [-200, -201, 0],
        [-210, -211, 0],
    ]
    assert batch.advantages.tolist() == [100, 110, 200, 210]
    assert batch.temperature == 0.5
    assert batch.weights_R.tolist() == [1 / 8] * 4  # 1 + 3 + 2 + 2 tokens


@pytest.mark.parametrize(
    "micro_tokens, shapes",
    [
        (24, [(2, 6)]),  # (prompts, rows): prompts of 4 and 2, and 6 rows of 3: 6 + 18
        (23, [(1, 3), (1, 3)]),  # 4 + 9 and 2 + 9
        (10, [(1, 2), (1, 1), (1, 2), (1, 1)]),  # 4 + 6 is 10, 4 + 9 is not
        (1, [(1, 1)] * 6),  # a row is never cut
    ],
)
def test_cuts_by_hand(micro_tokens, shapes):
    batches = cut([group_of(1, 4, [3, 3, 3]), group_of(2, 2, [3, 3, 3])], micro_tokens)
    assert [(len(batch.prompts), len(batch.tokens_RT)) for batch in batches] == shapes


GROUPS = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=rows, max_size=rows)),
        min_size=1,
        max_size=5,
    )
)


@given(GROUPS, st.integers(0, 60))
# Parts of one row and of three are no grid, though they would fit.
@example([(1, [9, 1, 1]), (1, [1, 1, 1])], 20)
def test_every_row_comes_once_in_order_with_its_prompt_and_within_the_bound(shapes, micro_tokens):
    groups = [group_of(index, *shape) for index, shape in enumerate(shapes)]
    rows = []
    for batch in cut(groups, micro_tokens):
        each, rest = divmod(len(batch.tokens_RT), len(batch.prompts))
        assert rest == 0
        for r, (tokens, mask) in enumerate(zip(batch.tokens_RT, batch.mask_RT)):
            rows.append((batch.prompts[r // each], tuple(tokens[mask].tolist())))
        size = sum(map(len, batch.prompts)) + int(batch.mask_RT.sum())
        assert size <= micro_tokens or len(batch.tokens_RT) == 1
    assert rows == [
        (group.prompt, completion.tokens) for group in groups for completion in group.completions
    ]


def rows_of(batches):
    return sorted(
        (name, float(weight))
        for batch in batches
        for name, weight in zip(batch.row_ids, batch.weights_R)
    )


@given(GROUPS, st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_ranks_share_out_the_rows_of_the_step(shapes, micro_tokens):
    """Their memory may differ, as when one of them has run out of it."""
    groups = [group_of(index, *shape) for index, shape in enumerate(shapes)]
    parts = [
        batch
        for rank, most in enumerate(micro_tokens)
        for batch in cut(groups, most, "grpo", rank=rank, ranks=len(micro_tokens))
    ]
    assert rows_of(parts) == rows_of(cut(groups, kind="grpo"))


def test_ranks_have_about_as_much_to_do():
    """Groups of 20, 4, 18, 6 and 16 tokens: the largest first, each to the rank with least."""
    groups = [group_of(i, 2, [n] * 2) for i, n in enumerate([9, 1, 8, 2, 7])]
    loads = [
        sum(
            sum(map(len, batch.prompts)) + int(batch.mask_RT.sum())
            for batch in cut(groups, rank=rank, ranks=2)
        )
        for rank in range(2)
    ]
    assert loads == [20 + 4 + 6, 18 + 16]

    # One group, four ranks: nobody idles.
    alone = [cut([group_of(0, 2, [3] * 8)], rank=rank, ranks=4) for rank in range(4)]
    assert [[len(batch.tokens_RT) for batch in part] for part in alone] == [[2]] * 4

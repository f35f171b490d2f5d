import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.rollout.sampling import choose, draw, sample_key, truncation, uniform


def splitmix64(key: int, position: int) -> float:
    """The published algorithm in Python integers: the state advances by the golden ratio, then is mixed."""
    mask = (1 << 64) - 1
    z = (key + 0x9E3779B97F4A7C15 * (position + 1)) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 10_000))
def test_uniform_is_splitmix64(keys, position):
    got = uniform(torch.tensor(keys, dtype=torch.int64), position).tolist()
    assert got == [splitmix64(key, position) for key in keys]


def test_published_vector():
    # the first output of SplitMix64 seeded with 0 is 0xE220A8397B1DCDAF
    assert uniform(torch.tensor([0]), 0).item() == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_keys_differ_in_every_counter():
    base = (1, 2, 3, 4, 0)
    others = [tuple(value + (i == j) for j, value in enumerate(base)) for i in range(5)]
    assert len({sample_key(*counters) for counters in [base, *others]}) == 6
    assert sample_key(1, 23) != sample_key(12, 3)


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=6), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_inverse_of_the_cdf(weights, u):
    p = torch.tensor(weights, dtype=torch.float64)
    token = draw(
        (p / p.sum())[None], torch.tensor([u], dtype=torch.float64), torch.tensor([0])
    ).item()
    cdf = np.concatenate([[0], np.cumsum(weights) / np.sum(weights)])
    assert cdf[token] - 1e-9 <= u <= cdf[token + 1] + 1e-9


def test_completions_draw_from_the_row_that_they_read():
    logits = torch.full((3, 2, 200), -torch.inf)  # row r has only token 70 r + t at place t
    for row in range(3):
        for place in range(2):
            logits[row, place, 70 * row + place] = 0
    rows, heat = torch.tensor([2, 0, 2, 2]), torch.tensor([1.0, 1.0, 0.0])
    chosen, logprobs = choose(logits, heat, torch.rand(4, 2, dtype=torch.float64), rows, None)
    assert chosen.tolist() == [[140, 141], [0, 1], [140, 141], [140, 141]] and not logprobs.any()
    logits[0, 0, :2] = torch.tensor([0.25, 0.75]).log()
    numbers, rows = (
        torch.tensor([[0.1], [0.3], [0.2]], dtype=torch.float64),
        torch.zeros(3, dtype=torch.long),
    )
    chosen, logprobs = choose(logits[:1, :1], heat[:1], numbers, rows, None)
    assert chosen[:, 0].tolist() == [0, 1, 0]
    torch.testing.assert_close(logprobs[:, 0].exp(), torch.tensor([0.25, 0.75, 0.25]))


def test_draw_never_returns_what_has_no_probability():
    mass = torch.tensor([[0.0, 1.0, 0.0]])
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(mass, torch.tensor([u], dtype=torch.float64), torch.tensor([0])).item() == 1


def test_draws_follow_the_distribution():
    # chi-square with 3 degrees of freedom over 20,000 draws; it passes 21.1 with probability 1e-4 if all is right
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    keys = torch.tensor([sample_key("chi", i) for i in range(20_000)])
    tokens = draw(p[None], uniform(keys, 7), torch.zeros(20_000, dtype=torch.long))
    expected = 20_000 * p
    assert ((torch.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum() < 21.1


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = lambda **options: truncation(**options)(logits, None).isfinite()[0].tolist()  # noqa: E731
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [
        True,
        True,
        False,
        False,
    ]  # 0.4 < 0.5, so the second still belongs to the nucleus
    assert kept(top_p=0.35) == [True, False, False, False]
    assert truncation() is None


def test_the_loss_keeps_what_was_drawn():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert truncation(top_k=1)(logits, torch.tensor([3])).isfinite()[0].tolist() == [
        True,
        False,
        False,
        True,
    ]

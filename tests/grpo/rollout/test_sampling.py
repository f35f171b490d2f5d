import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from grpo.rollout.sampling import choose, draw, sample_key, truncation, uniform


def splitmix64(key: int, position: int) -> float:
    """The published algorithm in Python integers: the state advances by the golden ratio, then is
    mixed.
    """
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
    rows = torch.tensor([2, 0, 2, 2])
    for heat in (1.0, 0.0):
        chosen, logprobs = choose(logits, heat, torch.rand(4, 2, dtype=torch.float64), rows, None)
        assert chosen.tolist() == [[140, 141], [0, 1], [140, 141], [140, 141]]
        assert not logprobs.any()
    logits[0, 0, :2] = torch.tensor([0.25, 0.75]).log()
    numbers, rows = (
        torch.tensor([[0.1], [0.3], [0.2]], dtype=torch.float64),
        torch.zeros(3, dtype=torch.long),
    )
    chosen, logprobs = choose(logits[:1, :1], 1.0, numbers, rows, None)
    assert chosen[:, 0].tolist() == [0, 1, 0]
    torch.testing.assert_close(logprobs[:, 0].exp(), torch.tensor([0.25, 0.75, 0.25]))
    chosen, logprobs = choose(logits[:1, :1], 0.0, numbers, rows, None)
    assert chosen[:, 0].tolist() == [1, 1, 1]
    torch.testing.assert_close(logprobs[:, 0].exp(), torch.full((3,), 0.75))


@pytest.mark.parametrize("token", [1, 63, 64, 130, 199])  # in any of the blocks of 64
def test_draw_never_returns_what_has_no_probability(token):
    mass = torch.zeros(1, 200)
    mass[0, token] = 1
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(mass, torch.tensor([u], dtype=torch.float64), torch.tensor([0])).item() == token


def test_draws_follow_the_distribution():
    # chi-square with 3 degrees of freedom over 20,000 draws; it passes 21.1 with probability 1e-4
    # if all is right
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    keys = torch.tensor([sample_key("chi", i) for i in range(20_000)])
    tokens = draw(p[None], uniform(keys, 7), torch.zeros(20_000, dtype=torch.long))
    expected = 20_000 * p
    assert ((torch.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum() < 21.1


def test_top_p_by_hand():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def kept(top_p, tokens=None):
        return truncation(top_p)(logits, tokens).isfinite()[0].tolist()

    # 0.4 < 0.5, so the second still belongs to the nucleus.
    assert kept(0.5) == [True, True, False, False]
    assert kept(0.35) == [True, False, False, False]
    # The loss keeps what was drawn.
    assert kept(0.35, torch.tensor([3])) == [True, False, False, True]
    assert truncation(1.0) is None
    # Recorded decode steps are found by the function itself.
    assert truncation(0.9) is truncation(0.9) is not truncation(0.8)


def warped(logits_RV: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return what `transformers` makes of the logits, with all tokens that tie with the least
    likely one it keeps.
    """
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))

    scores_RV = warpers(None, logits_RV)
    least_R1 = scores_RV.masked_fill(scores_RV == -torch.inf, torch.inf).amin(-1, keepdim=True)
    heated_RV = logits_RV / temperature
    return heated_RV.masked_fill(heated_RV < least_R1, -torch.inf)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([2, 3, 7, 50, 257, 4096]),
    spread=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 4.0, 30.0, 1e4]),
    is_tied=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 1.5]),
    top_p=st.floats(1e-6, 1.0) | st.sampled_from([1e-12, 0.5, 0.9, 0.95, 1 - 1e-7, 1.0]),
)
@example(0, 4, 50, 1.0, False, 1.0, 0.7)
@example(0, 4, 50, 1.0, True, 1.0, 0.7)
@example(0, 2, 50, 0.0, True, 1.0, 0.5)  # all logits are equal
def test_the_support_is_that_of_transformers(
    seed, rows, vocabulary, spread, is_tied, temperature, top_p
):
    logits_RV = spread * torch.randn(
        rows, vocabulary, generator=torch.Generator().manual_seed(seed)
    )
    logits_RV = logits_RV.round() if is_tied else logits_RV

    truncate = truncation(top_p)
    heated_RV = logits_RV / temperature
    found_RV = truncate(heated_RV, None) if truncate else heated_RV

    torch.testing.assert_close(found_RV, warped(logits_RV, temperature, top_p), rtol=0, atol=0)
    assert found_RV.isfinite().any(-1).all()


def test_the_support_moves_with_the_tokens_however_they_tie():
    """Equal logits are kept or excluded together, so no sort decides what can be sampled."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -torch.inf]])
    order = torch.tensor([6, 3, 5, 1, 4, 2, 0])
    truncate = truncation(0.6)

    kept = truncate(logits, None)
    assert torch.equal(truncate(logits[:, order], None), kept[:, order])
    assert kept.isfinite()[0].tolist() == 4 * [True] + 3 * [False]

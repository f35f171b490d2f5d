"""From logits to tokens: counter-based uniform numbers, inverse CDF, truncation.

Each token has its own uniform number, which is a hash of (run seed, step, problem, sample) and the
position. So a sample depends only on the policy's distribution and on this number, and not on
the layout of the batch, its padding, or its other rows.

Shapes: R rows, T places in each, N draws, C completions, V vocabulary, B blocks of b tokens.
"""

import hashlib
from collections.abc import Callable
from functools import cache

import torch

# The constants of SplitMix64 as torch's int64 holds them.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_30 = 0xBF58476D1CE4E5B9 - 2**64
MIX_27 = 0x94D049BB133111EB - 2**64

BLOCK = 64  # tokens, see `draw`


def sample_key(*counters: int | str) -> int:
    """Return the key of one sample, a signed 64-bit integer, from (seed, step, problem, ...)."""
    digest = hashlib.blake2b("/".join(map(str, counters)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(keys: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """Return a float64 in [0, 1) for each key (int64) and position; shapes broadcast.

    SplitMix64 (Steele et al. 2014) is arithmetic on integers, the same on every device.
    """
    x = keys + (torch.as_tensor(positions, device=keys.device) + 1) * GAMMA
    x = (x ^ _shift(x, 30)) * MIX_30
    x = (x ^ _shift(x, 27)) * MIX_27
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x shifted to the right, with zeros from the left; torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(mass_RV: torch.Tensor, uniform_N: torch.Tensor, row_N: torch.Tensor) -> torch.Tensor:
    """Return draws by the inverse CDF, (N,) int64.

    Draw n is the token of row `row_N[n]` at which the cumulative probability passes `uniform_N[n]`.
    The block of BLOCK tokens is found first, and then the token in it, because cumulative sums are
    slow. If the distribution is not finite, neither is the log-probability of the draw.
    """
    R, V = mass_RV.shape
    mass_RBb = torch.nn.functional.pad(mass_RV, (0, -V % BLOCK)).view(R, -1, BLOCK)
    cdf_NB = mass_RBb.sum(-1).cumsum(-1)[row_N]

    # Rounded probabilities do not add up to exactly 1, so the uniform number is scaled by their
    # sum. It stays below the sum, so that no draw is beyond the last token.
    total_N1 = cdf_NB[:, -1:]
    below_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    passed_N1 = (uniform_N[:, None] * total_N1).to(cdf_NB.dtype).minimum(below_N1)

    # The block.
    block_N1 = torch.searchsorted(cdf_NB, passed_N1, right=True).clamp(max=cdf_NB.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, cdf_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0)

    # The token, at most the last one of the block that has any probability.
    cdf_Nb = mass_RBb[row_N, block_N1[:, 0]].cumsum(-1)
    place_N1 = torch.searchsorted(cdf_Nb, passed_N1 - before_N1, right=True)
    last_N1 = (cdf_Nb < cdf_Nb[:, -1:]).sum(-1, keepdim=True)
    return (block_N1 * BLOCK + place_N1.minimum(last_N1))[:, 0]


def choose(
    logits_RTV: torch.Tensor,
    temperature: float,
    uniform_CT: torch.Tensor,
    row_C: torch.Tensor,
    truncate: Callable | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that each completion draws, and their log-probabilities, (C, T) each.

    Completion c draws from the distributions of row `row_C[c]`, with its own uniform numbers. A
    temperature of 0 takes the likeliest token.
    """
    R, T, V = logits_RTV.shape
    scaled_RTV = logits_RTV.float() / (temperature or 1.0)
    if truncate is not None:
        scaled_RTV = truncate(scaled_RTV.view(R * T, V), None).view(R, T, V)
    mass_MV = scaled_RTV.view(R * T, V).softmax(-1)

    # The row of `mass_MV` for each place of each completion.
    place_CT = row_C[:, None] * T + torch.arange(T, device=row_C.device)
    drawn_CT = draw(mass_MV, uniform_CT.reshape(-1), place_CT.view(-1)).view(-1, T)
    if temperature == 0:
        drawn_CT = scaled_RTV.argmax(-1)[row_C]
    return drawn_CT, mass_MV[place_CT, drawn_CT].log()


@cache  # recorded decode steps are kept by the identity of the function
def truncation(top_p: float) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """Return a function that sets logits outside the nucleus to -inf; None if `top_p` is 1.

    The function takes logits (R, V) that are divided by the temperature. The nucleus
    (arXiv:1904.09751) is the smallest set of the likeliest tokens with mass `top_p`. The arithmetic
    is that of `TopPLogitsWarper` of `transformers`, but all tokens that tie with the least likely
    one kept are kept, so that the support does not depend on how a sort orders equal logits.

    The loss also passes the sampled tokens (R,). They are always kept, because neither rounding nor
    an update (`epochs` above 1) must exclude a token that was drawn.
    """
    if top_p >= 1:
        return None

    def truncate(logits_RV: torch.Tensor, tokens_R: torch.Tensor | None = None) -> torch.Tensor:
        # From the least likely token upwards, so that the small masses are summed before they are
        # lost to rounding.
        ascending_RV = logits_RV.detach().sort(-1).values
        mass_RV = ascending_RV.softmax(-1).cumsum(-1)
        outside_R1 = (mass_RV <= 1 - top_p).sum(-1, keepdim=True)
        least_R1 = ascending_RV.gather(-1, outside_R1.clamp(max=ascending_RV.shape[-1] - 1))

        excluded_RV = logits_RV < least_R1
        if tokens_R is not None:
            excluded_RV = excluded_RV.scatter(-1, tokens_R[:, None], False)
        return logits_RV.masked_fill(excluded_RV, -torch.inf)

    return truncate

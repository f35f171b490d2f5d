"""From logits to tokens: counter-based uniform numbers, inverse CDF, truncation.

One uniform number a token, hashed from (run seed, step, problem, sample, try) and the position: what is sampled depends
on the policy's distribution and that number alone, not on batch layout, padding, or who shares the batch.

Shapes: R rows, T places in each, V vocabulary.
"""
import hashlib
from collections.abc import Callable

import torch

_MASK = (1 << 64) - 1
BLOCK = 64


def sample_key(*counters: int | str) -> int:
    """Return the 64-bit key (signed) of one sample, from counters such as (seed, step, problem, sample, try)."""
    digest = hashlib.blake2b("/".join(map(str, counters)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(keys: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """Return one float64 in [0, 1) for each key (int64) and position: SplitMix64 (Steele et al. 2014) of key and counter.

    Integer arithmetic alone, so every device gives the same numbers. Shapes broadcast.
    """
    x = keys + (torch.as_tensor(positions, device=keys.device) + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0 ** -53


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logprobs_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at which the cumulative distribution passes `uniform_R`: the inverse CDF, (R,) int64.

    First its block of BLOCK tokens is found, then its place there, for cumulated sums are slow. The scale of the distribution is taken
    from its own sum, and a draw that rounds up to all of it is taken just below, so none falls off the end or on a token
    without probability.
    """
    R, V = logprobs_RV.shape
    mass_RBb = torch.nn.functional.pad(logprobs_RV.exp(), (0, -V % BLOCK)).view(R, -1, BLOCK)
    cdf_RB = mass_RBb.sum(-1).cumsum(-1)
    total_R1 = cdf_RB[:, -1:]
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    passed_R1 = (uniform_R[:, None] * total_R1).to(cdf_RB.dtype).minimum(below_R1)
    block_R1 = torch.searchsorted(cdf_RB, passed_R1, right=True)
    before_R1 = torch.where(block_R1 > 0, cdf_RB.gather(1, (block_R1 - 1).clamp(min=0)), 0)
    cdf_Rb = mass_RBb[torch.arange(R, device=block_R1.device), block_R1[:, 0]].cumsum(-1)
    place_R1 = torch.searchsorted(cdf_Rb, passed_R1 - before_R1, right=True)
    last_R1 = (cdf_Rb < cdf_Rb[:, -1:]).sum(-1, keepdim=True)  # the last token of the block that has any probability
    return (block_R1 * BLOCK + place_R1.minimum(last_R1))[:, 0]


def choose(logits_RTV: torch.Tensor, heat_R: torch.Tensor, uniform_RT: torch.Tensor,
           truncate: Callable | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token drawn at each place and its log-probability under the distribution it was drawn from, (R, T) each.

    `heat_R` are temperatures; 0 takes the likeliest token.
    """
    R, T, V = logits_RTV.shape
    greedy_R = heat_R == 0
    scaled_RTV = logits_RTV.float() / torch.where(greedy_R, 1.0, heat_R)[:, None, None]
    if truncate is not None:
        scaled_RTV = truncate(scaled_RTV.view(R * T, V), None).view(R, T, V)
    logp_RTV = scaled_RTV.log_softmax(-1)
    drawn_RT = draw(logp_RTV.view(R * T, V), uniform_RT.reshape(R * T)).view(R, T)
    chosen_RT = torch.where(greedy_R[:, None], logp_RTV.argmax(-1), drawn_RT)
    return chosen_RT, logp_RTV.gather(2, chosen_RT[:, :, None])[:, :, 0]


def truncation(top_k: int = 0, top_p: float = 1.0) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """Return a function that sets all logits (R, V) outside the top k, or the nucleus of mass p, to -inf; or None.

    It takes logits already divided by the temperature and, from the loss, the sampled tokens (R,), which are always
    kept: rounding must not exclude what was in fact drawn. Sampler and loss share it, so both see one distribution.
    """
    if not top_k and top_p >= 1:
        return None

    def truncate(logits_RV: torch.Tensor, tokens_R: torch.Tensor | None = None) -> torch.Tensor:
        ordered, order = logits_RV.sort(-1, descending=True)
        excluded = torch.zeros_like(ordered, dtype=torch.bool)
        if top_k:
            excluded[:, top_k:] = True
        if top_p < 1:
            probabilities = ordered.softmax(-1)
            excluded |= probabilities.cumsum(-1) - probabilities >= top_p
        excluded = torch.zeros_like(excluded).scatter(-1, order, excluded)
        if tokens_R is not None:
            excluded = excluded.scatter(-1, tokens_R[:, None], False)
        return logits_RV.masked_fill(excluded, -torch.inf)

    return truncate

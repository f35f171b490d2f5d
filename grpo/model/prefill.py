"""The prompts of a rollout, each run once; on a CPU, what all of them begin with only once.

Shapes: P prompts, L tokens of the longest, T of its rest after the common beginning, K key heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.model.fallback import FallbackCache
from grpo.model.interfaces import RolloutCache
from grpo.model.packed_attention import common_length
from grpo.model.prefix_cache import PrefixCache
from grpo.model.runner import Runner

# On a CPU, prompts share their beginning if that saves at least so many tokens, and if the masks of
# their attention have no more scores than this for each head.
MIN_SAVED = 256
MAX_SCORES = 1 << 24


def prefill(policy: Runner, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RolloutCache]:
    """Return the hidden states of the prompts' last tokens (P, E), and the cache to `extend`."""
    if policy.fast_model:
        policy.fast_model.refresh()

    if policy.device.type == "cpu" and policy.path != "plain":
        common = common_beginning(prompts)
        longest = max(map(len, prompts))
        saved = common * (len(prompts) - 1)
        scores = len(prompts) * (longest - common) * longest
        if saved >= MIN_SAVED and scores <= MAX_SCORES:
            return after_beginning(policy, prompts, common)
    return whole(policy, prompts)


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many tokens all prompts begin with, the last token of each left out."""
    # In lexical order, the first and the last one have the least in common.
    return common_length(min(prompts)[:-1], max(prompts)[:-1])


def whole(policy: Runner, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RolloutCache]:
    """Run each prompt from its first token to its last; return the same as `prefill`."""
    tokens, lengths = _padded(prompts)
    tokens_PL, lengths_P = tokens.to(policy.device), lengths.to(policy.device)
    L = tokens_PL.shape[1]

    cache: FallbackCache | PrefixCache
    if policy.path == "plain":
        cache = FallbackCache(lengths_P, tokens_PL)
        hidden_PLE = policy.hidden_states(tokens_PL)
    else:
        cache = PrefixCache(lengths_P, L)
        positions_PL = torch.arange(L, device=policy.device)[None].expand_as(tokens_PL)
        hidden_PLE = policy.hidden_states(tokens_PL, position_ids=positions_PL, shared=cache)
    return hidden_PLE[torch.arange(len(prompts), device=policy.device), lengths_P - 1], cache


def after_beginning(
    policy: Runner, prompts: Sequence[tuple[int, ...]], common: int
) -> tuple[Tensor, PrefixCache]:
    """Run the first `common` tokens, which all prompts begin with, and then the rest of each.

    The rests are rows that continue the beginning. Returns the same as `prefill`.
    """
    tokens_PT, lengths_P = _padded([prompt[common:] for prompt in prompts])
    P, T = tokens_PT.shape

    _, beginning = whole(policy, [prompts[0][:common]])
    assert isinstance(beginning, PrefixCache)
    beginning.allocate(P, T)
    hidden_PTE = policy.extend(tokens_PT, beginning)

    cache = PrefixCache(common + lengths_P, common + T)
    for layer, of_beginning in beginning.prompt.items():
        keys_PKLD, values_PKLD = (
            torch.cat([first.expand(P, -1, -1, -1), rest], 2)
            for first, rest in zip(of_beginning, beginning.own[layer], strict=True)
        )
        cache.prompt[layer] = keys_PKLD, values_PKLD
    return hidden_PTE[torch.arange(P), lengths_P - 1], cache


def _padded(prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the tokens of the prompts (P, L), with zeros on the right, and their lengths (P,)."""
    tokens_PL = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    return tokens_PL, torch.tensor([len(prompt) for prompt in prompts])

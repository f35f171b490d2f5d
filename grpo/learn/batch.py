"""Groups to micro-batches: tensors of a bounded number of tokens, cut so that the gradient does
not notice.

The weight of every token is fixed from the whole step (`loss.token_weights`) before anything is
cut, so losses and gradients of the micro-batches add up to those of the step. The prompt of a
group is run once a micro-batch, not once a completion.

Shapes: P prompts, G rows of each (the same for all in a micro-batch), R = P * G rows, T tokens, M
tokens of all rows without padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.learn.loss import token_weights
from grpo.model.varlen_attention import flat_indices, to_device
from grpo.records import Group


@dataclass(frozen=True)
class MicroBatch:
    """A grid of P prompts by G completions, completions padded on the right to T tokens; R = P *
    G.
    """

    prompts: list[tuple[int, ...]]
    names: list[tuple[int, int]]  # group and sample of each row
    completions: list[tuple[int, ...]]  # the tokens of each row, without padding
    tokens_RT: Tensor
    mask_RT: Tensor  # True at tokens, False at padding
    # of the tokens, row after row, in the grid of R * T: to find them by the mask, the host would
    # wait for the GPU
    places_M: Tensor
    old_RT: Tensor  # log-probabilities under the policy that sampled
    advantages: Tensor  # (R,), or (R, T) where each token has its own, 0 at padding
    temperatures_R: Tensor
    weights_R: Tensor


def micro_batches(
    groups: Sequence[Group],
    kind: str,
    *,
    micro_tokens: int,
    max_length: int,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the step's `groups` (advantages filled in) in micro-batches of at most `micro_tokens`
    tokens.

    Counted are prompts once and completions; 0 means no bound. A group that is too large alone is
    cut into parts of its rows, a row never is. `kind` and `max_length` (tokens) go to
    `loss.token_weights`. Of several `ranks` each has a part of the rows, of about as many tokens
    as the others; the weights are those of the whole step.
    """
    lengths = torch.tensor(
        [len(completion.tokens) for group in groups for completion in group.completions]
    )
    weights = token_weights(kind, lengths, max_length=max_length).tolist()
    parts, first = [], 0
    for group in groups:
        size = len(group.completions)
        rows = list(
            zip(
                group.completions,
                group.advantages,
                weights[first : first + size],
                range(size),
                strict=True,
            )
        )
        first += size
        longest = max(len(completion.tokens) for completion in group.completions)
        fit = max(1, (micro_tokens - len(group.prompt)) // longest) if micro_tokens else size
        fit = min(fit, -(-size * len(groups) // ranks))  # fewer groups than ranks: nobody idles
        fit = -(-size // -(-size // fit))  # parts of about the same size
        parts += [(group, rows[start : start + fit]) for start in range(0, size, fit)]
    parts = _share(parts, rank, ranks)
    bundle: list = []
    for part in parts:
        if bundle and (
            len(part[1]) != len(bundle[0][1])
            or micro_tokens
            and _tokens([*bundle, part]) > micro_tokens
        ):
            yield _tensors(bundle, device)
            bundle = []
        bundle.append(part)
    if bundle:
        yield _tensors(bundle, device)


def _share(parts: list, rank: int, ranks: int) -> list:
    """Return the parts that are this rank's, in order: the largest first, each goes to who has
    least so far.
    """
    sizes, loads, mine = [_tokens([part]) for part in parts], [0] * ranks, []
    for number in sorted(range(len(parts)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        loads[least] += sizes[number]
        if least == rank:
            mine.append(number)
    return [parts[number] for number in sorted(mine)]


def _tokens(bundle: Sequence[Any]) -> int:
    return sum(
        len(group.prompt) + sum(len(completion.tokens) for completion, *_ in rows)
        for group, rows in bundle
    )


def _tensors(bundle: Sequence[Any], device: torch.device) -> MicroBatch:
    rows = [row for _, part in bundle for row in part]
    T = max(len(completion.tokens) for completion, *_ in rows)
    tokens, mask = (
        torch.zeros(len(rows), T, dtype=torch.long),
        torch.zeros(len(rows), T, dtype=torch.bool),
    )
    old = torch.zeros(len(rows), T)
    for r, (completion, *_) in enumerate(rows):
        n = len(completion.tokens)
        tokens[r, :n], mask[r, :n] = torch.tensor(completion.tokens), True
        old[r, :n] = torch.tensor(completion.logprobs)
    temperatures = [group.temperature for group, part in bundle for _ in part]
    return MicroBatch(
        prompts=[group.prompt for group, _ in bundle],
        names=[(group.index, sample) for group, part in bundle for *_, sample in part],
        completions=[completion.tokens for completion, *_ in rows],
        places_M=flat_indices([len(completion.tokens) for completion, *_ in rows], T, device),
        **{
            name: to_device(tensor, device)
            for name, tensor in dict(
                tokens_RT=tokens,
                mask_RT=mask,
                old_RT=old,
                advantages=_padded([advantage for _, advantage, *_ in rows], T),
                temperatures_R=torch.tensor(temperatures),
                weights_R=torch.tensor([weight for _, _, weight, _ in rows], dtype=torch.float64),
            ).items()
        },
    )


def _padded(advantages: list[float] | list[list[float]], T: int) -> Tensor:
    """Return numbers as a tensor (R,), lists of them as (R, T), padded with 0 on the right."""
    if isinstance(advantages[0], list):
        advantages = [row + [0.0] * (T - len(row)) for row in advantages]
    return torch.tensor(advantages)

"""Groups to micro-batches of tensors, without an effect on the gradient.

The weight of every token is computed from the whole step (`loss.token_weights`) before anything is
cut, so the losses and gradients of all micro-batches add up to those of the step. A group's prompt
is run once in a micro-batch, not once for each completion.

Shapes: P prompts; R rows (completions), of which each prompt of a micro-batch has equally many; T
tokens; M tokens of all rows without padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.learn.loss import token_weights
from grpo.model.policy import flat_indices, to_device
from grpo.records import Completion, Group


@dataclass(frozen=True)
class MicroBatch:
    """Some completions of P prompts, padded on the right to T tokens."""

    prompts: list[tuple[int, ...]]
    completions: list[tuple[int, ...]]  # the tokens of each row, without padding
    row_ids: list[tuple[int, int]]  # of each row: the indices of its group and of its sample

    tokens_RT: Tensor
    mask_RT: Tensor  # True at tokens, False at padding

    # The index of each token in the flattened (R, T), row after row. To compute it from the mask,
    # the host would have to wait for the GPU.
    places_M: Tensor

    old_RT: Tensor  # log-probabilities under the policy that sampled
    sampled_R: Tensor | None  # False at demonstrations; None if there are none
    advantages: Tensor  # (R,), or (R, T) with 0 at padding if each token has its own
    temperatures_R: Tensor
    weights_R: Tensor  # of each token of a row, float64


class _Row(NamedTuple):
    """A completion of the step, and the weight of each of its tokens.

    Rows of one group make a part: what is moved between micro-batches.
    """

    group: Group
    sample: int
    weight: float

    @property
    def completion(self) -> Completion:
        return self.group.completions[self.sample]


def micro_batches(
    groups: Sequence[Group],
    kind: str,
    *,
    max_length: int,
    device: torch.device,
    micro_tokens: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the step's `groups`, whose advantages are filled in, in micro-batches.

    `kind` and `max_length` are those of `loss.token_weights`. A micro-batch has at most
    `micro_tokens` tokens, each prompt counted once (0: no bound). A group that is too large is cut
    into parts, but never within a row.

    Each of several `ranks` gets some of the rows, with about as many tokens as the others; which
    ones does not depend on `micro_tokens`, which may differ between ranks. The weights are always
    those of the whole step.
    """
    lengths = [len(row.tokens) for group in groups for row in group.completions]
    weights = iter(token_weights(kind, torch.tensor(lengths), max_length=max_length).tolist())
    parts = [
        [_Row(group, i, next(weights)) for i in range(len(group.completions))] for group in groups
    ]

    # With fewer groups than ranks they are cut, so that no rank is idle. All ranks must find the
    # same parts, so these do not depend on the memory that one of them has.
    parts = [piece for part in parts for piece in _cut(part, -(-len(part) * len(groups) // ranks))]
    parts = _assign(parts, rank, ranks)
    if micro_tokens:
        parts = [piece for part in parts for piece in _cut(part, _fitting_rows(part, micro_tokens))]

    bundle: list[list[_Row]] = []
    for part in parts:
        is_full = bool(micro_tokens) and sum(map(_tokens, [*bundle, part])) > micro_tokens
        if bundle and (is_full or len(part) != len(bundle[0])):
            yield _micro_batch(bundle, device)
            bundle = []
        bundle.append(part)
    if bundle:
        yield _micro_batch(bundle, device)


def _tokens(part: list[_Row]) -> int:
    """Return the number of tokens that are run, those of the prompt once."""
    return len(part[0].group.prompt) + sum(len(row.completion.tokens) for row in part)


def _cut(part: list[_Row], most: int) -> list[list[_Row]]:
    """Return the part cut into parts of about the same size, of at most `most` rows each."""
    count = len(part)
    size = -(-count // -(-count // min(count, most)))
    return [part[i : i + size] for i in range(0, count, size)]


def _fitting_rows(part: list[_Row], micro_tokens: int) -> int:
    """Return how many rows of the part surely fit `micro_tokens` tokens; at least one."""
    longest = max(len(row.completion.tokens) for row in part)
    return max(1, (micro_tokens - len(part[0].group.prompt)) // longest)


def _assign(parts: list[list[_Row]], rank: int, ranks: int) -> list[list[_Row]]:
    """Return this rank's parts, in order.

    Largest first, each part goes to the rank that has the fewest tokens so far.
    """
    loads = [0] * ranks
    local = []
    for number in sorted(range(len(parts)), key=lambda i: -_tokens(parts[i])):
        least = loads.index(min(loads))
        loads[least] += _tokens(parts[number])
        if least == rank:
            local.append(number)
    return [parts[number] for number in sorted(local)]


def _micro_batch(bundle: list[list[_Row]], device: torch.device) -> MicroBatch:
    """Return the parts of a `bundle` as one micro-batch."""
    rows = [row for part in bundle for row in part]
    completions = [row.completion for row in rows]
    lengths = [len(completion.tokens) for completion in completions]
    T = max(lengths)
    mask_RT = torch.arange(T) < torch.tensor(lengths)[:, None]

    def of_rows(values: list, dtype: torch.dtype | None = None) -> Tensor:
        """Return one value a row (R,), or a list of them a row (R, T) with 0 at padding."""
        if isinstance(values[0], Sequence):
            flat = torch.tensor(list(chain.from_iterable(values)))
            padded = flat.new_zeros(mask_RT.shape).masked_scatter_(mask_RT, flat)
            return to_device(padded, device)
        return to_device(torch.tensor(values, dtype=dtype), device)

    sampled = [not completion.is_demonstration for completion in completions]
    return MicroBatch(
        prompts=[part[0].group.prompt for part in bundle],
        completions=[completion.tokens for completion in completions],
        row_ids=[(row.group.index, row.sample) for row in rows],
        tokens_RT=of_rows([completion.tokens for completion in completions]),
        mask_RT=to_device(mask_RT, device),
        places_M=flat_indices(lengths, T, device),
        old_RT=of_rows([completion.logprobs for completion in completions]),
        sampled_R=None if all(sampled) else of_rows(sampled),
        advantages=of_rows([row.group.advantages[row.sample] for row in rows]),
        temperatures_R=of_rows([row.group.temperature for row in rows]),
        weights_R=of_rows([row.weight for row in rows], torch.float64),
    )

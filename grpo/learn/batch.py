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

import torch
from torch import Tensor

from grpo.learn.loss import token_weights
from grpo.model.varlen_attention import flat_indices, to_device
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


@dataclass(frozen=True)
class _Row:
    """A completion with what the loss needs of it."""

    sample: int
    completion: Completion
    advantage: float | list[float]
    weight: float


@dataclass(frozen=True)
class _Part:
    """Some rows of a group: the smallest unit that is moved between micro-batches."""

    group: Group
    rows: list[_Row]

    @property
    def tokens(self) -> int:
        """The number of tokens that are run, the prompt's included."""
        completions = sum(len(row.completion.tokens) for row in self.rows)
        return len(self.group.prompt) + completions


@dataclass(frozen=True)
class BatchSettings:
    """How a step is cut, e.g. ``BatchSettings("dapo", max_length=32, micro_tokens=4096)``.

    - `kind`, `max_length` (tokens): arguments of `loss.token_weights`;
    - `micro_tokens`: the most tokens of a micro-batch, each prompt counted once; 0: no bound;
    - `masks_truncated`: truncated completions are left out, and the weights are those of a step
      without them.
    """

    kind: str
    max_length: int
    micro_tokens: int = 0
    masks_truncated: bool = False


def micro_batches(
    groups: Sequence[Group],
    settings: BatchSettings,
    *,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the step's `groups`, whose advantages are filled in, in micro-batches.

    A group that is too large is cut into parts, but never within a row. Each of several `ranks`
    gets some of the rows, with about as many tokens as the others; which ones does not depend on
    `micro_tokens`, which may differ between ranks. The weights are always those of the whole step.
    """
    micro_tokens = settings.micro_tokens
    rows = _rows(groups, settings)
    local = _assign(_parts_to_deal(groups, rows, ranks), rank, ranks)
    parts = [piece for part in local for piece in _cut_to_fit(part, micro_tokens)]

    bundle: list[_Part] = []
    tokens = 0
    for part in parts:
        is_full = bool(micro_tokens) and tokens + part.tokens > micro_tokens
        if bundle and (is_full or len(part.rows) != len(bundle[0].rows)):
            yield _micro_batch(bundle, device)
            bundle, tokens = [], 0
        bundle.append(part)
        tokens += part.tokens

    if bundle:
        yield _micro_batch(bundle, device)


def _rows(groups: Sequence[Group], settings: BatchSettings) -> list[list[_Row]]:
    """Return the rows of each group that count, with their weights."""
    kept = [
        [
            (sample, completion)
            for sample, completion in enumerate(group.completions)
            if not (settings.masks_truncated and completion.is_truncated)
        ]
        for group in groups
    ]
    lengths = torch.tensor([len(completion.tokens) for rows in kept for _, completion in rows])
    weights_C = token_weights(settings.kind, lengths, max_length=settings.max_length)
    weights = iter(weights_C.tolist())

    by_group = []
    for group, rows in zip(groups, kept, strict=True):
        assert len(group.advantages) == len(group.completions)
        by_group.append(
            [
                _Row(sample, completion, group.advantages[sample], next(weights))
                for sample, completion in rows
            ]
        )
    return by_group


def _parts_to_deal(
    groups: Sequence[Group], by_group: Sequence[list[_Row]], ranks: int
) -> list[_Part]:
    """Return the groups, whose rows are given, as parts that can be dealt to the `ranks`.

    With fewer groups than ranks they are cut, so that no rank is idle. All ranks must find the same
    parts, so these do not depend on the memory that one of them has.
    """
    parts = []
    for group, rows in zip(groups, by_group, strict=True):
        parts += _pieces(_Part(group, rows), -(-len(rows) * len(groups) // ranks))
    return parts


def _cut_to_fit(part: _Part, micro_tokens: int) -> list[_Part]:
    """Return the part cut into parts of at most `micro_tokens` tokens (0: no bound)."""
    if not micro_tokens:
        return [part]
    longest = max(len(row.completion.tokens) for row in part.rows)
    return _pieces(part, max(1, (micro_tokens - len(part.group.prompt)) // longest))


def _pieces(part: _Part, most: int) -> list[_Part]:
    """Return the part cut into parts of about the same size, of at most `most` rows each."""
    rows = part.rows
    if not rows:
        return []
    size = -(-len(rows) // -(-len(rows) // min(len(rows), most)))
    return [_Part(part.group, rows[start : start + size]) for start in range(0, len(rows), size)]


def _assign(parts: list[_Part], rank: int, ranks: int) -> list[_Part]:
    """Return this rank's parts, in order.

    Largest first, each part goes to the rank that has the fewest tokens so far.
    """
    sizes = [part.tokens for part in parts]
    loads = [0] * ranks
    local = []
    for number in sorted(range(len(parts)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        loads[least] += sizes[number]
        if least == rank:
            local.append(number)
    return [parts[number] for number in sorted(local)]


def _micro_batch(bundle: Sequence[_Part], device: torch.device) -> MicroBatch:
    """Return the parts of a `bundle` as one micro-batch."""
    rows = [row for part in bundle for row in part.rows]
    lengths = [len(row.completion.tokens) for row in rows]
    T = max(lengths)

    mask_RT = torch.arange(T) < torch.tensor(lengths)[:, None]
    tokens_RT = _padded([row.completion.tokens for row in rows], mask_RT)
    old_RT = _padded([row.completion.logprobs for row in rows], mask_RT)
    temperatures = [part.group.temperature for part in bundle for _ in part.rows]
    weights = [row.weight for row in rows]
    sampled = [not row.completion.is_demonstration for row in rows]

    return MicroBatch(
        prompts=[part.group.prompt for part in bundle],
        completions=[row.completion.tokens for row in rows],
        row_ids=[(part.group.index, row.sample) for part in bundle for row in part.rows],
        tokens_RT=to_device(tokens_RT, device),
        mask_RT=to_device(mask_RT, device),
        places_M=flat_indices(lengths, T, device),
        old_RT=to_device(old_RT, device),
        sampled_R=None if all(sampled) else to_device(torch.tensor(sampled), device),
        advantages=to_device(_advantages(rows, mask_RT), device),
        temperatures_R=to_device(torch.tensor(temperatures), device),
        weights_R=to_device(torch.tensor(weights, dtype=torch.float64), device),
    )


def _advantages(rows: Sequence[_Row], mask_RT: Tensor) -> Tensor:
    """Return the advantages (R,), or (R, T) if each token has its own."""
    of_tokens = [row.advantage for row in rows if isinstance(row.advantage, list)]
    if of_tokens:
        assert len(of_tokens) == len(rows)
        return _padded(of_tokens, mask_RT)
    return torch.tensor([row.advantage for row in rows])


def _padded(rows: Sequence[Sequence[float]], mask_RT: Tensor) -> Tensor:
    """Return rows of numbers as a tensor (R, T), with 0 where the mask is False."""
    flat = torch.tensor(list(chain.from_iterable(rows)))
    return flat.new_zeros(mask_RT.shape).masked_scatter_(mask_RT, flat)

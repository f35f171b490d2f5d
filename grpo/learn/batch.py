"""Groups to micro-batches of tensors, without an effect on the gradient.

The weight of every token is computed from the whole step (`loss.token_weights`) before anything is
cut, so the losses and gradients of all micro-batches add up to those of the step. A group's prompt
is run once in a micro-batch, not once for each completion.

Shapes: P prompts; R rows (completions), of which each prompt of a micro-batch has equally many; T
tokens; M tokens of all rows without padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from grpo.learn.loss import token_weights
from grpo.model.forward import flat_indices, to_device
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
class _Part:
    """Some rows of a group: the smallest unit that is moved between micro-batches."""

    group: Group
    samples: list[int]
    weights: list[float]  # of each token of these rows

    @property
    def rows(self) -> list[Completion]:
        return [self.group.completions[sample] for sample in self.samples]

    @property
    def tokens(self) -> int:
        """The number of tokens that are run, the prompt's included."""
        return len(self.group.prompt) + sum(len(row.tokens) for row in self.rows)

    def cut(self, most: int) -> list["_Part"]:
        """Return the part cut into parts of about the same size, of at most `most` rows each."""
        count = len(self.samples)
        size = -(-count // -(-count // min(count, most)))
        return [
            _Part(self.group, self.samples[i : i + size], self.weights[i : i + size])
            for i in range(0, count, size)
        ]

    def cut_to_fit(self, micro_tokens: int) -> list["_Part"]:
        """Return the part cut into parts of at most `micro_tokens` tokens, or of a single row."""
        longest = max(len(row.tokens) for row in self.rows)
        return self.cut(max(1, (micro_tokens - len(self.group.prompt)) // longest))


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
    parts = _parts(groups, kind, max_length)

    # With fewer groups than ranks they are cut, so that no rank is idle. All ranks must find the
    # same parts, so these do not depend on the memory that one of them has.
    parts = [
        piece for part in parts for piece in part.cut(-(-len(part.samples) * len(groups) // ranks))
    ]
    parts = _assign(parts, rank, ranks)
    if micro_tokens:
        parts = [piece for part in parts for piece in part.cut_to_fit(micro_tokens)]

    bundle: list[_Part] = []
    tokens = 0
    for part in parts:
        is_full = bool(micro_tokens) and tokens + part.tokens > micro_tokens
        if bundle and (is_full or len(part.samples) != len(bundle[0].samples)):
            yield _micro_batch(bundle, device)
            bundle, tokens = [], 0
        bundle.append(part)
        tokens += part.tokens

    if bundle:
        yield _micro_batch(bundle, device)


def _parts(groups: Sequence[Group], kind: str, max_length: int) -> list[_Part]:
    """Return the groups, each with the weights of its rows."""
    lengths = [len(row.tokens) for group in groups for row in group.completions]
    weights = iter(token_weights(kind, torch.tensor(lengths), max_length=max_length).tolist())
    return [
        _Part(
            group,
            list(range(len(group.completions))),
            list(islice(weights, len(group.completions))),
        )
        for group in groups
    ]


def _assign(parts: list[_Part], rank: int, ranks: int) -> list[_Part]:
    """Return this rank's parts, in order.

    Largest first, each part goes to the rank that has the fewest tokens so far.
    """
    loads = [0] * ranks
    local = []
    for number in sorted(range(len(parts)), key=lambda i: -parts[i].tokens):
        least = loads.index(min(loads))
        loads[least] += parts[number].tokens
        if least == rank:
            local.append(number)
    return [parts[number] for number in sorted(local)]


def _micro_batch(bundle: Sequence[_Part], device: torch.device) -> MicroBatch:
    """Return the parts of a `bundle` as one micro-batch."""
    rows = [row for part in bundle for row in part.rows]
    lengths = [len(row.tokens) for row in rows]
    T = max(lengths)
    mask_RT = torch.arange(T) < torch.tensor(lengths)[:, None]

    def of_rows(values: list, dtype: torch.dtype | None = None) -> Tensor:
        """Return one value a row (R,), or a list of them a row (R, T) with 0 at padding."""
        if isinstance(values[0], Sequence):
            flat = torch.tensor(list(chain.from_iterable(values)))
            padded = flat.new_zeros(mask_RT.shape).masked_scatter_(mask_RT, flat)
            return to_device(padded, device)
        return to_device(torch.tensor(values, dtype=dtype), device)

    each = [(part.group, sample) for part in bundle for sample in part.samples]
    sampled = [not row.is_demonstration for row in rows]
    return MicroBatch(
        prompts=[part.group.prompt for part in bundle],
        completions=[row.tokens for row in rows],
        row_ids=[(group.index, sample) for group, sample in each],
        tokens_RT=of_rows([row.tokens for row in rows]),
        mask_RT=to_device(mask_RT, device),
        places_M=flat_indices(lengths, T, device),
        old_RT=of_rows([row.logprobs for row in rows]),
        sampled_R=None if all(sampled) else of_rows(sampled),
        advantages=of_rows([group.advantages[sample] for group, sample in each]),
        temperatures_R=of_rows([group.temperature for group, _ in each]),
        weights_R=of_rows([w for part in bundle for w in part.weights], torch.float64),
    )

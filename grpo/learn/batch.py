"""Groups to micro-batches of tensors, and the log-probabilities of their completions.

The weight of every token is computed from the whole step (`loss.token_weights`) before anything is
cut, so the losses and gradients of all micro-batches add up to those of the step. A group's prompt
is run once in a micro-batch, not once for each completion.

The log-probabilities are computed in bounded memory. For a vocabulary of 128,256 and 16 completions
of 1,000 tokens the float32 logits alone take 8.2 GB, and autograd keeps several tensors of that
size. So the output layer is applied to a chunk of tokens at a time, and applied again in the
backward pass (gradient checkpointing, arXiv:1604.06174). A CPU has more memory than time: it keeps
one tensor of N x V if that is small.

Shapes: P prompts; R rows (completions), of which each prompt of a micro-batch has equally many; T
tokens of a row; M tokens of all rows without padding, U of them after leaving out what rows have in
common (see `PaddedBatch.distinct`); N tokens, n of a chunk; V vocabulary; E hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from grpo.learn.loss import token_weights
from grpo.model.policy import Batch, Policy, flat_indices, linear_no_grad, to_device
from grpo.records import Completion, Group

# Logits (n, V), targets (n,) -> logits (n, V), excluded entries -inf; targets never are, if given.
Truncate = Callable[[Tensor, Tensor | None], Tensor]

GPU_CHUNK = 1024  # tokens of a chunk on a GPU
CPU_CHUNK_LOGITS = 1 << 20  # logits of a chunk on a CPU: 4 MB in float32, which stay in its cache
KEPT = 1 << 28  # bytes of probabilities that a CPU may keep for the backward pass
BLOCK = 4096  # columns that a CUDA kernel handles at once


class _Row(NamedTuple):
    """A completion of the step, and the weight of each of its tokens."""

    group: Group
    sample: int
    completion: Completion
    weight: float


class MicroBatch:
    """Some completions of P prompts, padded on the right to T tokens: the parts of a `bundle`."""

    def __init__(self, bundle: list[list[_Row]], device: torch.device):
        rows = [row for part in bundle for row in part]
        completions = [row.completion for row in rows]
        lengths = [len(completion.tokens) for completion in completions]

        def of_rows(values: list, dtype: torch.dtype | None = None) -> Tensor:
            """Return one value a row (R,), or a list of them a row (R, T) with 0 at padding."""
            if isinstance(values[0], Sequence):
                padded = pad_sequence([*map(torch.tensor, values)], batch_first=True)
                return to_device(padded, device)
            return to_device(torch.tensor(values, dtype=dtype), device)

        self.prompts = [part[0].group.prompt for part in bundle]
        self.completions = [completion.tokens for completion in completions]  # without padding
        # Of each row: the indices of its group and of its sample.
        self.row_ids = [(row.group.index, row.sample) for row in rows]
        (self.temperature,) = {row.group.temperature for row in rows}  # a step has one

        self.tokens_RT = of_rows(self.completions)
        # True at tokens, False at padding.
        is_token_RT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        self.mask_RT = to_device(is_token_RT, device)
        # The index of each token in the flattened (R, T), row after row. To compute it from the
        # mask, the host would have to wait for the GPU.
        self.places_M = flat_indices(lengths, max(lengths), device)

        # Log-probabilities under the policy that sampled.
        self.old_RT = of_rows([completion.logprobs for completion in completions])
        # False at demonstrations; None if there are none.
        sampled = [not completion.is_demonstration for completion in completions]
        self.sampled_R = None if all(sampled) else of_rows(sampled)
        # (R,), or (R, T) with 0 at padding if each token has its own.
        self.advantages = of_rows([row.group.advantages[row.sample] for row in rows])
        # Of each token of a row.
        self.weights_R = of_rows([row.weight for row in rows], torch.float64)


def micro_batches(
    groups: Sequence[Group],
    kind: str,
    *,
    max_length: int,
    device: torch.device,
    micro_tokens: int = 1 << 40,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the step's `groups`, whose advantages are filled in, in micro-batches.

    `kind` and `max_length` are those of `loss.token_weights`. A micro-batch has at most
    `micro_tokens` tokens, each prompt counted once; a group that is too large is cut between rows.
    Each of several `ranks` gets rows with about as many tokens as the others.
    """
    lengths = [len(row.tokens) for group in groups for row in group.completions]
    weights = iter(token_weights(kind, torch.tensor(lengths), max_length=max_length).tolist())
    parts = [
        [_Row(group, i, each, next(weights)) for i, each in enumerate(group.completions)]
        for group in groups
    ]

    # With fewer groups than ranks they are cut, so that no rank is idle. All ranks must find the
    # same parts, so these do not depend on `micro_tokens`, which may differ between ranks.
    parts = [piece for part in parts for piece in _cut(part, -(-len(part) * len(groups) // ranks))]
    pieces = []
    for part in _assign(parts, rank, ranks):
        longest = max(len(row.completion.tokens) for row in part)
        pieces += _cut(part, max(1, (micro_tokens - len(part[0].group.prompt)) // longest))

    bundle: list[list[_Row]] = []
    for part in pieces:
        is_full = sum(map(_tokens, [*bundle, part])) > micro_tokens
        if bundle and (is_full or len(part) != len(bundle[0])):
            yield MicroBatch(bundle, device)
            bundle = []
        bundle.append(part)
    if bundle:
        yield MicroBatch(bundle, device)


def idle_batch(groups: Sequence[Group], device: torch.device) -> MicroBatch:
    """Return a micro-batch without weight, for a rank that has none left while others have."""
    group = groups[0]
    return MicroBatch([[_Row(group, 0, group.completions[0], 0.0)]], device)


def _tokens(part: list[_Row]) -> int:
    """Return the number of tokens that are run, those of the prompt once."""
    return len(part[0].group.prompt) + sum(len(row.completion.tokens) for row in part)


def _cut(part: list[_Row], most: int) -> list[list[_Row]]:
    """Return the part cut into parts of about the same size, of at most `most` rows each."""
    count = len(part)
    size = -(-count // -(-count // min(count, most)))
    return [part[i : i + size] for i in range(0, count, size)]


def _assign(parts: list[list[_Row]], rank: int, ranks: int) -> list[list[_Row]]:
    """Return this rank's parts: largest first, each goes to the rank with the fewest tokens."""
    loads = [0] * ranks
    local = []
    for number in sorted(range(len(parts)), key=lambda i: -_tokens(parts[i])):
        least = loads.index(min(loads))
        loads[least] += _tokens(parts[number])
        if least == rank:
            local.append(number)
    return [parts[number] for number in sorted(local)]


def completion_logprobs(
    policy: Policy,
    batch: MicroBatch,
    truncate: Truncate | None = None,
    packing: Batch | None = None,
    has_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (nats) of the completions' tokens, (R, T) each, 0 at
    padding; `packing` is the result of `pack` for this batch, if there is one already.
    """
    R, T = batch.tokens_RT.shape
    places_M = batch.places_M

    # The model runs without padding, so everything is flat until the end.
    packing = packing or policy.forward.pack(batch.prompts, batch.completions)
    logp_U, entropy_U = token_logprobs(
        policy.forward.predict(packing),
        policy.head,
        packing.distinct(batch.tokens_RT.take(places_M)),
        batch.temperature,
        truncate,
        has_entropy_gradient=has_entropy_gradient,
        kernels=policy.kernels,
        products=policy.gradient_products,
    )

    zeros = torch.zeros(R * T, device=places_M.device, dtype=logp_U.dtype)
    logp_RT = zeros.scatter(0, places_M, packing.of_tokens(logp_U)).view(R, T)
    entropy_RT = zeros.scatter(0, places_M, packing.of_tokens(entropy_U)).view(R, T)
    return logp_RT, entropy_RT


def token_logprobs(
    hidden_NE: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float,
    truncate: Truncate | None = None,
    *,
    has_entropy_gradient: bool = False,
    kernels: Any = None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden) / temperature) at `targets_N`, and the entropy in nats, (N,)
    each; those of the truncated distribution if it is one.

    Both are float32 even if the head is in lower precision, and float64 if the head is. The entropy
    is detached, unless it `has_entropy_gradient`. `truncate` (top-p) gets the logits already
    divided by the temperature, and never excludes a target. `kernels` and `products` are the
    policy's (`gradient_products`); `chunk` is a number of tokens.
    """
    if chunk is None:
        vocabulary = getattr(head, "out_features", 4096)
        chunk = GPU_CHUNK if hidden_NE.is_cuda else max(16, CPU_CHUNK_LOGITS // vocabulary)

    is_plain = truncate is None and not has_entropy_gradient
    if is_plain and type(head) is nn.Linear and head.bias is None:
        # Few passes over the logits, for the usual case.
        given = hidden_NE, head.weight, targets_N, temperature
        return _LinearLogprobs.apply(*given, chunk, kernels, products, torch.is_grad_enabled())

    # For anything else autograd differentiates chunk by chunk.
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden_nE,
            head,
            targets_n,
            temperature,
            truncate,
            has_entropy_gradient,
            use_reentrant=False,
        )
        for hidden_nE, targets_n in zip(hidden_NE.split(chunk), targets_N.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LinearLogprobs(torch.autograd.Function):
    """`_chunk_logprobs` of a linear head without bias, with few passes over the logits.

    With p = softmax(logits / temperature), the gradient of a target's log-probability with respect
    to the logits is (onehot(target) - p) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        kernels: Any,
        products: Callable[[], AbstractContextManager[None]],
        is_learning: bool,
    ) -> tuple[Tensor, Tensor]:
        N, V = len(hidden_NE), len(weight_VE)
        dtype = torch.promote_types(hidden_NE.dtype, torch.float32)
        logprobs_N, entropies_N, lse_N = (hidden_NE.new_empty(N, dtype=dtype) for _ in range(3))

        # A CPU keeps the probabilities for the backward pass; a GPU computes them again.
        is_fused = kernels is not None and dtype == torch.float32
        is_kept = is_learning and not hidden_NE.is_cuda and N * V * dtype.itemsize <= KEPT
        probability_NV = hidden_NE.new_empty(N, V, dtype=dtype) if is_kept else None

        for start in range(0, N, chunk):
            part = slice(start, start + chunk)
            logits_nV = linear_no_grad(hidden_NE[part], weight_VE)
            targets_n = targets_N[part]

            if is_fused:
                # Log-probabilities, entropies and log-sum-exps in one pass.
                outputs = logprobs_N[part], entropies_N[part], lse_N[part]
                kernels.logprobs[(len(targets_n),)](
                    logits_nV, targets_n, temperature, *outputs, V, BLOCK=BLOCK, num_warps=8
                )
                continue

            logits_nV = logits_nV.to(dtype).div_(temperature)
            kept_nV = None if probability_NV is None else probability_NV[part]
            probability_nV = torch.softmax(logits_nV, -1, out=kept_nV)
            all_nV = logits_nV.log_softmax(-1)
            logprobs_N[part] = all_nV.gather(-1, targets_n[:, None])[:, 0]
            entropies_N[part] = -all_nV.mul_(probability_nV).sum(-1)

        lse = lse_N if is_fused else None
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, lse, probability_NV)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.kernels = kernels
        ctx.products = products
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, d_N: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, lse_N, probability_NV = ctx.saved_tensors
        d_hidden_NE = torch.empty_like(hidden_NE)
        d_weight_VE = torch.zeros_like(weight_VE) if ctx.needs_input_grad[1] else None

        for start in range(0, len(hidden_NE), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_nE, targets_n, d_n = hidden_NE[part], targets_N[part], d_N[part]

            # The gradient of the logits.
            if lse_N is not None:
                d_logits_nV = linear_no_grad(hidden_nE, weight_VE)  # still the logits
                V = d_logits_nV.shape[1]
                given = d_logits_nV, targets_n, ctx.temperature, lse_N[part], d_n.contiguous(), V
                grid = (len(targets_n), -(-V // BLOCK))
                ctx.kernels.logprobs_backward[grid](*given, BLOCK=BLOCK, num_warps=8)
            else:
                if probability_NV is not None:
                    probability_nV = probability_NV[part]
                else:
                    logits_nV = linear_no_grad(hidden_nE, weight_VE).to(d_n.dtype)
                    probability_nV = logits_nV.div_(ctx.temperature).softmax(-1)

                scale_n1 = (d_n / ctx.temperature)[:, None]
                d_logits_nV = probability_nV.mul_(-scale_n1)
                d_logits_nV = d_logits_nV.scatter_add_(-1, targets_n[:, None], scale_n1)
                d_logits_nV = d_logits_nV.to(hidden_nE.dtype)

            # The gradients of the linear layer: dX = dY W, and dW = dY' X summed over the chunks.
            with ctx.products():
                torch.mm(d_logits_nV, weight_VE, out=d_hidden_NE[part])
                if d_weight_VE is not None:
                    d_weight_VE.addmm_(d_logits_nV.t(), hidden_nE)

        return d_hidden_NE, d_weight_VE, *6 * (None,)


def _chunk_logprobs(
    hidden_nE: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_n: Tensor,
    temperature: float,
    truncate: Truncate | None,
    has_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of a chunk, (n,) each, by ordinary operations."""
    logits_nV = head(hidden_nE)
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logits_nV = logits_nV / temperature
    if truncate is not None:
        logits_nV = truncate(logits_nV, targets_n)

    all_nV = logits_nV.log_softmax(-1)
    logprobs_n = all_nV.gather(-1, targets_n[:, None])[:, 0]

    # The entropy comes last, because the recomputation stops at the last tensor that the backward
    # pass needs. entr(p) = -p log p has entr(0) = 0, where p * log p is NaN for excluded tokens.
    probability_nV = (all_nV if has_entropy_gradient else all_nV.detach()).exp()
    # The gradient of entr at 0 is infinite; excluded tokens shall have none.
    if has_entropy_gradient:
        probability_nV = probability_nV.masked_fill(probability_nV == 0, 0.0)
    return logprobs_n, torch.special.entr(probability_nV).sum(-1)

"""Log-probabilities of given tokens and entropies of their distributions, in bounded memory.

For a vocabulary of 128,256 and 16 completions of 1,000 tokens the float32 logits alone take 8.2 GB,
and autograd keeps several tensors of that size. So the head is applied to a chunk of tokens at a
time, and applied again in the backward pass (gradient checkpointing, arXiv:1604.06174). One or two
tensors of n x V exist at once instead of three of N x V, for one more matrix product with the head.
A CPU has more memory than time: it keeps one tensor of N x V if that is small.

Shapes: N tokens (all completions of a micro-batch, flat), n tokens of a chunk, V vocabulary, E
hidden size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.model.policy import linear_no_grad

# Hidden states (n, E) -> logits (n, V).
Head = Callable[[Tensor], Tensor]

# Logits (n, V), targets (n,) -> logits (n, V), excluded entries -inf.
Truncate = Callable[[Tensor, Tensor], Tensor]

# Tokens of a chunk on a GPU.
GPU_CHUNK = 1024

# Logits of a chunk on a CPU: 4 MB in float32, which stay in its cache.
CPU_CHUNK_LOGITS = 1 << 20

# Bytes of probabilities that a CPU may keep for the backward pass.
KEPT = 1 << 28

# Columns that a CUDA kernel handles at once.
BLOCK = 4096


def token_logprobs(
    hidden_NE: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature_N: Tensor,
    truncate: Truncate | None = None,
    *,
    has_entropy_gradient: bool = False,
    kernels: Any = None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden) / temperature) at `targets_N`, and the entropy in nats, (N,)
    each; those of the truncated distribution if it is one.

    Both are float32 even if the head is in lower precision, and float64 if the head is. Gradients
    flow through the log-probabilities to `hidden_NE` and to the parameters of `head`; the entropy
    is detached, unless it `has_entropy_gradient`. `head` acts on each token by itself, as a linear
    layer does, with LoRA or without. `truncate` (top-p) gets the logits already divided by the
    temperature, and never excludes a target.

    `kernels` are those of the policy, for a GPU, and `products` is its context for the backward
    pass's products of matrices. `chunk` is a number of tokens.
    """
    if chunk is None:
        vocabulary = getattr(head, "out_features", 4096)
        chunk = GPU_CHUNK if hidden_NE.is_cuda else max(16, CPU_CHUNK_LOGITS // vocabulary)

    is_plain = truncate is None and not has_entropy_gradient
    if is_plain and type(head) is nn.Linear and head.bias is None:
        # Few passes over the logits, for the usual case.
        given = hidden_NE, head.weight, targets_N, temperature_N
        return _LinearLogprobs.apply(*given, chunk, kernels, products, torch.is_grad_enabled())

    # For anything else autograd differentiates chunk by chunk.
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden_nE,
            head,
            targets_n,
            temperature_n,
            truncate,
            has_entropy_gradient,
            use_reentrant=False,
        )
        for hidden_nE, targets_n, temperature_n in zip(
            hidden_NE.split(chunk), targets_N.split(chunk), temperature_N.split(chunk), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LinearLogprobs(torch.autograd.Function):
    """`_chunk_logprobs` of a linear head without bias for all chunks, with few passes over the
    logits.

    With p = softmax(logits / temperature), the gradient of a target's log-probability with respect
    to the logits is (onehot(target) - p) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        chunk: int,
        kernels: Any,
        products: Callable[[], AbstractContextManager[None]],
        is_learning: bool,
    ) -> tuple[Tensor, Tensor]:
        N, V = len(hidden_NE), len(weight_VE)
        dtype = torch.promote_types(hidden_NE.dtype, torch.float32)
        temperature_N = temperature_N.to(dtype)
        logprobs_N, entropies_N, lse_N = (hidden_NE.new_empty(N, dtype=dtype) for _ in range(3))

        # A CPU keeps the probabilities for the backward pass; a GPU computes them again.
        is_fused = kernels is not None and dtype == torch.float32
        is_kept = is_learning and not hidden_NE.is_cuda and N * V * dtype.itemsize <= KEPT
        probability_NV = hidden_NE.new_empty(N, V, dtype=dtype) if is_kept else None

        for start in range(0, N, chunk):
            part = slice(start, start + chunk)
            logits_nV = linear_no_grad(hidden_NE[part], weight_VE)
            targets_n, temperature_n = targets_N[part], temperature_N[part]

            if is_fused:
                # Log-probabilities, entropies and log-sum-exps in one pass.
                outputs = logprobs_N[part], entropies_N[part], lse_N[part]
                kernels.logprobs[(len(targets_n),)](
                    logits_nV, targets_n, temperature_n, *outputs, V, BLOCK=BLOCK, num_warps=8
                )
                continue

            logits_nV = logits_nV.to(dtype).div_(temperature_n[:, None])
            kept_nV = None if probability_NV is None else probability_NV[part]
            probability_nV = torch.softmax(logits_nV, -1, out=kept_nV)
            all_nV = logits_nV.log_softmax(-1)
            logprobs_N[part] = all_nV.gather(-1, targets_n[:, None])[:, 0]
            entropies_N[part] = -all_nV.mul_(probability_nV).sum(-1)

        lse = lse_N if is_fused else None
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, temperature_N, lse, probability_NV)
        ctx.chunk = chunk
        ctx.kernels = kernels
        ctx.products = products
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, d_N: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, temperature_N, lse_N, probability_NV = ctx.saved_tensors
        d_hidden_NE = torch.empty_like(hidden_NE)
        d_weight_VE = torch.zeros_like(weight_VE) if ctx.needs_input_grad[1] else None

        for start in range(0, len(hidden_NE), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_nE, targets_n = hidden_NE[part], targets_N[part]
            temperature_n, d_n = temperature_N[part], d_N[part]

            # The gradient of the logits.
            if lse_N is not None:
                d_logits_nV = linear_no_grad(hidden_nE, weight_VE)  # still the logits
                V = d_logits_nV.shape[1]
                given = d_logits_nV, targets_n, temperature_n, lse_N[part], d_n.contiguous(), V
                grid = (len(targets_n), -(-V // BLOCK))
                ctx.kernels.logprobs_backward[grid](*given, BLOCK=BLOCK, num_warps=8)
            else:
                if probability_NV is not None:
                    probability_nV = probability_NV[part]
                else:
                    logits_nV = linear_no_grad(hidden_nE, weight_VE).to(d_n.dtype)
                    probability_nV = logits_nV.div_(temperature_n[:, None]).softmax(-1)

                scale_n1 = (d_n / temperature_n)[:, None]
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
    head: Head,
    targets_n: Tensor,
    temperature_n: Tensor,
    truncate: Truncate | None,
    has_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of a chunk, (n,) each, by ordinary operations."""
    logits_nV = head(hidden_nE)
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logits_nV = logits_nV / temperature_n.to(logits_nV.dtype)[:, None]
    if truncate is not None:
        logits_nV = truncate(logits_nV, targets_n)

    all_nV = logits_nV.log_softmax(-1)
    logprobs_n = all_nV.gather(-1, targets_n[:, None])[:, 0]

    # The entropy comes last, because the recomputation stops at the last tensor that the backward
    # pass needs. entr(p) = -p log p has entr(0) = 0, where p * log p is NaN for excluded tokens.
    if not has_entropy_gradient:
        return logprobs_n, torch.special.entr(all_nV.detach().exp()).sum(-1)

    # The gradient of entr at 0 is infinite; excluded tokens shall have none.
    probability_nV = all_nV.exp()
    probability_nV = probability_nV.masked_fill(probability_nV == 0, 0.0)
    return logprobs_n, torch.special.entr(probability_nV).sum(-1)

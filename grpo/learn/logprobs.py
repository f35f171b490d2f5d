"""Log-probabilities of given tokens and entropies of their distributions, without ever holding all
the logits.

For a vocabulary of 128,256 and 16 completions of 1,000 tokens the float32 logits alone are 8.2 GB,
and autograd keeps several tensors of that size. So the head is applied to `chunk` tokens at a time
and applied again in the backward pass (gradient checkpointing, arXiv:1604.06174): one or two
tensors of chunk x V live at once instead of three of N x V, for one more product with the head. On
a CPU, where time is dearer than memory, one of N x V is kept if it is small.

Shapes: N tokens (all completions of a micro-batch, flat), V vocabulary, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.model.matmul import bf16_matmul, linear_no_grad

Head = Callable[[Tensor], Tensor]  # hidden (n, H) -> logits (n, V)
Truncate = Callable[
    [Tensor, Tensor], Tensor
]  # logits (n, V), targets (n,) -> logits (n, V), excluded entries -inf
KEPT = 1 << 28  # bytes of probabilities that a CPU may keep for the backward pass


def token_logprobs(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    chunk: int = 0,
    truncate: Truncate | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden) / temperature) at `targets_N`, and the entropy in nats, (N,)
    each.

    Both are float32 whatever the head's precision (float64 from a float64 head). Gradients flow
    through the log-probabilities to `hidden_NH` and to the parameters of `head`; the entropy is
    detached. `head` must act on each token by itself, as a linear layer does, with LoRA or
    without. `truncate` (top-k, top-p) gets the logits already divided by the temperature and must
    keep the targets: then log-probability and entropy are of what it leaves. `chunk` 0 is 1,024 on
    a GPU, and on a CPU as many as keep the logits within its cache.
    """
    if not chunk:
        chunk = (
            1024 if hidden_NH.is_cuda else max(16, (1 << 20) // getattr(head, "out_features", 4096))
        )
    if truncate is None and type(head) is nn.Linear:
        return _LinearLogprobs.apply(
            hidden_NH,
            head.weight,
            head.bias,
            targets_N,
            temperature_N,
            chunk,
            torch.is_grad_enabled(),
        )
    chunks = zip(
        hidden_NH.split(chunk), targets_N.split(chunk), temperature_N.split(chunk), strict=True
    )
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden_nH,
            head,
            targets_n,
            temperature_n,
            truncate,
            use_reentrant=False,
        )
        for hidden_nH, targets_n, temperature_n in chunks
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LinearLogprobs(torch.autograd.Function):
    """`_chunk_logprobs` of a linear head, chunk by chunk, in few passes over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        chunk: int,
        is_learning: bool,
    ) -> tuple[Tensor, Tensor]:
        (N, _), V, like = (
            hidden_NH.shape,
            len(weight_VH),
            torch.promote_types(hidden_NH.dtype, torch.float32),
        )
        temperature_N = temperature_N.to(like)
        logprobs_N, entropies_N, lse_N = (hidden_NH.new_empty(N, dtype=like) for _ in range(3))
        is_fused = hidden_NH.is_cuda and like == torch.float32
        is_kept = is_learning and not hidden_NH.is_cuda and N * V * like.itemsize <= KEPT
        probability_NV = hidden_NH.new_empty(N, V, dtype=like) if is_kept else None
        for part in _parts(N, chunk):
            logits_nV, targets_n, temperature_n = (
                linear_no_grad(hidden_NH[part], weight_VH, bias_V),
                targets_N[part],
                temperature_N[part],
            )
            if is_fused:
                from grpo.model import kernels

                kernels.logprobs[(len(logits_nV),)](
                    logits_nV,
                    targets_n,
                    temperature_n,
                    logprobs_N[part],
                    entropies_N[part],
                    lse_N[part],
                    V,
                    BLOCK=4096,
                    num_warps=8,
                )
            else:
                logits_nV = logits_nV.to(like).div_(temperature_n[:, None])
                kept_nV = None if probability_NV is None else probability_NV[part]
                probability_nV = torch.softmax(logits_nV, -1, out=kept_nV)
                all_nV = logits_nV.log_softmax(-1)
                logprobs_N[part] = all_nV.gather(-1, targets_n[:, None])[:, 0]
                entropies_N[part] = -all_nV.mul_(probability_nV).sum(-1)
        ctx.save_for_backward(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            temperature_N,
            lse_N if is_fused else None,
            probability_NV,
        )
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, d_N: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, lse_N, probability_NV = (
            ctx.saved_tensors
        )
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_hidden_NH = torch.empty_like(hidden_NH) if for_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH) if for_weight else None
        d_bias_V = torch.zeros_like(bias_V) if for_bias else None
        for part in _parts(len(hidden_NH), ctx.chunk):
            hidden_nH, targets_n, temperature_n, d_n = (
                hidden_NH[part],
                targets_N[part],
                temperature_N[part],
                d_N[part],
            )
            if lse_N is not None:
                from grpo.model import kernels

                d_logits_nV = linear_no_grad(hidden_nH, weight_VH, bias_V)  # the logits as yet
                n, V = d_logits_nV.shape
                kernels.logprobs_backward[(n, -(-V // 4096))](
                    d_logits_nV,
                    targets_n,
                    temperature_n,
                    lse_N[part],
                    d_n.contiguous(),
                    V,
                    BLOCK=4096,
                    num_warps=8,
                )
            else:
                scale_n1 = (d_n / temperature_n)[:, None]
                probability_nV = (
                    probability_NV[part]
                    if probability_NV is not None
                    else linear_no_grad(hidden_nH, weight_VH, bias_V)
                    .to(d_n.dtype)
                    .div_(temperature_n[:, None])
                    .softmax(-1)
                )
                d_logits_nV = (
                    probability_nV.mul_(-scale_n1)
                    .scatter_add_(-1, targets_n[:, None], scale_n1)
                    .to(hidden_nH.dtype)
                )
            with bf16_matmul(d_logits_nV):
                if d_hidden_NH is not None:
                    torch.mm(d_logits_nV, weight_VH, out=d_hidden_NH[part])
                if d_weight_VH is not None:
                    d_weight_VH.addmm_(d_logits_nV.t(), hidden_nH)
            if d_bias_V is not None:
                d_bias_V += d_logits_nV.sum(0)
        return d_hidden_NH, d_weight_VH, d_bias_V, None, None, None, None


def _parts(N: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, N, chunk)]


def _chunk_logprobs(
    hidden_nH: Tensor,
    head: Head,
    targets_n: Tensor,
    temperature_n: Tensor,
    truncate: Truncate | None,
) -> tuple[Tensor, Tensor]:
    logits_nV = head(hidden_nH)
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logits_nV = logits_nV / temperature_n.to(logits_nV.dtype)[:, None]
    if truncate is not None:
        logits_nV = truncate(logits_nV, targets_n)
    all_nV = logits_nV.log_softmax(-1)
    logprobs_n = all_nV.gather(-1, targets_n[:, None])[:, 0]
    # Last, because the recomputation stops at the last tensor that the backward pass needs.
    # entr(p) = -p log p, and entr(0) = 0, where p * log p would be NaN for what `truncate`
    # excluded.
    return logprobs_n, torch.special.entr(all_nV.detach().exp()).sum(-1)
